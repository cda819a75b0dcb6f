"""Plain tensors that a program uses with its shards, between `to_local` and `from_local`.

Each rank uses such a tensor whole, for its own part of the result, as the weight of a layer. So
what arrives there is a part of the gradient, and is scaled so that the mean over the ranks is the
true one, as `pydist.exchange.adjoints.enter` does it in calls on sharded tensors. Here torch's own
calls have made the graph, so the scale is put on edges of it: on those from a node that depends on
shards to one that does not.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pydist import marks
from pydist.errors import NotSupported
from pydist.exchange.adjoints import enter, scaled_back

_MARK = "pydist local use"
_functions: Any = torch._C._functions


class _Use(NamedTuple):
    is_shard: bool
    """Whether shards are below; if not, only what all ranks have."""
    factor: float | None
    """By which the edges to wholes are scaled, of a node above shards."""


def mark(tensor: Tensor, *, is_shard: bool) -> None:
    """Notes that a plain tensor comes from sharded ones: this rank's shard, or the whole of one."""
    marks.mark(tensor, _MARK, _Use(is_shard, None))


def entered(local: Tensor, factor: float, inputs: Iterable[Tensor | None] = ()) -> Tensor:
    """A shard, with the gradients scaled that leave its graph for tensors that all ranks have.

    Args:
        local: what a program makes a sharded tensor of.
        factor: ranks of the sample group for each copy of the shard.
        inputs: shards where its graph ends, beside those that `to_local` has made.

    Raises:
        NotSupported: a part of the graph belongs to a shard with other copies as well.
    """
    root = local.grad_fn
    if factor == 1 or root is None:
        return local
    ends = {x.grad_fn for x in inputs if x is not None}
    return local if _reaches_shards(root, factor, ends) else enter(local, factor)


class _Scaling:
    """A hook on a node: scales some of the gradients that it hands on."""

    def __init__(self, factor: float, edges: list[int]) -> None:
        self._factor, self._edges = factor, edges

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
            grad = entered(grad, self._factor, of_results)
        return scaled_back(grad, self._factor) if i in self._edges else grad


def _reaches_shards(root: Any, factor: float, ends: set[Any]) -> bool:
    """Whether a graph comes from shards; the edges in it that leave them for wholes are scaled.

    The walk ends at shards, wholes, leaves, and where an earlier walk was. A parameter is a whole;
    another leaf is this rank's own.
    """
    uses: dict[Any, bool] = dict.fromkeys(ends, True)
    stack, opened = [root], set[Any]()
    while stack:
        node = stack[-1]
        if node in uses:
            stack.pop()
        elif isinstance(node, _functions.AccumulateGrad):
            uses[node] = not isinstance(node.variable, nn.Parameter)
        elif (known := node.metadata.get(_MARK)) is not None:
            if known.factor not in (None, factor):
                raise NotSupported(
                    "a part of what goes into ShardedTensor.from_local went into another one whose "
                    "layout has other copies: compute it once for each"
                )
            uses[node] = known.is_shard
        elif node not in opened:
            opened.add(node)
            stack += [n for n, _ in node.next_functions if n is not None]
        else:
            below = [None if n is None else uses[n] for n, _ in node.next_functions]
            uses[node] = is_shard = True in below or False not in below
            node.metadata[_MARK] = _Use(is_shard, factor if is_shard else None)
            wholes = [i for i, shard in enumerate(below) if shard is False]
            if is_shard and wholes:
                node.register_hook(_Scaling(factor, wholes))
    return uses[root]
