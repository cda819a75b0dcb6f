"""Computes the taps of interpolations along one dim: input indices and weights, as torch does.

Source: torch's `aten/src/ATen/native/UpSample.h` (scale, source index, cubic coefficients). For
nearest neighbors torch itself is called to find the indices, as its kernels round differently.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pydist.backend.statistics import statistics_dtype
from pydist.ops.dtypes import result_dtype

_NN: Any = torch._C._nn

LINEAR = {1: "linear", 2: "bilinear", 3: "trilinear"}
_KERNELS: dict[tuple[str, int], Any] = {
    **{("nearest", d): getattr(_NN, f"upsample_nearest{d}d") for d in (1, 2, 3)},
    **{("nearest-exact", d): getattr(_NN, f"_upsample_nearest_exact{d}d") for d in (1, 2, 3)},
    **{(name, d): getattr(_NN, f"upsample_{name}{d}d") for d, name in LINEAR.items()},
    ("bicubic", 2): _NN.upsample_bicubic2d,
}
_CUBIC = -0.75
_DIGIT = 128


class Taps(NamedTuple):
    """Input indices and weights whose weighted sums are the outputs of a dim.

    Attributes:
        indices: int64 [taps, extent of the result], global indices of the input.
        weights: of the same shape, in the dtype in which torch computes; `None`: one tap, copied.
    """

    indices: Tensor
    weights: Tensor | None

    def to(self, device: torch.device) -> Taps:
        """Copies the taps to a device."""
        return Taps(
            self.indices.to(device), None if self.weights is None else self.weights.to(device)
        )


class Resize(NamedTuple):
    """Old and new extent of one dim, and the scale factor if the given one is to be used."""

    extent: int
    out: int
    scale: float | None


def upsample(
    mode: str, x: Tensor, out: Sequence[int], scales: Sequence[float | None], align_corners: bool
) -> Tensor:
    """Runs torch's kernel for a mode of `interpolate`, with any sizes and scale factors.

    Args:
        mode: as in `interpolate`, except "area".
        x: [N, C, ...].
        out: extents of the result's spatial dims.
        scales: scale factor of each, `None` for the ratio of the extents.
        align_corners: as in `interpolate`.
    """
    kernel = _KERNELS[mode, x.dim() - 2]
    if mode.startswith("nearest"):
        return kernel(x, tuple(out), *scales)
    return kernel(x, tuple(out), align_corners, *scales)


def as_upsampled(mode: str, x: Tensor) -> Tensor:
    """Converts a tensor to the dtype in which torch interpolates it under autocast.

    On devices that is float32; a rank may add up taps, which have no such rule.
    """
    if not torch.is_autocast_enabled(x.device.type) or not x.is_floating_point():
        return x
    align_corners = () if mode.startswith("nearest") else (False,)
    arguments = ((1,) * (x.dim() - 2), *align_corners)
    kernel = _KERNELS[mode, x.dim() - 2]
    return x.to(result_dtype(kernel, ((1,) * x.dim(), x), arguments=arguments))


def taps_of(mode: str, size: Resize, align_corners: bool, dims: int, like: Tensor) -> Taps:
    """Computes the taps of one dim.

    Args:
        mode: as in `interpolate`, except "area".
        size: extents and scale factor.
        align_corners: as in `interpolate`.
        dims: number of spatial dims of the call.
        like: a tensor of the dtype and device of the input.
    """
    if mode.startswith("nearest"):
        return Taps(_nearest(mode, size, dims, like)[None], None)
    dtype = statistics_dtype(like.dtype)
    if mode == "bicubic":
        return _cubic(size, align_corners, dtype)
    return _linear(size, align_corners, dtype)


def without_adjoint(
    mode: str, sizes: Sequence[Resize], align_corners: bool, like: Tensor
) -> Resize | None:
    """Returns a size at which torch's backward is not the adjoint of its forward, or `None`.

    Forward computes nearest neighbors in the input's dtype, but backward in float32. Backward also
    copies if the extents are equal, whatever the scale factor, and so does that of bicubic.

    Args:
        mode: as in `interpolate`, except "area".
        sizes: extents and scale factor of each spatial dim.
        align_corners: as in `interpolate`.
        like: a tensor of the dtype and device of the input.
    """
    if mode == "bicubic" and not align_corners:
        # A single element is copied, whatever the weights.
        given = [size for size in sizes if size.scale not in (None, 1.0) and size.extent > 1]
        return given[0] if given and all(size.extent == size.out for size in sizes) else None
    if not mode.startswith("nearest") or not like.is_floating_point():
        return None
    dims = len(sizes)
    return next((size for size in sizes if not _is_adjoint(mode, size, dims, like)), None)


def _is_adjoint(mode: str, size: Resize, dims: int, like: Tensor) -> bool:
    probe = torch.zeros(1, 1, size.extent, *(1,) * (dims - 1), dtype=torch.float64)
    probe = probe.to(like).requires_grad_()
    with torch.enable_grad():
        y = upsample(mode, probe, (size.out, *(1,) * (dims - 1)), _scales(size, dims), False)
    (found,) = torch.autograd.grad(y, probe, torch.ones_like(y))
    expected = torch.bincount(_nearest(mode, size, dims, like), minlength=size.extent)
    return found.flatten().double().cpu().equal(expected.double())


def _scales(size: Resize, dims: int) -> list[float | None]:
    return [size.scale, *[None] * (dims - 1)]


def _nearest(mode: str, size: Resize, dims: int, like: Tensor) -> Tensor:
    """Returns source indices of nearest neighbors, by running torch on the indices as input.

    The digits of the index are channels, so that they are exact in all dtypes.
    """
    index = torch.arange(size.extent)
    digits = [index // _DIGIT**place % _DIGIT for place in range(4)]
    probe = torch.stack(digits).view(1, 4, size.extent, *(1,) * (dims - 1))
    probe = probe.to(device=like.device, dtype=like.dtype)
    out = (size.out, *(1,) * (dims - 1))
    with torch.no_grad():
        found = upsample(mode, probe, out, _scales(size, dims), False).view(4, size.out)
    places = torch.tensor([_DIGIT**place for place in range(4)])
    return (found.cpu().long() * places[:, None]).sum(0)


def _scale(size: Resize, align_corners: bool, dtype: torch.dtype) -> Tensor:
    def number(value: float) -> Tensor:
        return torch.tensor(value, dtype=dtype)

    if align_corners:
        return number(size.extent - 1) / number(size.out - 1) if size.out > 1 else number(0)
    if size.scale is not None and size.scale > 0:
        return number(1.0 / size.scale)
    return number(size.extent) / number(size.out)


def _source(size: Resize, align_corners: bool, dtype: torch.dtype) -> Tensor:
    """Returns the position of each output among the inputs, as a real number."""
    scale = _scale(size, align_corners, dtype)
    index = torch.arange(size.out, dtype=dtype)
    if align_corners:
        return scale * index
    # Rounded once, like the fused multiply-add in torch's compiled kernels; in float64 the second
    # rounding is far below the tolerances of the numerics.
    return (scale.double() * (index + 0.5).double() - 0.5).to(dtype)


def _linear(size: Resize, align_corners: bool, dtype: torch.dtype) -> Taps:
    if size.extent == size.out:  # torch copies, whatever the scale factor
        return Taps(torch.arange(size.out)[None], None)
    source = _source(size, align_corners, dtype).clamp(min=0)
    first = source.long().clamp(max=size.extent - 1)
    far = (source - first).clamp(0, 1)
    second = (first + 1).clamp(max=size.extent - 1)
    return Taps(torch.stack([first, second]), torch.stack([1 - far, far]))


def _cubic(size: Resize, align_corners: bool, dtype: torch.dtype) -> Taps:
    source = _source(size, align_corners, dtype)
    first = source.floor().long().clamp(max=size.extent - 1)
    far = (source - first).clamp(0, 1)

    def near_part(t: Tensor) -> Tensor:
        return ((_CUBIC + 2) * t - (_CUBIC + 3)) * t * t + 1

    def far_part(t: Tensor) -> Tensor:
        return ((_CUBIC * t - 5 * _CUBIC) * t + 8 * _CUBIC) * t - 4 * _CUBIC

    weights = [far_part(far + 1), near_part(far), near_part(1 - far), far_part(2 - far)]
    indices = [(first + step).clamp(0, size.extent - 1) for step in (-1, 0, 1, 2)]
    return Taps(torch.stack(indices), torch.stack(weights))
