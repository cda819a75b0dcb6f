"""Which parameters a backward pass will reach, found by a walk of the autograd graph.

The leaves below a sharded tensor are known from the calls that made it. What remains are plain
tensors before such calls and after them (a computed weight, a head after `full_tensor()`). Their
part of the graph is walked; the nodes where a walk has started are marked with what it has found,
and the next walk ends there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from pydist import marks
from pydist.gradients.leaf import leaf_of

if TYPE_CHECKING:
    from pydist.mesh import Mesh

_MARK = "pydist mesh"
_HISTORIES = "pydist histories"
WHOLE, USED_IN = "pydist whole", "pydist used in"
"""Marks of nodes: all ranks have what comes from it; and the mesh with whose shards it was used."""
_functions: Any = torch._C._functions


class Histories(NamedTuple):
    """What has made the tensors that a graph leads to; sets, since the order is a rank's own."""

    wholes: Collection[int]
    """Of plain tensors that all ranks have."""
    shards: Collection[int]
    """Of shards. Other ranks may not have asked for theirs, as where one rank looks at its own."""

    def total(self) -> int:
        """One number for all of them."""
        return sum(self.wholes) + sum(self.shards)


NOTHING = Histories((), ())


def mark(tensor: Tensor, mesh: Mesh, histories: Histories) -> None:
    """Notes that all parameters that a plain tensor was computed from are known to the mesh.

    Args:
        tensor: the plain tensor.
        mesh: the mesh.
        histories: what has made it.
    """
    marks.mark(tensor, _MARK, mesh)
    marks.mark(tensor, _HISTORIES, histories)


def mark_whole(tensor: Tensor) -> None:
    """Notes that all ranks have a plain tensor that comes from sharded ones."""
    marks.mark(tensor, WHOLE, True)


def register_hook(tensor: Tensor, hook: Callable[[Tensor], Tensor | None]) -> RemovableHandle:
    """Registers a hook on a tensor, also on a view whose base was changed past autograd.

    torch makes a new graph node for such a view. Where `register_hook` is what makes it, the
    process crashes (torch 2.13), so the node is asked for before.
    """
    _ = tensor.grad_fn
    handle: RemovableHandle = tensor.register_hook(hook)
    return handle


def walk(
    nodes: Iterable[Any], mesh: Mesh | None = None
) -> tuple[list[Mesh], list[Tensor], Histories]:
    """Finds what the unmarked part of a graph leads to.

    Args:
        nodes: where to start.
        mesh: marks what was walked; by default the first mesh that is found does.

    Returns:
        The meshes whose tensors or parameters are met; the leaves that none of them knows; and
        the histories of the tensors.
    """
    roots = [node for node in nodes if node is not None]
    wholes, shards = set[int](), set[int]()
    meshes: dict[int, Mesh] = {}
    leaves: list[Tensor] = []
    for node, marked in marks.below(roots, _MARK):
        if isinstance(node, _functions.AccumulateGrad):
            leaf = leaf_of(node.variable)
            reducer = None if leaf is None else leaf.reducer()
            if reducer is None:
                leaves.append(node.variable)
            else:
                meshes[id(reducer.mesh)] = reducer.mesh
        elif marked is not None:
            meshes[id(marked)] = marked
            of_node: Histories = node.metadata[_HISTORIES]
            wholes.update(of_node.wholes)
            shards.update(of_node.shards)
    found, histories = list(meshes.values()), Histories(wholes, shards)
    owner = mesh or (found[0] if found else None)
    if owner is not None and len(roots) == 1:
        # Not the nodes below: which of them a walk has met is not the same on all ranks.
        roots[0].metadata.update({_MARK: owner, _HISTORIES: histories})
    leaves.reverse()  # the order in which they were used, as far as the graph tells it
    return found, leaves, histories


def is_reached(parameter: Tensor) -> bool:
    """Whether the running backward reaches a parameter.

    It also reaches a parameter that was frozen after the forward pass: torch adds nothing to its
    gradient then, but calls its hooks.
    """
    trains = parameter.requires_grad
    try:
        if not trains:
            parameter.requires_grad_(True)  # torch names the node only of those that require it
        # Not remembered: `model.double()` gives a parameter another node.
        node = torch.autograd.graph.get_gradient_edge(parameter).node
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        return False  # the engine refuses the question for what it captures
    finally:
        if not trains:
            parameter.requires_grad_(False)
