"""Computes the geometry of convolution and pooling: each rank's outputs, and their inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from pydist.errors import UsageError
from pydist.exchange.exchanger import Exchanger
from pydist.exchange.redistribution import BoxGatherer
from pydist.layout import Layout, Split
from pydist.partition import Box, Footprint, subtract


@dataclass(frozen=True)
class Window:
    """Window that a convolution or pool applies, with its geometry in every spatial dim."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]

    def footprint(self, dim: int) -> Footprint:
        """Returns the footprint along one spatial dim (0 is the first after the channels)."""
        before, after = self.padding[dim]
        return Footprint(self.kernel[dim], self.stride[dim], self.dilation[dim], before, after)

    def with_ceil(self, extents: Sequence[int]) -> Window:
        """Returns the window with the extra padding at the end that `ceil_mode` implies."""
        padding = []
        for dim, (extent, (before, after)) in enumerate(zip(extents, self.padding, strict=True)):
            reach = self.dilation[dim] * (self.kernel[dim] - 1) + 1
            rest = extent + before + after - reach
            out = -(-rest // self.stride[dim]) + 1
            # A window must not start in the padding after the end.
            if (out - 1) * self.stride[dim] >= extent + before:
                out -= 1
            padding.append((before, (out - 1) * self.stride[dim] + reach - extent - before))
        return replace(self, padding=tuple(padding))


class WindowPlan:
    """Plan of a window operation: its output layout, and the inputs that each rank needs.

    An output belongs to the owner of the input at its window's center. So a layer with "same"
    padding keeps the partition, and a layer of stride s divides its points by s.

    Args:
        layout: of the input.
        window: of every spatial dim.
        out_channels: of the result.
        channels: split of the result's channels.
        out: layout of the result; derived from `layout` by default.

    Attributes:
        out: layout of the result.
        needed: the box of inputs of each rank, including padding (outside the domain).
        is_whole: whether no spatial dim is split, so that torch's own call is exact.
    """

    def __init__(
        self,
        layout: Layout,
        window: Window,
        out_channels: int,
        channels: Split | None = None,
        out: Layout | None = None,
    ) -> None:
        self.layout, self.window = layout, window
        spatial = range(2, len(layout.shape))
        footprints = [window.footprint(d - 2) for d in spatial]
        extents = [
            f.output_extent(layout.shape[d]) for d, f in zip(spatial, footprints, strict=True)
        ]
        if min(extents) < 1:
            raise UsageError(
                f"a window of kernel {window.kernel}, dilation {window.dilation} and padding "
                f"{window.padding} does not fit into the extents {layout.shape[2:]}"
            )
        splits = [layout.splits[0], channels, *layout.splits[2:]]
        for d, footprint in zip(spatial, footprints, strict=True):
            split = layout.splits[d]
            if split is not None:
                splits[d] = Split(split.axes, footprint.output_partition(split.partition))
        self.out = out or Layout(layout.mesh, (layout.shape[0], out_channels, *extents), splits)
        self._reach = [d * (k - 1) + 1 for k, d in zip(window.kernel, window.dilation, strict=True)]
        self.is_whole = not any(layout.splits[d] for d in spatial)
        self.needed = [
            self._needs(out, own, footprints)
            for out, own in zip(self.out.boxes, layout.boxes, strict=True)
        ]

    @cached_property
    def gathers(self) -> BoxGatherer:
        """Gatherer of the inputs that each rank needs."""
        return BoxGatherer(self.layout, self.needed)

    @cached_property
    def halos(self) -> list[list[Box]]:
        """Input slabs in the domain that each rank's outputs need and other ranks own."""
        domain = Box([0] * len(self.layout.shape), self.layout.shape)
        return [
            subtract(need.intersect(domain), own)
            for need, own in zip(self.needed, self.layout.boxes, strict=True)
        ]

    @cached_property
    def grad_halos(self) -> list[list[Box]]:
        """Output slabs of other ranks to which each rank's inputs contribute."""
        domain = Box([0] * len(self.out.shape), self.out.shape)
        return [
            [] if own.empty else subtract(self._fed_by(own, out).intersect(domain), out)
            for own, out in zip(self.layout.boxes, self.out.boxes, strict=True)
        ]

    def exchanges(self, channels_last: bool) -> Exchanges:
        """Returns the halo exchanges, whose messages have the given memory format."""
        return self._channels_last if channels_last else self._plain

    @cached_property
    def _channels_last(self) -> Exchanges:
        return Exchanges(self, channels_last=True)

    @cached_property
    def _plain(self) -> Exchanges:
        return Exchanges(self, channels_last=False)

    def _fed_by(self, own: Box, out: Box) -> Box:
        lo, hi = list(out.lo), list(out.hi)
        for dim in range(2, len(lo)):
            lo[dim], hi[dim] = self.window.footprint(dim - 2).feeds(own.lo[dim], own.hi[dim])
        return Box(lo, hi)

    @cached_property
    def gathered_shapes(self) -> list[tuple[int, ...]]:
        """Shapes of the inputs that `apply` passes to each rank's function."""
        shapes = []
        for out, needed in zip(self.out.boxes, self.needed, strict=True):
            n, c, *extents = needed.shape
            if out.empty:
                extents = [max(e, r) for e, r in zip(extents, self._reach, strict=True)]
            shapes.append((n, c, *extents))
        return shapes

    def _needs(self, out: Box, own: Box, footprints: Sequence[Footprint]) -> Box:
        lo, hi = list(own.lo), list(own.hi)
        for dim, footprint in enumerate(footprints, start=2):
            lo[dim], hi[dim] = footprint.needs(out.lo[dim], out.hi[dim])
            if out.empty:
                hi[dim] = lo[dim]
        return Box(lo, hi)

    def apply(
        self,
        function: Callable[[Tensor], Tensor],
        local: Tensor,
        channels_last: bool = False,
    ) -> Tensor:
        """Gathers this rank's inputs, including halo and padding, and computes its outputs.

        Args:
            function: the window operation, without padding.
            local: the shard of the input.
            channels_last: the memory format of the inputs passed to `function`.

        A rank without outputs computes one dummy window and discards it. It has to run the same
        nodes in backward and double backward as the other ranks; otherwise its hooks do not fire,
        its exchanges run in another order, and the job hangs.
        """
        padded = self.gathers(local, channels_last)
        if not self.out.box.empty:
            return function(padded)
        missing = [r - n for r, n in zip(self._reach, padded.shape[2:], strict=True)]
        one = F.pad(padded, [p for m in reversed(missing) for p in (0, max(0, m))])
        kept = tuple(slice(n) for n in self.out.local_shape)
        # Not a view: an in-place op on a view records other nodes than on the other ranks.
        return function(one)[kept].reshape(self.out.local_shape).clone()


class Exchanges:
    """Halo exchanges that a window operation needs: of its input, and of dL/dy.

    Attributes:
        halo: exchanges slabs of the input.
        grad_halo: exchanges slabs of dL/dy.
    """

    def __init__(self, plan: WindowPlan, channels_last: bool) -> None:
        mesh = plan.layout.mesh
        self._timers = timers = mesh.session.timers
        own, out = plan.layout.boxes, plan.out.boxes
        self.halo = Exchanger(mesh.sample, own, plan.halos, timers, channels_last)
        self.grad_halo = Exchanger(mesh.sample, out, plan.grad_halos, timers, channels_last)

    def corrected(
        self,
        exchanger: Exchanger,
        x: Tensor,
        main: Callable[[], Tensor],
        add: Callable[[Tensor, int, Tensor, Box], Any],
        change: Callable[[Tensor], None] | None = None,
    ) -> Tensor:
        """Computes on the shard while the halo is in flight, then adds each slab's contribution.

        A rank that takes no part in the exchange sends and receives nothing.

        Args:
            exchanger: `halo`, or `grad_halo` for an adjoint.
            x: the shard.
            main: computes the result of the shard while the halo is in flight.
            add: adds a slab's contribution to the result; called with the result, the number of
                the slab, the slab, and its box.
            change: applied in place to the send buffers.
        """
        if exchanger.is_local:
            exchanger.announce(x)
            return main()
        pending = exchanger.start(x, change)
        slabs = exchanger.empty_slots(x)
        try:
            y = main()
        except Exception:
            # All ranks may raise this and continue: later exchanges must not match these messages.
            with suppress(Exception):
                exchanger.finish(pending, slabs)
            raise
        with self._timers.measure("halo"):
            exchanger.finish(pending, slabs)
        with self._timers.measure("boundary"):
            for number, (slab, box) in enumerate(zip(slabs, exchanger.slots, strict=True)):
                add(y, number, slab, box)
        return y


def plan_window(
    layout: Layout, window: Window, out_channels: int, channels: Split | None = None
) -> WindowPlan:
    """Returns the cached plan of a window operation on a layout; see `WindowPlan`."""
    key = ("window", layout, window, out_channels, channels)
    return layout.mesh.session.plan(key, lambda: WindowPlan(layout, window, out_channels, channels))


def as_tuple(value: int | Sequence[int], dims: int) -> tuple[int, ...]:
    """Expands a size argument, given as one number or one per dim, to a tuple."""
    if isinstance(value, int):
        return (value,) * dims
    value = tuple(value)
    return value * dims if len(value) == 1 else value


def as_keys(dims: int, *sizes: Any) -> tuple[Any, ...]:
    """Returns size arguments as parts of a plan's key: as given, if a dict can hold them.

    The plan converts them once, where `as_tuple` would in every call.

    Args:
        dims: number of spatial dims.
        sizes: for each argument, one number, one per dim, `None` or a word.
    """
    found = []
    for size in sizes:
        found.append(size if type(size) in _KEYS else as_tuple(size, dims))
    return tuple(found)


_KEYS = (int, tuple, str, type(None))


def symmetric(padding: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Returns pairs with the same padding before and after."""
    return tuple((p, p) for p in padding)
