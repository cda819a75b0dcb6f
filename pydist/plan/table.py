"""Plans the meshes of a number of ranks: estimates each legal one, the best first."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from pydist.grid import AXES, Grid
from pydist.plan.estimate import Estimate, StepModel
from pydist.plan.on_mesh import estimate_step

_MS = 1e3
_GIB = 2**30


def legal_meshes(ranks: int) -> Iterator[Grid]:
    """Yields every mesh that `pydist.init` accepts for a number of ranks."""

    def shapes(left: int, axes: int) -> Iterator[tuple[int, ...]]:
        if axes == 1:
            yield (left,)
            return
        for size in range(1, left + 1):
            if left % size == 0:
                for rest in shapes(left // size, axes - 1):
                    yield (size, *rest)

    for shape in shapes(ranks, len(AXES)):
        yield Grid(shape)


def plan_meshes(model: StepModel, ranks: int, memory: int | None = None) -> list[Estimate]:
    """Estimates a step on every legal mesh of a number of ranks.

    Args:
        model: of the step.
        ranks: number of ranks.
        memory: bytes that each rank may use; by default the hardware's.

    Returns:
        The estimates: those that fit before those that do not, the fastest first, and the smallest
        first where none fits.
    """
    limit = model.hardware.memory if memory is None else memory

    def order(found: Estimate) -> tuple[bool, float]:
        return found.peak > limit, found.step if found.peak <= limit else found.peak

    return sorted((estimate_step(model, grid) for grid in legal_meshes(ranks)), key=order)


def mesh_table(found: Sequence[Estimate], alone: Estimate, memory: int) -> str:
    """Formats estimates as a table, in ms per step.

    Args:
        found: the estimates.
        alone: that of one rank, relative to which efficiency is.
        memory: bytes that each rank may use.
    """
    head = (
        "mesh", "GiB", "fits", "compute", "halo", "sums", "gradient", "optimiz.", "reading", "ms",
        "samples/s", "effic.", "most time",
    )  # fmt: skip
    rows: list[tuple[str, ...]] = [head]
    for each in found:
        s = each.seconds
        columns = (
            s["compute"], s["halo"], s["channels"] + s["statistics"] + s["gather"],
            s["gradients"], s["optimizer"], s["reading"], each.step,
        )  # fmt: skip
        fits = each.peak <= memory
        rows.append(
            (
                str(each.grid), f"{each.peak / _GIB:.2f}", "yes" if fits else "no",
                *(f"{_MS * seconds:.4g}" for seconds in columns),
                f"{each.samples_per_second:.4g}", f"{100 * efficiency(each, alone):.0f} %",
                each.limit if fits else "memory",
            )
        )  # fmt: skip
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    return "\n".join(
        "  ".join(
            [row[0].ljust(widths[0])]
            + [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        )
        for row in rows
    )


def efficiency(found: Estimate, alone: Estimate) -> float:
    """Returns the speed-up over one rank with the same batch, divided by the number of ranks."""
    return alone.step / found.step / math.prod(found.grid.shape)
