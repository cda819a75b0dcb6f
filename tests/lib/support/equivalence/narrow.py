"""Split convolutions in narrow types, whose kernels and memory formats are selectable.

The bound is that of docs/architecture.md, Numerics: at most four times the error of one device in
the same type, relative to float64, and never tighter than a few roundings.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from pydist import Mesh, ShardedTensor
from pydist.backend import conv, conv_kernels
from pydist.exchange.adjoints import mean_ranks
from pydist.grid import SAMPLE_AXES
from support.equivalence import error, layout_at, on_ranks, randn, shard, spatial_of

FLOORS = {torch.float32: 1e-6, torch.bfloat16: 1.2e-2, torch.float64: 1e-12}
CL = torch.channels_last_3d

Functions = Mapping[int, Callable[..., Tensor]]
"""Convolutions by the number of dims of their input."""

CONV: Functions = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}
TRANSPOSED: Functions = {3: F.conv_transpose1d, 4: F.conv_transpose2d, 5: F.conv_transpose3d}


def step(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    functions: Functions,
    *,
    frozen: str = "",
    autocast: bool = False,
    saving: bool = False,
    penalty: bool = False,
    **options: Any,
) -> dict[str, Tensor]:
    """Runs a convolution; returns its result and gradients, optionally of the gradient penalty."""
    leaves = {"x": x, "weight": weight, "bias": bias}
    for name, leaf in leaves.items():
        if leaf is not None:
            leaf.requires_grad_(name not in frozen.split())

    def layers(x: Tensor) -> Tensor:
        y = functions[x.dim()](x, weight, bias, **options)
        return y * y.sigmoid()

    with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
        y = checkpoint(layers, x, use_reentrant=False) if saving else layers(x)
    found = {"y": y}
    needed = {n: t for n, t in leaves.items() if t is not None and t.requires_grad}
    loss = (y.double() * randn(*y.shape, seed=3)).sum()
    grads = torch.autograd.grad(loss, list(needed.values()), create_graph=penalty)
    found |= {f"d{name}": g for name, g in zip(needed, grads, strict=True)}
    if penalty:
        total: Any = sum((g.double() ** 2).sum() for g in (_true(g, x) for g in grads))
        second = torch.autograd.grad(total, list(needed.values()))
        found |= {f"dd{name}": g for name, g in zip(needed, second, strict=True)}
    return found


def _true(grad: Tensor, x: Tensor) -> Tensor:
    if isinstance(x, ShardedTensor) and not isinstance(grad, ShardedTensor):
        return mean_ranks(grad, x.mesh, SAMPLE_AXES)
    return grad


def check(
    shape: tuple[int, ...],
    weight_shape: tuple[int, ...],
    points: list[list[int] | None],
    dtype: torch.dtype = torch.float32,
    *,
    functions: Functions = CONV,
    bias: bool = True,
    keep_thin_blocks: bool = True,
    change: Callable[[Tensor], Tensor] = lambda t: t,
    **options: Any,
) -> list[str]:
    """Compares a split convolution with one device; returns the results' memory formats by rank.

    Args:
        shape: shape of the input.
        weight_shape: shape of the weight.
        points: split points of the input.
        dtype: dtype of all tensors.
        functions: convolutions or transposed ones.
        bias: whether a bias is added.
        keep_thin_blocks: option of the mesh.
        change: function applied to the input and the weight before the convolution.
        **options: options of `step`, and of the convolution.
    """
    x, weight = randn(*shape).to(dtype), randn(*weight_shape, seed=1).to(dtype)
    channels = weight_shape[0]
    if functions is TRANSPOSED:
        channels = weight_shape[1] * options.get("groups", 1)
    own_bias = randn(channels, seed=2).to(dtype) if bias else None

    def leaves(to: torch.dtype) -> tuple[Tensor, Tensor, Tensor | None]:
        other = None if own_bias is None else own_bias.to(to, copy=True)
        return x.to(to, copy=True), weight.to(to, copy=True), other

    exact = step(*leaves(torch.float64), functions, **options | {"autocast": False})
    whole = step(*leaves(dtype), functions, **options)
    narrow = torch.bfloat16 if options.get("autocast") else dtype
    bounds = {
        name: max(FLOORS[narrow], 4 * error(whole[name].detach().double(), t.detach()))
        for name, t in exact.items()
    }

    def split(mesh: Mesh) -> tuple[dict[str, Tensor], str]:
        layout = layout_at(mesh, shape, points)
        _, own_weight, bias = leaves(dtype)
        local = change(shard(x, layout).to_local().detach())
        own = ShardedTensor.from_local(local, layout)
        found = step(own, change(own_weight).detach(), bias, functions, **options)
        result = found["y"]
        assert isinstance(result, ShardedTensor)
        whole_of = {name: _whole(t, mesh) for name, t in found.items()}
        return whole_of, format_of(result.to_local())

    ranks = on_ranks(spatial_of(points), split, keep_thin_blocks=keep_thin_blocks)
    for found, _ in ranks:
        assert found.keys() == exact.keys()
        wrong = {
            name: (e, bounds[name])
            for name, t in found.items()
            if not (e := error(t.double(), exact[name].detach())) <= bounds[name]
        }
        assert not wrong, f"error, bound: {wrong}"
        assert all(t.dtype == whole[name].dtype for name, t in found.items())
    return [form for _, form in ranks]


def _whole(t: Tensor, mesh: Mesh) -> Tensor:
    t = t.full_tensor() if isinstance(t, ShardedTensor) else mean_ranks(t, mesh, SAMPLE_AXES)
    return t.detach()


def format_of(t: Tensor) -> str:
    """Returns the memory format in which a tensor is contiguous."""
    last = {4: torch.channels_last, 5: CL}.get(t.dim())
    if last is not None and t.is_contiguous(memory_format=last):
        return "both" if t.is_contiguous() else "last"
    return "plain" if t.is_contiguous() else "neither"


def conversions(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Returns a list of the shapes of tensors that convolutions convert from now on."""
    copied: list[tuple[int, ...]] = []

    def in_format(x: Tensor, channels_last: bool) -> Tensor:
        found = conv.in_format(x, channels_last)
        if found.data_ptr() != x.data_ptr():
            copied.append(tuple(x.shape))
        return found

    monkeypatch.setattr(conv_kernels, "in_format", in_format)
    return copied


def step_in_channels_last(
    case: tuple[tuple[int, ...], tuple[int, ...], list[list[int] | None], dict[str, Any]],
    functions: Functions,
) -> None:
    """Checks that forward and backward of a channels-last input keep its memory format."""
    shape, weight, points, options = case
    last = {4: torch.channels_last, 5: CL}[len(shape)]

    def body(mesh: Mesh) -> tuple[str, str]:
        layout = layout_at(mesh, shape, points)
        local = shard(randn(*shape).float(), layout).to_local().detach()
        local = local.contiguous(memory_format=last).requires_grad_()
        x = ShardedTensor.from_local(local, layout)
        y = functions[len(shape)](x, randn(*weight).float().requires_grad_(), **options)
        (dx,) = torch.autograd.grad((y * y).sum(), [x])
        assert isinstance(y, ShardedTensor)
        assert isinstance(dx, ShardedTensor)
        return format_of(y.to_local()), format_of(dx.to_local())

    ranks = on_ranks(spatial_of(points), body, keep_thin_blocks=True)
    assert ranks == [("last", "last")] * len(ranks)
