"""Places the tensors of a trace on the ranks of a mesh: their blocks, and the halos between them.

Dims are cut independently of each other, so each spatial dim is followed through the network once
for each number of parts, and a mesh combines them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pydist.ops.windows import Window
from pydist.partition import Footprint, Partition
from pydist.plan.trace import Trace, TracedCall

RESAMPLING = ("interpolate", "upsample", "grid_sample")


@dataclass(frozen=True)
class Halo:
    """Elements along one dim that the rank with most needs and does not own.

    Attributes:
        width: of the halo.
        sides: number of neighbors that it comes from.
    """

    width: int = 0
    sides: int = 0


NO_HALO = Halo()


class CutDim:
    """Spatial dim that is cut into parts, followed through the calls of a network.

    Args:
        trace: of the network.
        dim: of the tensors, 2 or above.
        parts: number of parts.

    Attributes:
        sizes: the largest part of each tensor; 0 if it does not have the dim.
        halos: of the input of each call.
        gradient_halos: of the gradient of the output of each call.
        is_thin: whether a part of a call's input is thinner than half of the window; then
            `pydist.ops.coarsening` may use fewer ranks.
    """

    def __init__(self, trace: Trace, dim: int, parts: int) -> None:
        self._dim, self._parts = dim, parts
        first = trace.tensors[0].shape
        self._dims = len(first)
        self._partitions: list[Partition | None] = [None] * len(trace.tensors)
        self._partitions[0] = Partition.even(first[dim], parts)
        self.halos, self.gradient_halos = list[Halo](), list[Halo]()
        self.is_thin = list[bool]()
        for call in trace.calls:
            self._follow(trace, call)
        self.sizes = [0 if found is None else max(found.sizes) for found in self._partitions]

    def _follow(self, trace: Trace, call: TracedCall) -> None:
        source = next((p for n in call.inputs if (p := self._partitions[n]) is not None), None)
        halo = backward = NO_HALO
        thin = False
        for number in call.outputs:
            shape = trace.tensors[number].shape
            if source is None or len(shape) != self._dims:
                continue
            extent = shape[self._dim]
            out = source if extent == source.extent else _scaled(source, extent)
            if call.window is not None:
                place = self._dim - (self._dims - len(call.window.kernel))
                before, after = call.window.padding[place]
                footprint = Footprint(
                    call.window.kernel[place], call.window.stride[place],
                    call.window.dilation[place], before, after,
                )  # fmt: skip
                if call.kind == "transposed":
                    halo, backward = _halos(footprint, out, source)[::-1]
                else:
                    if footprint.output_extent(source.extent) == extent:
                        out = footprint.output_partition(source)
                    halo, backward = _halos(footprint, source, out)
                    thin = min(source.sizes) < _least(call.window, place)
            elif call.name in RESAMPLING:
                halo = backward = Halo(2, 2) if source.parts > 1 else NO_HALO
            self._partitions[number] = out
        self.halos.append(halo)
        self.gradient_halos.append(backward)
        self.is_thin.append(thin)


def _least(window: Window, place: int) -> int:
    """Returns the size from which on a part is not thin; see `pydist.ops.coarsening`."""
    reach = window.dilation[place] * (window.kernel[place] - 1)
    return max(reach // 2, reach - reach // 2 - (window.stride[place] - 1))


def _scaled(source: Partition, extent: int) -> Partition:
    """Returns the partition of another extent, with points at the same places."""
    return Partition([-(-point * extent // source.extent) for point in source.points])


def _halos(footprint: Footprint, inputs: Partition, outputs: Partition) -> tuple[Halo, Halo]:
    """Returns the halos of a convolution's inputs, and of the gradient of its outputs."""
    found = [NO_HALO, NO_HALO]
    for part in range(inputs.parts):
        own, out = inputs.interval(part), outputs.interval(part)
        pairs = (
            (footprint.needs(*out), own, out, inputs.extent),
            (footprint.feeds(*own), out, own, outputs.extent),
        )
        for i, (needed, owned, reason, extent) in enumerate(pairs):
            if reason[0] == reason[1]:
                continue
            lo, hi = max(needed[0], 0), min(needed[1], extent)
            before, after = max(0, min(owned[0], hi) - lo), max(0, hi - max(owned[1], lo))
            if before + after > found[i].width:
                found[i] = Halo(before + after, (before > 0) + (after > 0))
    return found[0], found[1]


class Cuts:
    """The ways in which the spatial dims of a network can be cut, each followed once."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._known: dict[tuple[int, int], CutDim] = {}

    def of(self, parts: Sequence[int]) -> list[CutDim]:
        """Returns the cut of each spatial dim of the input.

        Args:
            parts: number of parts along depth, height and width.
        """
        dims = range(2, len(self._trace.tensors[0].shape))
        return [self._of(dim, n) for dim, n in zip(dims, parts, strict=False)]

    def _of(self, dim: int, parts: int) -> CutDim:
        key = dim, parts
        if key not in self._known:
            self._known[key] = CutDim(self._trace, dim, parts)
        return self._known[key]
