"""Draws random numbers of one sample in one epoch, which do not depend on the ranks."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass


@dataclass(frozen=True)
class SampleDraws:
    """Random numbers that a sample has in an epoch, by name: equal on all ranks."""

    seed: int
    epoch: int
    sample: int

    def key(self, name: str) -> int:
        """Returns 64 random bits, the key of a draw for each voxel."""
        text = f"augment/{self.seed}/{self.epoch}/{self.sample}/{name}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")

    def uniform(self, name: str, low: float = 0.0, high: float = 1.0) -> float:
        """Returns a number in [low, high)."""
        return low + (high - low) * (self.key(name) >> 11) * 2.0**-53

    def below(self, name: str, count: int) -> int:
        """Returns an integer from 0 to count - 1."""
        return int(self.uniform(name) * count)
