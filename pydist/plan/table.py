"""Plans the meshes of a number of ranks: estimates each legal one, the best first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from pydist.grid import AXES, SPATIAL_AXES, Grid, axes_by_dim
from pydist.plan.estimate import Estimate, InStages, StepModel
from pydist.plan.in_stages import estimate_in_stages
from pydist.plan.on_mesh import estimate_step
from pydist.tables import table

SCHEDULES = ("1f1b", "gpipe", "zero-bubble", "gems")
"""Schedules that are compared, see `pydist.stages.schedule`; with pairs of micro-batches "gems" is
MASTER."""
_STAGED = 16
"""Meshes of a stage for which schedules are compared, those with the least work."""
_PER_STAGE = 4
"""Most micro-batches for each stage: then less than a fifth of the time is waiting."""
_MS = 1e3
_GIB = 2**30


def legal_meshes(ranks: int, dims: int = 3) -> Iterator[Grid]:
    """Yields every mesh that `pydist.init` accepts for a number of ranks, and that cuts samples.

    Args:
        ranks: their number.
        dims: spatial dims of the samples: images are not cut along depth.
    """
    absent = tuple({*SPATIAL_AXES} - {*axes_by_dim(dims).values()})

    def shapes(left: int, axes: int) -> Iterator[tuple[int, ...]]:
        if axes == 1:
            yield (left,)
            return
        for size in range(1, left + 1):
            if left % size == 0:
                for rest in shapes(left // size, axes - 1):
                    yield (size, *rest)

    for grid in map(Grid, shapes(ranks, len(AXES))):
        if grid.size(absent) == 1:
            yield grid


def plan_meshes(
    model: StepModel,
    ranks: int,
    memory: int | None = None,
    stages: Sequence[int] = (1,),
    allowed: Callable[[Grid], bool] = lambda grid: True,
) -> list[Estimate]:
    """Estimates a step on every legal mesh of a number of ranks.

    Each sample group has a sample in each pass.

    Args:
        model: of the step.
        ranks: number of ranks.
        memory: bytes that each rank may use; by default the hardware's.
        stages: numbers of stages. In several each stage has an equal mesh, and of the meshes with
            the least work per rank the best schedule and number of micro-batches are found.
        allowed: whether a mesh is wanted.

    Returns:
        The estimates: those that fit before those that do not, the fastest first, and the smallest
        first where none fits.
    """
    limit = model.hardware.memory if memory is None else memory

    def order(found: Estimate) -> tuple[bool, float]:
        return found.peak > limit, found.step if found.peak <= limit else found.peak

    found = list[Estimate]()
    for count in stages:
        if ranks % count:
            continue
        # In stages the micro-batches, which are chosen for each mesh, are the passes.
        most = model.training.most_groups if count == 1 else model.training.batch
        grids = [
            grid for grid in legal_meshes(ranks // count, model.trace.dims)
            if grid.size(("data",)) <= most and allowed(grid)
        ]  # fmt: skip
        each = sorted((estimate_step(model, grid) for grid in grids), key=order)
        if count > 1:
            ways = (_schedules(model, one.grid, count) for one in each[:_STAGED])
            each = [min(way, key=order) for way in ways if way]
        found += each
    return sorted(found, key=order)


def _schedules(model: StepModel, grid: Grid, stages: int) -> list[Estimate]:
    """Estimates a step in stages for each schedule and number of micro-batches."""
    samples = model.training.batch // grid.size(("data",))
    counts = [1 << n for n in range(samples.bit_length()) if 1 << n <= _PER_STAGE * stages]
    # Running statistics follow the micro-batches of one mesh, and "gems" has two for each stage.
    has_statistics = any(call.name == "batch_norm" for call in model.trace.calls)
    found = (
        estimate_in_stages(model, grid, InStages(stages, count, schedule))
        for count in counts
        for schedule in SCHEDULES
        if schedule != "gems" or not has_statistics
    )
    return [each for each in found if each is not None]


def mesh_table(found: Sequence[Estimate], alone: Estimate, memory: int) -> str:
    """Formats estimates as a table, in ms per step.

    Args:
        found: the estimates.
        alone: that of one rank, relative to which efficiency is.
        memory: bytes that each rank may use.
    """
    head = (
        "mesh", "GiB", "fits", "compute", "halo", "sums", "gradient", "optimiz.", "waiting",
        "reading", "ms", "samples/s", "effic.", "most time", "gathered", "on channels",
    )  # fmt: skip
    rows: list[tuple[str, ...]] = [head]
    for each in found:
        s = each.seconds
        columns = (
            s["compute"], s["halo"], s["channels"] + s["statistics"] + s["gather"],
            s["gradients"], s["optimizer"], s["waiting"], s["reading"], each.step,
        )  # fmt: skip
        fits = each.peak <= memory
        rows.append(
            (
                str(each), f"{each.peak / _GIB:.2f}", "yes" if fits else "no",
                *(f"{_MS * seconds:.4g}" for seconds in columns),
                f"{each.samples_per_second:.4g}", f"{100 * efficiency(each, alone):.0f} %",
                each.limit if fits else "memory", _paths(each.gathered), _paths(each.on_channels),
            )
        )  # fmt: skip
    for title, given in (("gathered", "gathered"), ("on channels", "on_channels")):
        if not any(getattr(each, given) for each in found):
            at = rows[0].index(title)
            rows = [row[:at] + row[at + 1 :] for row in rows]
    return table(rows)


def efficiency(found: Estimate, alone: Estimate) -> float:
    """Returns the speed-up over one rank with the same batch, divided by the number of ranks."""
    return alone.step / found.step / found.ranks


def _paths(layers: Sequence[str]) -> str:
    """Returns the paths of layers, shortened if there are many."""
    if len(layers) < 3:
        return ", ".join(layers) or "–"
    return f"{layers[0]} to {layers[-1]} ({len(layers)})"
