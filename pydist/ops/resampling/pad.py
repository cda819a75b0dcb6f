"""Padding of sharded tensors: constant, reflect, replicate, circular; negative pads crop."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from pydist.layout import Layout
from pydist.ops.resampling.periodic import circular_pad
from pydist.ops.resampling.reads import ReadRange, Reads, moved_points, planning, select
from pydist.partition import Box
from pydist.tensor import ShardedTensor, implements, local_of, wrap

Rims = tuple[tuple[int, int], ...]
"""What is added before and after each dim; negative: what is cut off."""


@implements(F.pad, torch._C._nn.pad)
def pad(
    input: ShardedTensor, pad: Sequence[int], mode: str = "constant", value: float | None = None
) -> ShardedTensor:
    """Pads or crops any dims. Outputs lie with their inputs; the outer ranks take the rims.

    Raises:
        RuntimeError, ValueError, NotImplementedError: as torch on the whole tensor.
    """
    layout = input._layout

    def make() -> Rims:
        # torch's own checks and messages, on the whole shape.
        whole = torch.empty(layout.shape, dtype=input.dtype, device="meta")
        F.pad(whole, tuple(pad), mode, value)
        return _rims(pad, len(layout.shape))

    key = ("pad", layout, tuple(pad), mode, value, input.dtype)
    rims = layout.mesh.session.plan(key, make)
    if mode == "constant":
        return constant_pad(input, rims, value)
    if mode == "circular":
        # As torch has it: cropped first, and what is left goes round.
        input = constant_pad(input, tuple((min(0, a), min(0, b)) for a, b in rims), None)
        return circular_pad(input, [(max(0, a), max(0, b)) for a, b in rims])
    return _mirrored(input, rims, mode, len(pad) // 2)


@implements(torch.constant_pad_nd)
def constant_pad_nd(input: ShardedTensor, pad: Sequence[int], value: float = 0) -> ShardedTensor:
    """The constant mode of `pad`."""
    return F.pad(input, tuple(pad), "constant", value)  # type: ignore[return-value]


def constant_pad(x: ShardedTensor, rims: Rims, value: float | None) -> ShardedTensor:
    """Padding by a constant, and cropping, of the shards as they lie: nothing is exchanged."""
    old, out = x._layout, padded_layout(x._layout, rims)
    local = local_of(x)
    added: list[int] = []
    for dim, (before, _) in enumerate(rims):
        # The part of this rank's outputs that has inputs; it lies within the shard.
        lo = max(old.box.lo[dim], out.box.lo[dim] - before)
        hi = max(lo, min(old.box.hi[dim], out.box.hi[dim] - before))
        first = lo - (out.box.lo[dim] - before) if hi > lo else out.box.shape[dim]
        start = lo - old.box.lo[dim] if hi > lo else 0
        local = local.narrow(dim, start, hi - lo)
        added = [first, out.box.shape[dim] - first - (hi - lo), *added]
    return wrap(F.pad(local, added, value=value), out, x)


def padded_layout(layout: Layout, rims: Rims) -> Layout:
    """The same points of every split dim, counted from where the padding starts."""
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
    """Where the outputs of a reflecting or replicating pad are read from, and by which code.

    All ranks take the same way, as the backward of torch's kernels names their input, which in
    second order is one more way back (for zeros) through the exchanges before.

    Args:
        layout: of the input.
        rims: of every dim.
        mode: "reflect" or "replicate".
        dims: how many of the last dims the call names; torch has a kernel for each number.
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
        """This rank's outputs, from the inputs that they read."""
        if self._pad is not None:
            return F.pad(box, self._pad, self._mode)
        for dim, indices in self._indices.items():
            box = select(box, dim, indices)
        return box if self._indices else box.clone()

    def _local_pad(self, box: Box, out: Box) -> list[int] | None:
        """The pad of a rank's inputs that has its outputs, if there is one."""
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
    """Which of the indices lo, ..., hi - 1 each element of the padded interval copies: torch's."""
    indices = torch.arange(lo, hi, dtype=torch.float64)
    return F.pad(indices.view(1, 1, -1), rim, mode).flatten().long()


def _mirrored(x: ShardedTensor, rims: Rims, mode: str, dims: int) -> ShardedTensor:
    layout = x._layout
    local = _as_autocast(local_of(x), dims, mode)
    key = ("mirror", layout, rims, mode, dims, local.device)

    def make() -> _MirrorPlan:
        with planning():
            return _MirrorPlan(layout, rims, mode, dims, local.device)

    plan = layout.mesh.session.plan(key, make)
    return wrap(plan.run(plan.reads.gather(wrap(local, layout, x))), plan.out, x)


def _as_autocast(local: Tensor, dims: int, mode: str) -> Tensor:
    """The shard in the type in which torch pads it under autocast, which differs by dims."""
    if not torch.is_autocast_enabled(local.device.type) or not local.is_floating_point():
        return local
    probe = local.detach().new_zeros((1,) * local.dim())
    return local.to(F.pad(probe, (0, 0) * dims, mode).dtype)
