"""Formats a profile as a text table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pydist.profile.summary import COLUMNS, Seconds, Summary

_HEADINGS = {"statistics": "statist.", "gradients": "gradient", "optimizer": "optimiz."}
_WIDTH = 9
_LEAST_SHARE = 0.005
"""Layers that take less of a step than this share one row."""


def format_table(summary: Summary, mesh: str) -> str:
    """Formats one row per layer and one column per part, in ms per step.

    Args:
        summary: the summary.
        mesh: description of the mesh, for the first line.
    """
    rows = _rows(summary)
    extremes = {"least of ranks": summary.least, "most of ranks": summary.most}
    names = max(len(name) for name in [*dict(rows), *extremes])
    head = " " * names + "".join(f"{_HEADINGS.get(c, c):>{_WIDTH}}" for c in COLUMNS)
    head += f"{'sum':>{_WIDTH}}{'share':>8}"
    lines = [
        f"step {1e3 * summary.step:.1f} ms: mean of {summary.steps} "
        f"step{'s' if summary.steps > 1 else ''} on {mesh}; "
        f"the table in ms per step{' of the device' if summary.on_device else ''}, mean over ranks",
        "",
        head,
        "-" * len(head),
        *(_line(name, names, row, summary.step) for name, row in rows),
        "-" * len(head),
        _line("sum", names, summary.total, summary.step),
        _cells("share", names, [_percent(summary.total[c] / summary.step) for c in COLUMNS]),
        *(
            _cells(name, names, [_ms(row[c]) for c in COLUMNS])
            for name, row in extremes.items()
            if summary.ranks > 1
        ),
        "",
        _halos(summary),
    ]
    return "\n".join(line.rstrip() for line in lines)


def _rows(summary: Summary) -> list[tuple[str, Seconds]]:
    """Returns rows of the large layers, of the small ones together, and of time outside layers."""
    inside = {path: row for path, row in summary.layers.items() if path}
    large = {p: r for p, r in inside.items() if sum(r.values()) >= _LEAST_SHARE * summary.step}
    small = [row for path, row in inside.items() if path not in large]
    rows = list(large.items())
    if small:
        rows.append((f"{len(small)} smaller", _added(small)))
    return [*rows, ("outside layers", summary.layers[""])]


def _added(rows: Sequence[Seconds]) -> dict[str, float]:
    return {c: sum(row[c] for row in rows) for c in COLUMNS}


def _line(name: str, width: int, row: Mapping[str, float], step: float) -> str:
    total = sum(row[c] for c in COLUMNS)
    cells = _cells(name, width, [_ms(row[c]) for c in COLUMNS])
    return f"{cells}{_ms(total):>{_WIDTH}}{_percent(total / step):>8}"


def _cells(name: str, width: int, values: Sequence[str]) -> str:
    return f"{name:<{width}}" + "".join(f"{value:>{_WIDTH}}" for value in values)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f}" if seconds else "–"


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _halos(summary: Summary) -> str:
    if summary.hidden is None:
        return "no halo was exchanged"
    return (
        f"halos were in flight for {1e3 * summary.in_flight:.2f} ms per step (posted to arrived), "
        f"{100 * summary.hidden:.0f} % of it hidden by other work"
    )
