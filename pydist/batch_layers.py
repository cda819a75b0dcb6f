"""Layers that depend on the global batch (batch norm, dropout), applied to plain tensors.

Examples are a branch for a table next to a volume, or a head after `full_tensor()`. These layers
run on a sharded tensor that is not cut: statistics and masks are then of the global batch over all
sample groups, as for volumes.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from pydist.tensor import ShardedTensor
from pydist.tensor.aliasing import as_result
from pydist.tensor.stage import StageTensor

_UNBATCHED: dict[type[nn.Module], int] = {nn.Dropout1d: 2, nn.Dropout3d: 4}
"""Numbers of dims that layers interpret as a sample without a batch; 1 for others."""

Wrapper = Callable[[Tensor], ShardedTensor]


def norms_by_input(layer: nn.Module) -> bool:
    """Returns whether a layer is a batch norm that has no running statistics for evaluation."""
    return isinstance(layer, _BatchNorm) and layer.running_mean is None


class BatchLayers:
    """The hooks of layers that depend on the global batch.

    Args:
        wrapper: wraps a plain tensor as a sharded one of the running batch.
        batch_norm: whether statistics span several ranks.
    """

    def __init__(self, wrapper: Wrapper, *, batch_norm: bool) -> None:
        self._wrapper = wrapper
        self._kinds = (_DropoutNd, _BatchNorm) if batch_norm else (_DropoutNd,)
        self._taken: list[bool] = []

    def adopt(self, model: nn.Module) -> None:
        """Adds the hooks to the layers of a model."""
        for layer in model.modules():
            if isinstance(layer, self._kinds):
                layer.register_forward_pre_hook(self.enter, with_kwargs=True)
                layer.register_forward_hook(self.leave, prepend=True, always_call=True)

    def enter(
        self, layer: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Wraps the input as a sharded tensor; a forward pre-hook."""
        # `norm(input=x)` is the same call as `norm(x)`.
        name = "" if inputs else next(iter(signature(layer.forward).parameters), "")
        x = inputs[0] if inputs else kwargs.get(name)
        mixes = layer.training or norms_by_input(layer)
        if (
            not isinstance(x, Tensor)
            or isinstance(x, (ShardedTensor, StageTensor))
            or not mixes
            or x.dim() <= _UNBATCHED.get(type(layer), 1)
        ):
            self._taken.append(False)
            return None
        self._taken.append(True)
        if inputs:
            return (self._wrapper(x), *inputs[1:]), kwargs
        return (), {**kwargs, name: self._wrapper(x)}

    def leave(self, layer: nn.Module, inputs: Any, output: Any) -> Any:
        """Returns a plain result; a forward hook, also called when the layer raises."""
        taken = bool(self._taken) and self._taken.pop()
        if not taken or not isinstance(output, ShardedTensor):
            return None
        return as_result(output.full_tensor())  # an in-place activation may follow
