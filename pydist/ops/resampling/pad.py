"""Pads sharded tensors: constant, reflect, replicate, circular; negative pads crop."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from pydist.layout import Layout
from pydist.ops.dtypes import result_dtype
from pydist.ops.resampling.periodic import circular_pad
from pydist.ops.resampling.reads import ReadRange, Reads, moved_points, planning, take_indices
from pydist.partition import Box
from pydist.tensor import ShardedTensor, implements, local_of, wrap

Rims = tuple[tuple[int, int], ...]
"""Elements to add before and after each dim; negative numbers crop."""


@implements(F.pad, torch._C._nn.pad)
def pad(
    input: ShardedTensor, pad: Sequence[int], mode: str = "constant", value: float | None = None
) -> ShardedTensor:
    """Pads or crops any dims; outputs stay with their inputs, and outer ranks own the rims.

    Raises:
        RuntimeError, ValueError, NotImplementedError: as torch on the full tensor.
    """
    layout = input.layout

    def make() -> Rims:
        # torch's own checks and messages, on the global shape.
        whole = torch.empty(layout.shape, dtype=input.dtype, device="meta")
        F.pad(whole, tuple(pad), mode, value)
        return _rims(pad, len(layout.shape))

    key = ("pad", layout, tuple(pad), mode, value, input.dtype)
    rims = layout.mesh.session.plan(key, make)
    if mode == "constant":
        return constant_pad(input, rims, value)
    if mode == "circular":
        # As in torch, the tensor is cropped first, and the rest is padded circularly.
        input = constant_pad(input, tuple((min(0, a), min(0, b)) for a, b in rims), None)
        return circular_pad(input, [(max(0, a), max(0, b)) for a, b in rims])
    return _mirrored(input, rims, mode, len(pad) // 2)


@implements(torch.constant_pad_nd)
def constant_pad_nd(input: ShardedTensor, pad: Sequence[int], value: float = 0) -> ShardedTensor:
    """Pads with a constant, as `pad` in that mode."""
    return F.pad(input, tuple(pad), "constant", value)  # type: ignore[return-value]


def constant_pad(x: ShardedTensor, rims: Rims, value: float | None) -> ShardedTensor:
    """Pads the shards with a constant, or crops them, without communication.

    Args:
        x: the tensor.
        rims: elements before and after each dim; negative to crop.
        value: of the new elements; `None` for 0.
    """
    old, out = x.layout, padded_layout(x.layout, rims)
    local = local_of(x)
    added: list[int] = []
    for dim, (before, _) in enumerate(rims):
        # The part of this rank's outputs that has inputs; it is within the shard.
        lo = max(old.box.lo[dim], out.box.lo[dim] - before)
        hi = max(lo, min(old.box.hi[dim], out.box.hi[dim] - before))
        first = lo - (out.box.lo[dim] - before) if hi > lo else out.box.shape[dim]
        start = lo - old.box.lo[dim] if hi > lo else 0
        local = local.narrow(dim, start, hi - lo)
        added = [first, out.box.shape[dim] - first - (hi - lo), *added]
    return wrap(F.pad(local, added, value=value), out, x)


def padded_layout(layout: Layout, rims: Rims) -> Layout:
    """Returns the layout after padding, with each split dim's points shifted by its padding."""
    shape = [n + before + after for n, (before, after) in zip(layout.shape, rims, strict=True)]
    moved = {
        dim: [p + rims[dim][0] for p in split.partition.points]
        for dim, split in enumerate(layout.splits)
        if split is not None
    }
    return moved_points(layout, shape, moved)


def _rims(pad: Sequence[int], dims: int) -> Rims:
    pairs = list(zip(pad[::2], pad[1::2], strict=True))
    return ((0, 0),) * (dims - len(pairs)) + tuple(reversed(pairs))


class _MirrorPlan:
    """Plan that runs a reflecting or replicating pad on the inputs gathered for this rank.

    All ranks use the same code: the backward of torch's kernels depends on their input, which in
    double backward adds a path (for zeros) back through the preceding exchanges.

    Args:
        layout: of the input.
        rims: of every dim.
        mode: "reflect" or "replicate".
        dims: number of last dims that the call pads; torch has a kernel for each number.
        device: of the input.
    """

    def __init__(
        self, layout: Layout, rims: Rims, mode: str, dims: int, device: torch.device
    ) -> None:
        self.out = padded_layout(layout, rims)
        self._rims, self._mode, self._dims = rims, mode, dims
        self._sources = {
            dim: source_of_pad(0, layout.shape[dim], rim, mode)
            for dim, rim in enumerate(rims)
            if rim != (0, 0)
        }
        spans = {dim: ReadRange(source, source) for dim, source in self._sources.items()}
        self.reads = Reads(layout, self.out, spans)
        local = {d: self.reads.local(d, source) for d, source in self._sources.items()}
        self._indices = {
            d: i.to(device) for d, i in local.items() if not self.reads.copies_all(d, i)
        }
        pads = [
            self._local_pad(*each) for each in zip(self.reads.boxes, self.out.boxes, strict=True)
        ]
        self._pad = None if None in pads else pads[layout.mesh.sample_index]

    def run(self, box: Tensor) -> Tensor:
        """Computes this rank's outputs from the inputs that they read."""
        if self._pad is not None:
            return F.pad(box, self._pad, self._mode)
        for dim, indices in self._indices.items():
            box = take_indices(box, dim, indices)
        return box if self._indices else box.clone()

    def _local_pad(self, box: Box, out: Box) -> list[int] | None:
        """Returns the pad that gives a rank's outputs from its inputs, or `None`."""
        if box.empty or out.empty:
            return None
        added: list[int] = []
        for dim in reversed(range(len(self._rims) - self._dims, len(self._rims))):
            before = box.lo[dim] + self._rims[dim][0] - out.lo[dim]
            rim = (before, out.shape[dim] - box.shape[dim] - before)
            try:
                found = source_of_pad(box.lo[dim], box.hi[dim], rim, self._mode)
            except RuntimeError:
                return None
            expected = self._sources.get(dim)
            if expected is not None and not found.equal(expected[out.lo[dim] : out.hi[dim]]):
                return None
            added += rim
        return added


def source_of_pad(lo: int, hi: int, rim: tuple[int, int], mode: str) -> Tensor:
    """Returns torch's source index in lo, ..., hi - 1 of each element of the padded interval.

    Args:
        lo: first index of the interval.
        hi: index after the last one.
        rim: elements before and after the interval.
        mode: "reflect" or "replicate".
    """
    indices = torch.arange(lo, hi, dtype=torch.float64)
    return F.pad(indices.view(1, 1, -1), rim, mode).flatten().long()


def _mirrored(x: ShardedTensor, rims: Rims, mode: str, dims: int) -> ShardedTensor:
    layout = x.layout
    local = _as_autocast(local_of(x), dims, mode)
    key = ("mirror", layout, rims, mode, dims, local.device)

    def make() -> _MirrorPlan:
        with planning():
            return _MirrorPlan(layout, rims, mode, dims, local.device)

    plan = layout.mesh.session.plan(key, make)
    return wrap(plan.run(plan.reads.gather(wrap(local, layout, x))), plan.out, x)


def _as_autocast(local: Tensor, dims: int, mode: str) -> Tensor:
    """Converts the shard to the dtype in which torch pads it under autocast, by number of dims."""
    if not torch.is_autocast_enabled(local.device.type) or not local.is_floating_point():
        return local
    probe = (1,) * local.dim(), local
    return local.to(result_dtype(F.pad, probe, arguments=((0, 0) * dims, mode)))
