"""What a store has saved: hits, bytes from files, from disks and from other ranks."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from pydist.comm import Transport


@dataclass
class Figures:
    """Counts of the blocks and bytes that one rank, or all ranks, have read, received and held.

    Attributes:
        blocks: blocks that batches were made of.
        file_blocks: those that were read from files.
        disk_blocks: those that were read from the local disk of some rank.
        file_bytes: bytes read from files, with labels and targets; 0 for sources without
            `bytes_read`.
        disk_bytes: bytes read from local disks.
        received_bytes: bytes of blocks, with labels and targets, received from other ranks.
        lost_blocks: blocks that a local disk could not store or read back.
        held_bytes: bytes of the blocks in memory.
        spilled_bytes: bytes of the blocks on local disks.
        stored_bytes: the same after compression.
        most_held_bytes: bytes in memory on the rank that holds most.
        most_staged_bytes: most bytes that blocks from disk took in memory at one time, before they
            were sent, on one rank.
    """

    blocks: int = 0
    file_blocks: int = 0
    disk_blocks: int = 0
    file_bytes: int = 0
    disk_bytes: int = 0
    received_bytes: int = 0
    lost_blocks: int = 0
    held_bytes: int = 0
    spilled_bytes: int = 0
    stored_bytes: int = 0
    most_held_bytes: int = 0
    most_staged_bytes: int = 0

    @property
    def hit_rate(self) -> float:
        """Fraction of the blocks that came from memory or disk, of this rank or of another one."""
        return 1 - self.file_blocks / self.blocks if self.blocks else 0.0

    @property
    def disk_rate(self) -> float:
        """Fraction of the blocks that came from a disk."""
        return self.disk_blocks / self.blocks if self.blocks else 0.0

    @property
    def compression(self) -> float:
        """Ratio that compression achieves: bytes of the blocks on disk, before over after it."""
        return self.spilled_bytes / self.stored_bytes if self.stored_bytes else 1.0

    def add(self, other: Figures) -> None:
        """Adds the counts of another batch."""
        for name in _COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def over(self, world: Transport) -> Figures:
        """Returns the figures of all ranks together. Collective."""
        names = [field.name for field in fields(self)]
        most = [name for name in names if name.startswith("most_")]
        sums = [name for name in names if name not in most]
        summed, largest = (
            torch.tensor([getattr(self, name) for name in group], dtype=torch.int64, device="cpu")
            for group in (sums, most)
        )
        world.all_reduce(summed)
        world.all_reduce(largest, "max")
        values = [*summed.tolist(), *largest.tolist()]
        return Figures(**dict(zip([*sums, *most], values, strict=True)))


_COUNTS = (
    "blocks", "file_blocks", "disk_blocks", "file_bytes", "disk_bytes", "received_bytes",
    "lost_blocks",
)  # fmt: skip
"""Figures that add up over batches."""
