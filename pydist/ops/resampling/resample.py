"""Interpolates sharded tensors, from gathered neighbors of each shard's outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pydist.layout import Layout
from pydist.ops.empty import with_elements, without_added
from pydist.ops.resampling.reads import moved_points, planning
from pydist.ops.resampling.resample_plan import ResamplePlan
from pydist.ops.resampling.taps import Resize, as_upsampled
from pydist.tensor import ShardedTensor, implements, local_of, refusal, wrap

_AREA = {1: F.adaptive_avg_pool1d, 2: F.adaptive_avg_pool2d, 3: F.adaptive_avg_pool3d}


@implements(F.interpolate)
def interpolate(
    input: ShardedTensor,
    size: int | Sequence[int] | None = None,
    scale_factor: float | Sequence[float] | None = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> ShardedTensor:
    """Resizes the spatial dims; split points scale with their dim, rounded to the nearest output.

    Raises:
        ValueError, RuntimeError, NotImplementedError: as torch on the full tensor.
        NotSupported: antialiasing, or blending of integers, with a split dim.
    """
    layout, dims = input.layout, input.dim() - 2
    factors = (scale_factor,) * dims if isinstance(scale_factor, (int, float)) else scale_factor
    options: dict[str, Any] = {
        "size": size if size is None or isinstance(size, int) else tuple(size),
        "scale_factor": factors if factors is None else tuple(factors),
        "mode": mode,
        "align_corners": align_corners,
        "recompute_scale_factor": recompute_scale_factor,
        "antialias": antialias,
    }
    key = ("interpolate", layout, tuple(options.items()), input.dtype)

    def make() -> tuple[tuple[Resize, ...], Layout]:
        # torch's own checks and messages, and its rule for the size of the result.
        # On meta torch refuses an empty batch, which it accepts on other devices.
        sample = max(1, layout.shape[0]), *layout.shape[1:]
        meta = torch.empty(sample, dtype=input.dtype, device="meta")
        shape = F.interpolate(meta, **options).shape
        given = None if recompute_scale_factor else options["scale_factor"]
        sizes = tuple(
            Resize(n, out, None if given is None else float(given[d]))
            for d, (n, out) in enumerate(zip(layout.shape[2:], shape[2:], strict=True))
        )
        return sizes, _scaled(layout, sizes)

    sizes, out = layout.mesh.session.plan(key, make)
    if mode == "area":
        return _AREA[dims](input, out.shape[2:])  # type: ignore[arg-type, return-value]
    local = as_upsampled(mode, local_of(input))
    if layout.shape[0] == 0:
        # No exchange; the result stays in the graph.
        return wrap(local.new_zeros(out.local_shape) + local.sum(), out, input)
    if all(d < 2 for d in layout.split_dims):
        resized = F.interpolate(with_elements(local), **options)
        return wrap(without_added(resized, out.local_shape), out, input)
    if antialias:
        raise refusal(F.interpolate, (input,), {}, "antialias, and a spatial dim is split")
    if not (mode.startswith("nearest") or local.is_floating_point()):
        raise refusal(F.interpolate, (input,), {}, f"{mode} interpolation of {local.dtype}")
    plan = _plan(layout, out, sizes, mode, bool(align_corners), local)
    if plan.not_adjoint is not None and local.requires_grad and torch.is_grad_enabled():
        n, m, _ = plan.not_adjoint
        why = f"torch's gradient of {mode} from {n} to {m} is not that of its result"
        raise refusal(F.interpolate, (input,), {}, why)
    return wrap(plan.run(plan.reads.gather(wrap(local, layout, input))), out, input)


def _scaled(layout: Layout, sizes: Sequence[Resize]) -> Layout:
    """Scales the split points: p of n becomes p·m/n of m, rounded to nearest, halves down.

    So doubling a dim restores the points of the finer level.
    """
    shape = (*layout.shape[:2], *(size.out for size in sizes))
    moved = {}
    for dim, size in enumerate(sizes, start=2):
        split = layout.splits[dim]
        if split is not None:
            n, m = size.extent, size.out
            moved[dim] = [(2 * p * m + n - 1) // (2 * n) for p in split.partition.points]
    return moved_points(layout, shape, moved)


def _plan(
    layout: Layout,
    out: Layout,
    sizes: Sequence[Resize],
    mode: str,
    align_corners: bool,
    local: Tensor,
) -> ResamplePlan:
    key = ("resample", layout, out, tuple(sizes), mode, align_corners, local.dtype, local.device)

    def make() -> ResamplePlan:
        with planning():
            like = torch.empty(0, dtype=local.dtype, device=local.device)
            return ResamplePlan(layout, out, sizes, mode, align_corners, like)

    return layout.mesh.session.plan(key, make)
