"""Divides an extent into parts for ranks of unequal speed, from measured times.

One number per device is too simple a model: of two GPUs one can be 1.7 or 5.5 times as fast as the
other, by the size of the work. So each part has a curve, its seconds as a function of its width
(the functional performance model of Lastovetsky and Reddy, Int. J. High Perform. Comput. Appl. 21,
2007), which a few measurements define.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate

from pydist.errors import UsageError
from pydist.partition import Partition, in_units, units_of

__all__ = ["Curve", "balance"]


class Curve:
    """Seconds that a part takes as a function of its width: piecewise linear, never decreasing.

    Between two measured widths the seconds are interpolated. Below the least one and above the
    largest one the speed is that of the nearest measured width, unless the nearest two define a
    line with a fixed cost, which is then extended.

    Args:
        points: widths > 0 with seconds >= 0, in any order; of equal widths the least seconds
            count, as other work only adds.

    Raises:
        UsageError: no points, or one out of range.
    """

    def __init__(self, points: Iterable[tuple[float, float]]) -> None:
        least: dict[float, float] = {}
        for width, seconds in points:
            if not (0 < width < float("inf") and 0 <= seconds < float("inf")):
                raise UsageError(f"{seconds} s at width {width}: expected widths > 0 and times")
            least[width] = min(seconds, least.get(width, seconds))
        if not least:
            raise UsageError("a curve needs the time at one width at least")
        self._widths = sorted(least)
        # More work takes no less time: a shorter time at a larger width is noise.
        self._seconds = list(accumulate((least[width] for width in self._widths), max))

    def __call__(self, width: float) -> float:
        """Returns the seconds at a width."""
        widths, seconds = self._widths, self._seconds
        at = bisect_left(widths, width)
        nearest = min(at, len(widths) - 1)
        speed = seconds[nearest] / widths[nearest]
        if len(widths) > 1:
            lo = min(max(at - 1, 0), len(widths) - 2)
            slope = (seconds[lo + 1] - seconds[lo]) / (widths[lo + 1] - widths[lo])
            if 0 < at < len(widths) or 0 < slope <= speed:
                return seconds[lo] + slope * (width - widths[lo])
        return speed * width


def balance(curves: Sequence[Curve], extent: int, least: int = 1, multiple: int = 1) -> Partition:
    """Divides an extent so that the slowest part is as fast as possible.

    Units go one by one to the part that would be the fastest with one more. As curves never
    decrease, no other division has a smaller maximum.

    Args:
        curves: of each part, in widths of the extent; at least one.
        extent: see `pydist.partition.divide`, like `least` and `multiple`.
        least: the smallest part, in units of `multiple`.
        multiple: parts are multiples of it, except for a remainder.

    Raises:
        UsageError: the extent is too small for the parts.
    """
    units = units_of(extent, len(curves), least, multiple)
    parts = [least] * len(curves)
    for _ in range(units - sum(parts)):
        times = [curve((n + 1) * multiple) for curve, n in zip(curves, parts, strict=True)]
        parts[times.index(min(times))] += 1
    return in_units(parts, extent, multiple)
