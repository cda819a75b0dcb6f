"""Global batches whose size changes in a run, and the passes of a step over its batch."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from typing import Literal

from pydist.errors import UsageError

Growth = Literal["accumulate", "batch", "both"]


class BatchSizes:
    """Sizes that the global batch has, as a function of the position in a run.

    A position counts samples from the beginning of the run: epoch × samples of the data set, plus
    the place in the epoch. A step has the size of the position where it begins.

    Args:
        first: size at the beginning.
        changes: positions, ascending and above 0, and the sizes from there on.

    Attributes:
        planned: these changes; a resumed run must have planned the same.
    """

    def __init__(self, first: int, changes: Sequence[tuple[int, int]] = ()) -> None:
        self._places, self._sizes = [0], [first]
        self.version = 0
        """Number of calls of `change` and `load`."""
        for position, size in changes:
            self.change(position, size)
        self.planned = self.changes

    @property
    def first(self) -> int:
        """Size that the batch has at the beginning."""
        return self._sizes[0]

    @property
    def smallest(self) -> int:
        """Smallest size that the batch ever has."""
        return min(self._sizes)

    @property
    def changes(self) -> list[tuple[int, int]]:
        """Positions where the size changes, and the sizes from there on."""
        return list(zip(self._places[1:], self._sizes[1:], strict=True))

    @property
    def called(self) -> list[tuple[int, int]]:
        """Changes that a run has made itself; a resumed run continues with those of its state."""
        return self.changes[len(self.planned) :]

    def at(self, position: int) -> int:
        """Returns the size of a step that begins at a position."""
        return self._sizes[bisect_right(self._places, position) - 1]

    def change(self, position: int, size: int) -> None:
        """Adds a change.

        Raises:
            UsageError: there is one at this position or later, or the size is no count.
        """
        if position <= self._places[-1] or size < 1:
            raise UsageError(
                f"a batch of {size} from position {position} on, after {self.changes}: expected "
                "ascending positions above 0, and at least one sample"
            )
        self._places.append(position)
        self._sizes.append(size)
        self.version += 1

    def load(self, called: Sequence[Sequence[int]]) -> None:
        """Replaces the changes that are not planned."""
        first = 1 + len(self.planned)
        del self._places[first:], self._sizes[first:]
        for position, size in called:
            self.change(position, size)
        self.version += 1


@dataclass(frozen=True)
class PassRule:
    """Rule for the number of passes (forward and backward) that accumulate a step's gradient.

    Attributes:
        batch: global batch at the beginning.
        accumulate: passes over it.
        by: what grows with the batch: "accumulate", the passes; "batch", the samples of a pass;
            "both", the samples of a pass up to `largest`, then the passes.
        largest: samples of a pass, over all groups, for "both".
    """

    batch: int
    accumulate: int = 1
    by: Growth = "accumulate"
    largest: int | None = None

    def passes(self, batch: int, samples: int) -> int:
        """Returns the number of passes over some samples of a batch, which may be short.

        The samples of a pass are at most those of a pass over the full batch.
        """
        size = Fraction(batch if self.by != "accumulate" else self.batch, self.accumulate)
        if self.by == "both" and self.largest is not None:
            size = min(size, Fraction(self.largest))
        full = min(ceil(batch / size), batch)
        of_pass = ceil(Fraction(batch, full))
        return min(max(ceil(samples / size), ceil(Fraction(samples, of_pass))), samples)
