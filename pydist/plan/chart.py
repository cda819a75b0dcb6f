"""Draws a plan: the time of a step on each mesh by part, and the memory of a rank."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydist.figures import new_figure, save_figure
from pydist.plan.estimate import PARTS, Estimate
from pydist.plan.memory import KINDS

_MS = 1e3
_GIB = 2**30


def draw_meshes(path: Path, found: Sequence[Estimate], memory: int) -> None:
    """Draws one row for each mesh, the best at the top.

    Args:
        path: of the picture; its suffix says the format.
        found: the estimates.
        memory: bytes that each rank may use.

    Raises:
        DiskError: the file can't be written.
        UsageError: matplotlib is not installed, or has no such format.
    """
    figure = new_figure(12, 1.5 + 0.3 * len(found))
    from matplotlib import colormaps

    names = [str(each) for each in found]
    of_time, of_memory = figure.subplots(1, 2, sharey=True)
    tables = (
        (of_time, PARTS, [each.seconds for each in found], _MS),
        (of_memory, KINDS, [each.memory for each in found], 1 / _GIB),
    )
    for axes, kinds, rows, unit in tables:
        left = [0.0] * len(found)
        for number, kind in enumerate(kinds):
            widths = [unit * row[kind] for row in rows]
            if any(widths):
                color = colormaps["tab20"](number)  # "C10" would be "C0" again
                axes.barh(names, widths, left=left, label=kind, color=color)
            left = [a + b for a, b in zip(left, widths, strict=True)]
        axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))
    of_time.set_xlabel("ms of a step, predicted")
    of_memory.set_xlabel("GiB of a rank, predicted")
    of_memory.axvline(memory / _GIB, color="black", linestyle="--")
    of_time.invert_yaxis()
    save_figure(figure, path)
