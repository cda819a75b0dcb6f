"""Registers parameters with the reducer, where sharded tensors meet plain ones.

This module is the observer of sharded tensors (`pydist.tensor.handlers.Observer`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from pydist.gradients import closures, engine, graph, local_uses, replaced, step_check, swap
from pydist.gradients.leaf import leaf_of
from pydist.gradients.local_uses import scale_leaving_gradients
from pydist.gradients.partitioned import PartitionedGradient
from pydist.gradients.reducer import Reducer
from pydist.group_sizes import mark_rows

if TYPE_CHECKING:
    from pydist.group_sizes import GroupSizes
    from pydist.layout import Layout
    from pydist.mesh import Mesh


__all__ = [
    "follow",
    "gradient_placeholder",
    "lead_to",
    "note_part",
    "reducer_of",
    "scale_leaving_gradients",
    "use_as_parameter",
]

gradient_placeholder: type[Tensor] = PartitionedGradient
"""Class of gradients without values, which calls on sharded tensors get unchanged."""


def reducer_of(mesh: Mesh) -> Reducer:
    """Returns the reducer of a mesh, and creates it on first use."""
    return mesh.session.service(Reducer, lambda: _make(mesh))


def _make(mesh: Mesh) -> Reducer:
    engine.install()
    step_check.before_steps(step_check.check_step)
    swap.install()
    step_check.before_steps(closures.agree_before_step)
    reducer = Reducer(mesh)
    mesh.session.at_backward.append(reducer.expect_end_of_backward)
    return reducer


def follow(tensor: Tensor, mesh: Mesh) -> None:
    """Registers a sharded call's plain operand, or the parameters that it was computed from."""
    if mesh.size == 1 or not tensor.requires_grad or not torch.is_grad_enabled():
        return
    known = leaf_of(tensor)
    if known is None or known.reducer() is not mesh.session.find(Reducer):
        reducer_of(mesh).members.follow(tensor)


def use_as_parameter(tensor: Tensor, mesh: Mesh) -> None:
    """Records that a plain tensor is used as the parameter of a layer."""
    if mesh.size == 1 or isinstance(tensor, nn.Parameter) or not tensor.requires_grad:
        return
    if torch.is_grad_enabled():
        replaced.note_use(tensor, reducer_of(mesh))


def note_part(
    part: Tensor,
    leaf: Tensor,
    index: tuple[slice, ...] | None,
    made: Callable[[Tensor], Tensor],
    mesh: Mesh,
) -> None:
    """Records the part of a leaf that a sharded call uses; see `pydist.gradients.aliases`."""
    reducer_of(mesh).aliases.note(part, leaf, index, made)


def lead_to(
    tensor: Tensor, mesh: Mesh, history: int, sizes: GroupSizes, shard_in: Layout | None = None
) -> None:
    """Marks a plain result with its mesh, history and batch; see `Observer.lead_to`."""
    if mesh.size > 1:
        made_by = (history,) if history else ()
        wholes, shards = (made_by, ()) if shard_in is None else ((), made_by)
        if shard_in is None:
            graph.mark_whole(tensor)
        else:
            local_uses.mark_shard(tensor, shard_in)
        graph.mark_mesh(tensor, mesh, graph.Histories(wholes, shards))
    if mesh.data_size > 1:
        mark_rows(tensor, sizes)
