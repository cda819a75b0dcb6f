"""Computes geometry (boxes, partitions and footprints) by the native core.

A `Box` is half open and in global indices. A `Partition` holds the split points of one dim, even
or not; a part may be empty. A `Footprint` computes which inputs an interval of outputs reads
(kernel, stride, dilation, padding). `plan_exchange` intersects the boxes that every rank needs with
the boxes that every rank owns, and so finds every message of an exchange.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from pydist._loader import native
from pydist.errors import UsageError

Box = native.Box
Partition = native.Partition
Footprint = native.Footprint
Plan = native.Plan
plan_exchange = native.plan_exchange
subtract = native.subtract

__all__ = [
    "Box",
    "Footprint",
    "Partition",
    "Plan",
    "divide",
    "in_units",
    "plan_exchange",
    "split_extent",
    "subdivide",
    "subtract",
    "units_of",
]


def split_extent(extent: int, parts: int, shares: Sequence[float] | None = None) -> Partition:
    """Splits an extent into parts, evenly or by shares; each has an element if there are enough.

    Args:
        extent: number of elements.
        parts: number of parts.
        shares: one positive number per part, in proportion to its elements; even parts by default.
    """
    if shares is None:
        return Partition.even(extent, parts)
    return divide(extent, shares, least=int(extent >= parts))


def divide(extent: int, shares: Sequence[float], least: int = 1, multiple: int = 1) -> Partition:
    """Divides an extent into parts in proportion to shares, such as the speeds of devices.

    Each part is its quota `extent * share / sum(shares)`, rounded so that the sum is exact: parts
    start at the quota rounded down, or `least`; then those furthest below their quota grow, or
    those furthest above shrink, one unit at a time. Of equals, the first one changes.

    Args:
        extent: the number of elements.
        shares: one positive number per part.
        least: the smallest part, in units of `multiple`.
        multiple: parts are multiples of this, except for a remainder, which the first of the
            largest parts gets.

    Returns:
        The partition.

    Raises:
        UsageError: a share is not positive, or the extent is too small for the parts.
    """
    if not shares or not all(0 < share < float("inf") for share in shares):
        raise UsageError(f"shares {list(shares)}: expected positive numbers, one per part")
    units = units_of(extent, len(shares), least, multiple)
    most = max(shares)
    total = sum(share / most for share in shares)  # the sum itself could be infinite
    quotas = [units * (share / most) / total for share in shares]
    parts = [max(least, int(quota)) for quota in quotas]
    over = [part - quota for part, quota in zip(parts, quotas, strict=True)]
    while (change := units - sum(parts)) != 0:
        step = 1 if change > 0 else -1
        candidates = [i for i, part in enumerate(parts) if step > 0 or part > least]
        chosen = min(candidates, key=lambda i: (step * over[i], i))
        parts[chosen] += step
        over[chosen] += step
    return in_units(parts, extent, multiple)


def units_of(extent: int, parts: int, least: int, multiple: int) -> int:
    """Returns how many units of `multiple` an extent has for parts of `least` units; see `divide`.

    Raises:
        UsageError: the extent is too small for the parts.
    """
    units = extent // multiple
    if parts < 1 or units < least * parts:
        raise UsageError(
            f"an extent of {extent} can't be divided into {parts} parts of at least "
            f"{least * multiple}"
        )
    return units


def in_units(parts: Sequence[int], extent: int, multiple: int) -> Partition:
    """Returns the partition of an extent with parts in units of `multiple`; see `divide`."""
    sizes = [part * multiple for part in parts]
    sizes[sizes.index(max(sizes))] += extent % multiple
    return Partition([0, *accumulate(sizes)])


def subdivide(points: Sequence[int], parts: int) -> Partition:
    """Divides each interval between consecutive points evenly into parts."""
    found = [points[0]]
    for lo, hi in pairwise(points):
        found += [lo + p for p in Partition.even(hi - lo, parts).points[1:]]
    return Partition(found)
