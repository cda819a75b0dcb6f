"""Gradients of plain tensors that a program uses with shards between `to_local` and `from_local`.

Each rank uses such a tensor in full, for its own part of the result, like the weight of a layer. So
each rank's gradient is a part. It is scaled so that the mean over the ranks is the true one, as
`pydist.exchange.adjoints.scale_grad` does in calls on sharded tensors. Here torch's own calls have
made the graph, so the scale is applied to its edges from nodes that depend on shards to nodes that
do not.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from pydist import marks
from pydist.errors import NotSupported
from pydist.exchange.adjoints import is_scale_grad, scale_grad, scaled_back
from pydist.gradients import graph, replaced

if TYPE_CHECKING:
    from pydist.layout import Layout

_MARK = "pydist local use"
_functions: Any = torch._C._functions


class _Use(NamedTuple):
    is_shard: bool
    """Whether the node depends on shards; if not, only on tensors that all ranks have."""
    factor: float | None
    """Ranks of the sample group / replicas of the shards."""


def mark_shard(tensor: Tensor, layout: Layout) -> None:
    """Marks a plain tensor that is this rank's shard in a layout."""
    marks.mark(tensor, _MARK, _Use(is_shard=True, factor=_factor(layout)))


def scale_leaving_gradients(
    local: Tensor, layout: Layout, inputs: Iterable[Tensor | None] = ()
) -> Tensor:
    """Scales the gradients that leave a shard's graph for tensors that all ranks have.

    Args:
        local: the shard from which a program makes a sharded tensor.
        layout: of the sharded tensor.
        inputs: shards where the graph ends, in addition to those from `to_local`.

    Raises:
        NotSupported: a part of the graph also belongs to a shard with another number of replicas.
    """
    root, factor = local.grad_fn, _factor(layout)
    if factor == 1 or root is None:
        return local
    ends = {x.grad_fn for x in inputs if x is not None}
    return local if _reaches_shards(root, layout, ends) else scale_grad(local, factor)


def _factor(layout: Layout) -> float:
    return layout.mesh.sample_size / layout.replicas


class _Scaling:
    """A hook on a node that scales some of the gradients that the node passes on."""

    def __init__(self, layout: Layout, edges: list[int]) -> None:
        self._layout, self._edges = layout, edges

    def __call__(
        self, grads: tuple[Tensor | None, ...], of_results: tuple[Tensor | None, ...]
    ) -> tuple[Tensor | None, ...]:
        return tuple(self._scaled(i, grad, of_results) for i, grad in enumerate(grads))

    def _scaled(
        self, i: int, grad: Tensor | None, of_results: tuple[Tensor | None, ...]
    ) -> Tensor | None:
        if grad is None:
            return None
        if torch.is_grad_enabled():
            # The gradient uses the same plain tensors, again for this rank's part.
            grad = scale_leaving_gradients(grad, self._layout, of_results)
        return scaled_back(grad, _factor(self._layout)) if i in self._edges else grad


def _reaches_shards(root: Any, layout: Layout, ends: set[Any]) -> bool:
    """Returns whether a graph depends on shards, and hooks its edges from them to wholes.

    Wholes are tensors that all ranks have: parameters and their plain replacements. Other leaves
    are rank-local. The walk ends at shards, wholes, leaves, operands of sharded calls, and nodes of
    earlier walks.
    """
    uses: dict[Any, bool] = dict.fromkeys(ends, True)
    stack, opened, factor = [root], set[Any](), _factor(layout)
    while stack:
        node = stack[-1]
        if node in uses:
            stack.pop()
        elif isinstance(node, _functions.AccumulateGrad):
            is_whole = isinstance(node.variable, nn.Parameter) or replaced.is_noted(node.variable)
            if is_whole:
                replaced.use_locally(node.variable)
            uses[node] = not is_whole
        elif is_scale_grad(node):
            uses[node] = True
        elif graph.WHOLE in node.metadata:
            uses[node] = False
        elif (known := node.metadata.get(_MARK)) is not None:
            if known.factor not in (None, factor):
                raise NotSupported(
                    "a part of what goes into ShardedTensor.from_local comes from, or went into, "
                    "a sharded tensor whose layout has other copies: take full_tensor() of that, "
                    "or compute the part once for each"
                )
            uses[node] = known.is_shard
        elif node not in opened:
            opened.add(node)
            stack += [n for n, _ in node.next_functions if n is not None]
        else:
            below = [None if n is None else uses[n] for n, _ in node.next_functions]
            uses[node] = is_shard = True in below or False not in below
            node.metadata[_MARK] = _Use(is_shard, factor if is_shard else None)
            if not is_shard:
                node.metadata[graph.USED_IN] = layout.mesh
            wholes = [i for i, shard in enumerate(below) if shard is False]
            if is_shard and wholes:
                node.register_hook(_Scaling(layout, wholes))
    return uses[root]
