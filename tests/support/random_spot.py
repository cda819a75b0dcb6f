"""Where a block of a random network is to stand, and what its numbers are drawn from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

from hypothesis import strategies as st
from torch import nn

T = TypeVar("T")


@dataclass
class Spot:
    """Where a block is to stand, and what its numbers are drawn from."""

    draw: st.DrawFn
    shape: tuple[int, ...]
    depth: int

    @property
    def dims(self) -> int:
        return len(self.shape) - 2

    @property
    def channels(self) -> int:
        return self.shape[1]

    @property
    def extents(self) -> tuple[int, ...]:
        return self.shape[2:]

    def pick(self, *options: T) -> T:
        return self.draw(st.sampled_from(options))

    def number(self, low: int, high: int) -> int:
        return self.draw(st.integers(low, high))

    def flag(self) -> bool:
        return self.draw(st.booleans())

    def each(self, low: int, high: int) -> tuple[int, ...]:
        return tuple(self.number(low, high) for _ in range(self.dims))

    def layer(self, name: str) -> type[nn.Module]:
        """`Conv` as Conv1d, Conv2d or Conv3d."""
        return getattr(nn, f"{name}{self.dims}d")

    def dim(self) -> int:
        """A spatial dim."""
        return self.number(2, self.dims + 1)

    def some_dims(self, first: int = 1) -> tuple[int, ...]:
        """One or more dims."""
        possible = range(first, self.dims + 2)
        return tuple(sorted(self.draw(st.sets(st.sampled_from(possible), min_size=1))))
