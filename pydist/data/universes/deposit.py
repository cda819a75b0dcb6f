"""Deposits particles on a grid as a density: by nearest grid point, or cloud in cell.

Grid points are at integer coordinates (in cells), as are the points of the particles' lattice: an
undisturbed lattice gives exactly 1 everywhere. Source: Hockney & Eastwood 1988, ch. 5.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from types import ModuleType
from typing import Any

from pydist.errors import UsageError

Array = Any
"""A NumPy or a CuPy array."""


def deposit(
    positions: Iterable[Array], width: int, xp: ModuleType, assignment: str = "ngp"
) -> Array:
    """Counts particles per cell.

    Args:
        positions: arrays [3, ...] of coordinates in cells, any real number (wrapped here).
        width: cells along a side (N).
        xp: the array module of `positions`.
        assignment: "ngp", the nearest grid point: integer counts, the format of CosmoFlow; or
            "cic", cloud in cell: each particle is a cube of one cell, shared by up to 8 cells.
            A GPU sums clouds in no fixed order, so that results may differ in the last bit.

    Returns:
        [N, N, N]; int32 for "ngp", float64 for "cic". The sum is the number of particles.

    Raises:
        UsageError: no such assignment.
    """
    if assignment not in ("ngp", "cic"):
        raise UsageError(f"assignment={assignment!r}; possible are ngp, cic")
    out = xp.zeros((width,) * 3, dtype="int32" if assignment == "ngp" else "float64")
    for slab in positions:
        x = slab.reshape(3, -1)
        if assignment == "ngp":
            _add(out, xp.floor(x + 0.5).astype("int64"), None, xp)
        else:
            _add_clouds(out, x, xp)
    return out


def _add_clouds(out: Array, x: Array, xp: ModuleType) -> None:
    """Shares each particle among 8 cells with weights 1 - d and d along each axis."""
    base = xp.floor(x)
    upper = (x - base).astype("float64")
    lower = 1 - upper
    base = base.astype("int64")
    for corner in itertools.product((0, 1), repeat=3):
        weight = xp.ones(x.shape[1], dtype="float64")
        for axis, c in enumerate(corner):
            weight *= upper[axis] if c else lower[axis]
        _add(out, base + xp.asarray(corner, dtype="int64")[:, None], weight, xp)


def _add(out: Array, cells: Array, weight: Array | None, xp: ModuleType) -> None:
    """Adds particles at integer `cells` [3, n] into `out`.

    A slab of the lattice stays near its planes, so the histogram covers only the planes it reaches:
    its memory does not grow with the depth of the box.
    """
    width = out.shape[0]
    if not cells.shape[1]:
        return
    first = int(cells[0].min())
    planes = int(cells[0].max()) + 1 - first
    if planes > width:  # spread all over a small box
        first, planes = 0, width
        cells[0] %= width
    flat = ((cells[0] - first) * width + cells[1] % width) * width + cells[2] % width
    counts = xp.bincount(flat, weights=weight, minlength=planes * width**2)
    counts = counts.reshape(planes, width, width)
    for plane in range(planes):
        out[(first + plane) % width] += counts[plane].astype(out.dtype, copy=False)
