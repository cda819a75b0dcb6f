"""What a store has saved: hits, bytes from files and from other ranks."""

from __future__ import annotations

from dataclasses import dataclass
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
        file_bytes: bytes read from files, with labels and targets; 0 for sources that do not count
            them (`CountedReads`).
        received_bytes: bytes of blocks, with labels and targets, received from other ranks.
        held_bytes: bytes of the blocks in memory.
        most_held_bytes: the same on the rank that holds most.
    """

    blocks: int = 0
    file_blocks: int = 0
    file_bytes: int = 0
    received_bytes: int = 0
    held_bytes: int = 0
    most_held_bytes: int = 0

    @property
    def hit_rate(self) -> float:
        """Fraction of the blocks that came from memory, of this rank or of another one."""
        return 1 - self.file_blocks / self.blocks if self.blocks else 0.0

    def add(self, other: Figures) -> None:
        """Adds the counts of another batch."""
        self.blocks += other.blocks
        self.file_blocks += other.file_blocks
        self.file_bytes += other.file_bytes
        self.received_bytes += other.received_bytes

    def over(self, world: Transport) -> Figures:
        """Returns the figures of all ranks together. Collective."""
        counts = (self.blocks, self.file_blocks, self.file_bytes, self.received_bytes)
        sums = torch.tensor([*counts, self.held_bytes], dtype=torch.int64, device="cpu")
        most = torch.tensor([self.most_held_bytes], dtype=torch.int64, device="cpu")
        world.all_reduce(sums)
        world.all_reduce(most, "max")
        blocks, of_files, file_bytes, received, held = sums.tolist()
        return Figures(blocks, of_files, file_bytes, received, held, int(most))
