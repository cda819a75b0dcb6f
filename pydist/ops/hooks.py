"""Runs full backward hooks of modules on sharded tensors.

torch's `BackwardHook._apply_on_tensors` applies an `autograd.Function` to a module's inputs and
outputs, which bypasses torch's overrides. The patch here passes it the shards, and passes sharded
gradients to users' hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

from torch import Tensor
from torch.utils.hooks import BackwardHook

from pydist.exchange.exchanger import in_memory
from pydist.tensor import ShardedTensor, local_of, wrap
from pydist.tensor.aliasing import view_at
from pydist.tensor.operands import shard_in
from pydist.tensor.sharded import whole_of

_apply_on_plain = BackwardHook._apply_on_tensors


class _ShownNode:
    """Graph node whose hooks see and return sharded gradients."""

    def __init__(self, node: Any, like: Sequence[Any]) -> None:
        self._node, self._like = node, like

    def register_hook(self, hook: Callable[[Any, Any], Any]) -> Any:
        def on_shards(grad_inputs: Any, grad_outputs: Any) -> Any:
            result = hook(self._show(grad_inputs), self._show(grad_outputs))
            if result is None:
                return None
            pairs = zip(result, self._like, strict=True)
            return tuple(_as_shard(g, x) if isinstance(g, Tensor) else g for g, x in pairs)

        return self._node.register_hook(on_shards)

    def _show(self, grads: Any) -> Any:
        if not isinstance(grads, tuple) or len(grads) != len(self._like):
            return grads
        return tuple(
            wrap(in_memory(g), x.layout, x)
            if isinstance(x, ShardedTensor) and isinstance(g, Tensor)
            else g
            for g, x in zip(grads, self._like, strict=True)
        )


def _as_shard(grad: Tensor, x: Any) -> Tensor:
    """Returns a hook's gradient of `x` as the graph of shards needs it."""
    return shard_in(grad, x.layout) if isinstance(x, ShardedTensor) else whole_of(grad)


def _alias(shard: Tensor, x: ShardedTensor) -> ShardedTensor:
    """Returns an alias of `x` with another graph node; in-place changes of it change `x`."""
    alias = wrap(shard, x.layout, x)
    alias._view, alias._streams = view_at(x), x._streams
    return alias


@wraps(_apply_on_plain)
def _apply_on_tensors(self: BackwardHook, fn: Callable[[Any], None], args: Any) -> Any:
    if not any(isinstance(a, ShardedTensor) for a in args):
        return _apply_on_plain(self, fn, args)
    tensors = [a for a in args if isinstance(a, Tensor)]
    plain = tuple(local_of(a) if isinstance(a, ShardedTensor) else a for a in args)
    result, index = _apply_on_plain(self, lambda node: fn(_ShownNode(node, tensors)), plain)
    if result is plain:
        return args, index  # nothing requires a gradient
    shown = [
        _alias(r, a) if isinstance(a, ShardedTensor) else r
        for a, r in zip(args, result, strict=True)
    ]
    return (tuple(shown) if type(args) is tuple else type(args)(*shown)), index


BackwardHook._apply_on_tensors = _apply_on_tensors  # type: ignore[method-assign]
