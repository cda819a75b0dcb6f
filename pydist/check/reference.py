"""Makes the reference of a check: float64 throughout, and norms as elementary calls."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from pydist.tensor.refusals import module_path, name_of, source_line

_NARROW = (torch.float32, torch.float16, torch.bfloat16)
_CASTS = {
    torch.Tensor.float: torch.float32,
    torch.Tensor.half: torch.float16,
    torch.Tensor.bfloat16: torch.bfloat16,
}


class Reference(TorchFunctionMode):
    """Function mode that computes a network in float64 with as little rounding as possible.

    Casts to narrower floating-point types become casts to float64. Norms consist of elementary
    calls, in two passes: torch's fused kernels lose digits in float64 as well, if a mean is large
    or a variance small.

    Attributes:
        casts: the types to which the network itself casts.
        draws: calls that draw random numbers of the process, each with its module and line.
    """

    def __init__(self) -> None:
        super().__init__()
        self.casts: set[torch.dtype] = set()
        self.draws: list[str] = []

    def __enter__(self) -> Reference:
        self._beside = _generators_beside_torch()
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        after = _generators_beside_torch()
        self.draws += [f"{n}'s generator" for n in after if after[n] != self._beside[n]]

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _CASTS:
            self.casts.add(_CASTS[func])
            return args[0].double()
        if func in _NORMS and (found := _NORMS[func](*args, **kwargs)) is not None:
            return found
        args, kwargs = tree_map(self._widened, (args, kwargs))
        before = torch.get_rng_state()
        result = func(*args, **kwargs)
        if not torch.equal(before, torch.get_rng_state()):
            module, source = module_path(), source_line()
            where = f"{f' in module {module}' if module else ''}{f' at {source}' if source else ''}"
            self.draws.append(f"{name_of(func)}{where}")
        return result

    def _widened(self, value: Any) -> Any:
        if isinstance(value, torch.dtype) and value in _NARROW:
            self.casts.add(value)
            return torch.float64
        return value


def _generators_beside_torch() -> dict[str, str]:
    return {"Python": repr(random.getstate()), "NumPy": repr(np.random.get_state())}


def _per_channel(values: Tensor, like: Tensor) -> Tensor:
    return values.view(1, -1, *(1 for _ in range(like.dim() - 2)))


def _normalized(x: Tensor, dims: list[int], eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (x - mean) / sqrt(var + eps), mean and biased variance over `dims`, keeping dims."""
    mean = x.mean(dims, keepdim=True)
    centered = x - mean
    var = centered.square().mean(dims, keepdim=True)
    return centered / (var + eps).sqrt(), mean, var


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    if weight is not None:
        x = x * _per_channel(weight, x)
    return x if bias is None else x + _per_channel(bias, x)


def _update(running: Tensor | None, found: Tensor, momentum: float) -> None:
    if running is not None:
        with torch.no_grad():
            running.lerp_(found.flatten().to(running.dtype), momentum)


def _batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor | None:
    if not training:
        if running_mean is None or running_var is None:
            return None
        scale = (running_var + eps).sqrt()
        normed = (input - _per_channel(running_mean, input)) / _per_channel(scale, input)
        return _affine(normed, weight, bias)
    count = input.numel() // max(1, input.shape[1])
    if count < 2:
        return None  # torch refuses it
    normed, mean, var = _normalized(input, [0, *range(2, input.dim())], eps)
    _update(running_mean, mean, momentum)
    _update(running_var, var * (count / (count - 1)), momentum)
    return _affine(normed, weight, bias)


def _instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor | None:
    if not use_input_stats:
        return _batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    count = input[:1, :1].numel()
    if count < 2:
        return None
    normed, mean, var = _normalized(input, list(range(2, input.dim())), eps)
    _update(running_mean, mean.mean(0), momentum)
    _update(running_var, var.mean(0) * (count / (count - 1)), momentum)
    return _affine(normed, weight, bias)


def _group_norm(
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor | None:
    if input.dim() < 2 or num_groups < 1 or input.shape[1] % num_groups or not input.numel():
        return None
    rows = input.reshape(input.shape[0], num_groups, -1)
    if rows.shape[2] < 2:
        return None
    return _affine(_normalized(rows, [2], eps)[0].reshape(input.shape), weight, bias)


def _layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor | None:
    dims = len(normalized_shape)
    if tuple(input.shape[input.dim() - dims :]) != tuple(normalized_shape) or not input.numel():
        return None
    normed = _normalized(input, list(range(input.dim() - dims, input.dim())), eps)[0]
    normed = normed if weight is None else normed * weight
    return normed if bias is None else normed + bias


_NORMS: dict[Callable[..., Any], Callable[..., Tensor | None]] = {
    F.batch_norm: _batch_norm,
    F.instance_norm: _instance_norm,
    F.group_norm: _group_norm,
    F.layer_norm: _layer_norm,
}
