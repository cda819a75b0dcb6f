"""Holds the input shape of a block in a random network, and draws the block's random numbers."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")


class Source(str):
    """Python source of an expression; its `repr` is the source, so lists of it are source, too."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def call(name: str, *args: Any, **kwargs: Any) -> Source:
    """Returns the source of a call: `call("nn.Conv1d", 2, 3, kernel_size=1)`."""
    given = [repr(a) for a in args] + [f"{k}={v!r}" for k, v in kwargs.items()]
    return Source(f"{name}({', '.join(given)})")


@dataclass
class Spot:
    """The input shape of a block, and the random numbers that select the block.

    Attributes:
        numbers: a seeded generator, or one of Hypothesis (`st.randoms()`), which can shrink.
        shape: [N, C, ...] of the block's input.
        depth: remaining levels of chains inside blocks.
    """

    numbers: random.Random
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
        return self.numbers.choice(options)

    def number(self, low: int, high: int) -> int:
        return self.numbers.randint(low, high)

    def flag(self) -> bool:
        return self.number(0, 1) == 1

    def each(self, low: int, high: int) -> tuple[int, ...]:
        return tuple(self.number(low, high) for _ in range(self.dims))

    def layer(self, name: str, *args: Any, **kwargs: Any) -> Source:
        """Returns a layer of torch.nn for these dims: `Conv` becomes Conv1d, Conv2d or Conv3d."""
        return call(f"nn.{name}{self.dims}d", *args, **kwargs)

    def dim(self) -> int:
        """Draws a spatial dim."""
        return self.number(2, self.dims + 1)

    def some_dims(self) -> tuple[int, ...]:
        """Draws one or more dims."""
        possible = range(1, self.dims + 2)
        return tuple(sorted(self.numbers.sample(possible, self.number(1, len(possible)))))
