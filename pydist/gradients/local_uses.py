"""Plain tensors that a program uses with its shards, between `to_local` and `from_local`.

Each rank uses such a tensor whole, for its own part of the result, as the weight of a layer. So
what arrives there is a part of the gradient. It is scaled so that the mean over the
ranks is the true one, as `pydist.exchange.adjoints.enter` does it in calls on sharded tensors. Here
torch's own calls have made the graph, so the scale is put on edges of it: on those from a node that
depends on shards to one that does not.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from pydist import marks
from pydist.errors import NotSupported
from pydist.exchange.adjoints import enter, is_entered, scaled_back
from pydist.gradients import graph, replaced

if TYPE_CHECKING:
    from pydist.layout import Layout

_MARK = "pydist local use"
_functions: Any = torch._C._functions


class _Use(NamedTuple):
    is_shard: bool
    """Whether shards are below; if not, only what all ranks have."""
    factor: float | None
    """Of the shards: ranks of the sample group for each copy."""


def mark_shard(tensor: Tensor, layout: Layout) -> None:
    """Notes that a plain tensor is this rank's shard in a layout."""
    marks.mark(tensor, _MARK, _Use(is_shard=True, factor=_factor(layout)))


def entered(local: Tensor, layout: Layout, inputs: Iterable[Tensor | None] = ()) -> Tensor:
    """Scales the gradients that leave a shard's graph for tensors that all ranks have.

    Args:
        local: what a program makes a sharded tensor of.
        layout: of that.
        inputs: shards where its graph ends, beside those that `to_local` has made.

    Raises:
        NotSupported: a part of the graph belongs to a shard with other copies as well.
    """
    root, factor = local.grad_fn, _factor(layout)
    if factor == 1 or root is None:
        return local
    ends = {x.grad_fn for x in inputs if x is not None}
    return local if _reaches_shards(root, layout, ends) else enter(local, factor)


def _factor(layout: Layout) -> float:
    return layout.mesh.sample_size / layout.replicas


class _Scaling:
    """A hook on a node: scales some of the gradients that it hands on."""

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
            # The gradient is computed with the same plain tensors, this rank's part again.
            grad = entered(grad, self._layout, of_results)
        return scaled_back(grad, _factor(self._layout)) if i in self._edges else grad


def _reaches_shards(root: Any, layout: Layout, ends: set[Any]) -> bool:
    """Whether a graph comes from shards; hooks are put where it leaves them for wholes.

    The walk ends at shards, wholes, leaves, what has entered a sharded call, and where an earlier
    walk was. A parameter is a whole, and so is what has taken the place of one; another leaf is
    this rank's own.
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
        elif is_entered(node):
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
