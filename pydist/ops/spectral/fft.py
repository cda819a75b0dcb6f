"""Computes Fourier transforms; over split dims the splits move to other dims (a transposition)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pydist.ops.dims import canonical, canonical_all
from pydist.ops.resampling.periodic import roll
from pydist.ops.transposition import along_dims, whole_along
from pydist.tensor import ShardedTensor, implements

_Step = tuple[Callable[..., Tensor], int | None, int]
"""A transform of one dim, the extent to which it pads or crops the dim, and the dim."""


def _one_dim(func: Callable[..., Tensor]) -> None:
    @implements(func)
    def handler(
        input: ShardedTensor, n: int | None = None, dim: int = -1, norm: str | None = None
    ) -> Any:
        d = canonical(dim, input.dim())
        return along_dims(partial(func, n=n, dim=d, norm=norm), input, (d,))


for _name in ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft"):
    _one_dim(getattr(torch.fft, _name))


def _dims_and_extents(
    x: Tensor, s: int | Sequence[int] | None, dim: int | Sequence[int] | None
) -> tuple[tuple[int, ...], list[int | None]]:
    """Returns the dims of a transform, and the extents to which it pads or crops them."""
    s, dim = ((given,) if isinstance(given, int) else given for given in (s, dim))
    if dim is None:
        dim = range(x.dim()) if s is None else range(x.dim() - len(s), x.dim())
    dims = canonical_all(tuple(dim), x.dim())
    extents: list[int | None] = [None] * len(dims)
    if s is not None:
        extents = [None if n == -1 else n for n in s]
    if len(extents) != len(dims):
        raise RuntimeError(f"s={s} and dim={dim}: as many extents as dims are possible")
    return dims, extents


def _several_dims(
    func: Callable[..., Tensor],
    default: Sequence[int] | None,
    steps_of: Callable[[Sequence[int], Sequence[int | None]], Sequence[_Step]],
) -> None:
    """Registers a transform of several dims.

    Args:
        func: the transform.
        default: dims of a call that names none.
        steps_of: returns transforms of one dim each that compose it.
    """

    @implements(func)
    def handler(
        input: ShardedTensor,
        s: int | Sequence[int] | None = None,
        dim: int | Sequence[int] | None = default,
        norm: str | None = None,
    ) -> Any:
        dims, extents = _dims_and_extents(input, s, dim)
        if whole_along(input.layout, dims).replicas == input.layout.replicas:
            return along_dims(partial(func, s=s, dim=dims, norm=norm), input, dims)
        # The other dims have too few elements for all ranks, as those of an image of one channel.
        for step, n, d in steps_of(dims, extents):
            input = step(input, n, d, norm)  # type: ignore[assignment]  # sharded
        return input


def _alike(func: Callable[..., Tensor]) -> Callable[..., Sequence[_Step]]:
    return lambda dims, extents: [(func, n, d) for d, n in zip(dims, extents, strict=True)]


def _real_first(dims: Sequence[int], extents: Sequence[int | None]) -> Sequence[_Step]:
    rest = _alike(torch.fft.fft)(dims[:-1], extents[:-1])
    return [(torch.fft.rfft, extents[-1], dims[-1]), *rest]


def _real_last(dims: Sequence[int], extents: Sequence[int | None]) -> Sequence[_Step]:
    rest = _alike(torch.fft.ifft)(dims[:-1], extents[:-1])
    return [*rest, (torch.fft.irfft, extents[-1], dims[-1])]


for _name, _steps in (
    ("fft", _alike(torch.fft.fft)),
    ("ifft", _alike(torch.fft.ifft)),
    ("rfft", _real_first),
    ("irfft", _real_last),
):
    _several_dims(getattr(torch.fft, f"{_name}n"), None, _steps)
    _several_dims(getattr(torch.fft, f"{_name}2"), (-2, -1), _steps)


def _shifted(x: ShardedTensor, dim: Any, sign: int) -> ShardedTensor:
    asked = range(x.dim()) if dim is None else (dim,) if isinstance(dim, int) else tuple(dim)
    dims = canonical_all(asked, x.dim())
    return roll(x, tuple(sign * (x.shape[d] // 2) for d in dims), dims)


@implements(torch.fft.fftshift)
def fftshift(input: ShardedTensor, dim: Any = None) -> ShardedTensor:
    """Rolls frequency 0 to the middle of dims."""
    return _shifted(input, dim, 1)


@implements(torch.fft.ifftshift)
def ifftshift(input: ShardedTensor, dim: Any = None) -> ShardedTensor:
    """Rolls frequency 0 from the middle of dims to the front."""
    return _shifted(input, dim, -1)
