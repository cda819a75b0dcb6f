"""Layers on plain tensors whose backward leaves the gradient of their weight for later.

Those on sharded tensors are pydist's own functions; see `pydist.exchange.left_weights`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pydist.exchange.left_weights import Left, is_left
from pydist.ops.fusion.handover import hook_on_saved
from pydist.ops.windows import as_tuple
from pydist.stages.calls import Call
from pydist.tensor import ShardedTensor
from pydist.tensor.stage import StageTensor

_OPERANDS = ("input", "weight", "bias")
_CONVOLUTION = (*_OPERANDS, "stride", "padding", "dilation", "groups")
_TRANSPOSED = (*_OPERANDS, "stride", "padding", "output_padding", "groups", "dilation")
_LAYERS: dict[Any, tuple[str, ...]] = {
    F.linear: _OPERANDS,
    torch.conv1d: _CONVOLUTION,
    torch.conv2d: _CONVOLUTION,
    torch.conv3d: _CONVOLUTION,
    torch.conv_transpose1d: _TRANSPOSED,
    torch.conv_transpose2d: _TRANSPOSED,
    torch.conv_transpose3d: _TRANSPOSED,
}
"""The arguments of layers with weights, in order."""

_OfWeight = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Computes the gradient of a weight from the input, the weight and the result's gradient."""


def run_leaving(call: Call, into: Left) -> Any:
    """Runs a call; if it is a layer with a weight, its backward leaves that gradient in `into`."""
    given = {**dict(zip(_LAYERS.get(call.func, ()), call.args, strict=False)), **call.kwargs}
    x, weight = given.get("input"), given.get("weight")
    x = x.value if isinstance(x, StageTensor) else x
    if not isinstance(x, Tensor) or not isinstance(weight, Tensor) or call.func not in _LAYERS:
        return call.run()
    of_weight = _of_weight(call.func, x, weight, given)
    is_plain = not isinstance(x, ShardedTensor) and not isinstance(
        weight, (ShardedTensor, StageTensor)
    )
    # A checkpointed part is recomputed with the weight, and must save the same tensors.
    if of_weight is None or not is_plain or not is_left(x, weight) or hook_on_saved() is not None:
        return call.run()
    without = {**given, "weight": weight.detach()}
    result = call._replace(args=(), kwargs=without).run()
    version = x._version

    def leave(grad: Tensor) -> None:
        if x._version != version:
            raise RuntimeError(f"the input of {call} has been modified by an inplace operation")
        into.append((weight, partial(of_weight, x.detach(), weight.detach(), grad)))

    result.register_hook(leave)
    return result


def _of_weight(func: Any, x: Tensor, weight: Tensor, given: dict[str, Any]) -> _OfWeight | None:
    """Returns the formula of the weight's gradient; `None` if the layer computes it itself."""
    if func is F.linear:
        return _of_linear
    dims = weight.dim() - 2
    if x.dim() != weight.dim() or isinstance(given.get("padding", 0), str):
        return None
    stride, padding, dilation, beyond = (
        list(as_tuple(given.get(name, default), dims))
        for name, default in (("stride", 1), ("padding", 0), ("dilation", 1), ("output_padding", 0))
    )
    transposed = _LAYERS[func] is _TRANSPOSED
    attributes = stride, padding, dilation, transposed, beyond, given.get("groups", 1)
    return partial(_of_convolution, attributes)


def _of_convolution(attributes: Any, x: Tensor, weight: Tensor, grad: Tensor) -> Tensor:
    x, narrow = x.to(grad.dtype), weight.to(grad.dtype)  # autocast's
    mask = False, True, False
    found = torch.ops.aten.convolution_backward(grad, x, narrow, None, *attributes, mask)
    return found[1].to(weight.dtype)


def _of_linear(x: Tensor, weight: Tensor, grad: Tensor) -> Tensor:
    rows = grad.reshape(-1, weight.shape[0])
    return (rows.mT @ x.to(grad.dtype).reshape(-1, weight.shape[1])).to(weight.dtype)
