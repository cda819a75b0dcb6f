"""Divides volumes into boxes over ranks, so that no rank holds all of one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pydist._loader import native
from pydist.exchange.exchanger import Exchanger
from pydist.partition import Box

if TYPE_CHECKING:
    from pydist.comm import Transport


_SENT_AS = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
"""Types for the bits of those that MPI's and torch's messages lack."""


@dataclass(frozen=True)
class BoxedVolume:
    """Volume of channels or classes that is divided into boxes, one on each rank.

    Attributes:
        group: the ranks.
        boxes: disjoint boxes of the ranks, such as over (D, H, W); some may be empty.
        local: [channels, ...] of this rank's box, in host memory.
    """

    group: Transport
    boxes: Sequence[Box]
    local: Tensor

    @classmethod
    def empty(
        cls, group: Transport, boxes: Sequence[Box], channels: int, dtype: torch.dtype
    ) -> BoxedVolume:
        """Makes a volume of zeros."""
        shape = (channels, *boxes[group.rank].shape)
        return cls(group, boxes, torch.zeros(shape, dtype=dtype))

    @property
    def box(self) -> Box:
        """Box that this rank holds."""
        return self.boxes[self.group.rank]

    def read(self, needed: Sequence[Box | None]) -> Tensor | None:
        """Returns a box of all channels that this rank needs, from its holders. Collective.

        Args:
            needed: a box for each rank; None for no box.

        Returns:
            [channels, ...] of the box; None where there is none.
        """
        exchanger, kind = self._exchanger(needed), self.local.dtype
        local = self.local.view(_SENT_AS.get(kind, kind))
        slots = exchanger.empty_slots(local)
        exchanger.gather(local, slots)
        return slots[0].view(kind) if slots else None

    def read_channel(self, channel: int, needed: Sequence[Box | None]) -> Tensor | None:
        """Does the same as `read`, for one channel."""
        return BoxedVolume(self.group, self.boxes, self.local[channel : channel + 1]).read(needed)

    def add(self, given: Sequence[Box | None], values: Tensor | None) -> None:
        """Adds a box of values of each rank to the boxes that hold its voxels. Collective.

        Contributions to a voxel are added in rank order, whichever rank holds the voxel.

        Args:
            given: a box for each rank; None for no box.
            values: [channels, ...] of this rank's box; None for no box.
        """
        rank = self.group.rank
        exchanger = self._exchanger(given)
        pending = exchanger.start_adjoint([] if values is None else [values], self.local)
        pending.wait()
        received = iter(pending.shard_parts)
        for peer, box in enumerate(given):
            if box is None or (common := self._all_channels(self.box.intersect(box))).empty:
                continue
            if peer != rank:
                piece, places = next(received)
                native.unpack_add(piece, places, self.local)
                continue
            assert values is not None
            self.local[_slices(common, self.box)] += values[_slices(common, box)]

    def _exchanger(self, needed: Sequence[Box | None]) -> Exchanger:
        owned = [self._all_channels(box) for box in self.boxes]
        slots = [[] if box is None else [self._all_channels(box)] for box in needed]
        return Exchanger(self.group, owned, slots)

    def _all_channels(self, box: Box) -> Box:
        return Box((0, *box.lo), (len(self.local), *box.hi))


def _slices(box: Box, within: Box) -> tuple[slice, ...]:
    """Returns the place of a box, with channels, in the memory of another one, without."""
    return box.shift([0, *(-a for a in within.lo)]).slices
