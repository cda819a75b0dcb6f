"""Draws the schedule of a network in stages: as it ran, and the ideal one with equal passes.

Passes are the spans of part "pass", whose label names their stage and sample group; a rank waits
in the spans of part "transfer" within them.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any, NamedTuple

from pydist.errors import UsageError
from pydist.figures import new_figure, save_figure
from pydist.profile.gathering import RankSpans
from pydist.profile.spans import PASS, TRANSFER, Span

if TYPE_CHECKING:
    from matplotlib.axes import Axes

IDLE = "idle"
PASSES = {"forward": "tab:blue", "backward": "tab:orange", "weight": "tab:green"}
"""Kinds of passes, with the colors of their bars."""
KINDS = {**PASSES, TRANSFER: "tab:red", IDLE: "0.88"}
"""Kinds of bars, with their colors."""

_LABEL = re.compile(rf"({'|'.join(PASSES)}) (\d+), stage (\d+), group (\d+)")
_LEAST_WIDTH = 0.015
"""Part of the picture's width that a bar must have to show its micro-batch."""


_Key = tuple[str, int, int, int]
"""Kind, stage, micro-batch and sample group of a pass."""


class Bar(NamedTuple):
    """What a rank does for a time.

    Attributes:
        kind: one of `KINDS`. A rank is idle until the stage before has finished the pass that it
            waits for, or outside of passes; from then on the transfer takes the time.
        stage: of the pass.
        micro_batch: of the pass.
        start: in seconds since the step's first pass.
        stop: its end.
    """

    kind: str
    stage: int
    micro_batch: int
    start: float
    stop: float

    @property
    def seconds(self) -> float:
        """Seconds that the bar lasts."""
        return self.stop - self.start


class _TimedPass(NamedTuple):
    kind: str
    stage: int
    micro_batch: int
    group: int
    start: float
    stop: float
    waits: list[tuple[float, float]]

    @property
    def after(self) -> _Key | None:
        """Identifies the pass on another stage that this one waits for, if there is one."""
        if self.kind == "weight":
            return None
        step = -1 if self.kind == "forward" else 1
        return self.kind, self.stage + step, self.micro_batch, self.group

    @property
    def busy(self) -> float:
        """Seconds that the pass lasts, without those in which it waits."""
        return self.stop - self.start - sum(b - a for a, b in self.waits)


def as_it_ran(ranks: Sequence[RankSpans]) -> list[list[Bar]]:
    """Returns the bars of each rank in the step of median duration.

    Raises:
        UsageError: no stages were profiled.
    """
    rows = _typical(ranks)
    ends: dict[_Key | None, float] = {}
    for each in (p for row in rows for p in row):
        key = each.kind, each.stage, each.micro_batch, each.group
        ends[key] = max(each.stop, ends.get(key, each.stop))
    zero = min(each.start for row in rows for each in row)
    last = max(each.stop for row in rows for each in row)
    return [list(_filled(_bars(row, ends), zero, last)) for row in rows]


def ideal(ranks: Sequence[RankSpans]) -> list[list[Bar]]:
    """Returns the bars of each rank if transfers took no time, and all passes of a stage the mean.

    The step is that of `as_it_ran`.

    Raises:
        UsageError: no stages were profiled.
    """
    rows = _typical(ranks)
    found = defaultdict[tuple[str, int], list[float]](list)
    for each in (p for row in rows for p in row):
        found[each.kind, each.stage].append(each.busy)
    seconds = {key: mean(times) for key, times in found.items()}
    known = {(p.kind, p.stage, p.micro_batch, p.group) for row in rows for p in row}
    ends: dict[_Key | None, float] = {}
    bars: list[list[Bar]] = [[] for _ in rows]
    while any(len(done) < len(row) for done, row in zip(bars, rows, strict=True)):
        for done, row in zip(bars, rows, strict=True):
            while len(done) < len(row):
                each = row[len(done)]
                if each.after in known and each.after not in ends:
                    break
                start = max(done[-1].stop if done else 0.0, ends.get(each.after, 0.0))
                stop = start + seconds[each.kind, each.stage]
                done.append(Bar(each.kind, each.stage, each.micro_batch, start, stop))
                ends[each.kind, each.stage, each.micro_batch, each.group] = stop
    last = max(done[-1].stop for done in bars)
    return [list(_filled(done, 0.0, last)) for done in bars]


def share(rows: Sequence[Sequence[Bar]], kind: str) -> float:
    """Returns the part of all ranks' time that bars of a kind take."""
    whole = sum(bar.seconds for row in rows for bar in row)
    return sum(bar.seconds for row in rows for bar in row if bar.kind == kind) / whole


def draw_schedule(path: Path, ranks: Sequence[RankSpans]) -> None:
    """Draws the schedule as it ran above the ideal one, a row for each rank.

    Raises:
        DiskError: the file can't be written.
        UsageError: no stages were profiled, or matplotlib is not installed.
    """
    figure = new_figure(14, 2.4 + 0.6 * len(ranks))
    from matplotlib.patches import Patch

    panels = {"As it ran": as_it_ran(ranks), "Ideal, with the same passes": ideal(ranks)}
    all_axes: Any = figure.subplots(2, 1, sharex=True)
    width = 1e3 * max(bar.stop for rows in panels.values() for row in rows for bar in row)
    for axes, (title, rows) in zip(all_axes, panels.items(), strict=True):
        _draw(axes, title, rows, width)
    all_axes[1].set_xlabel("ms")
    shown = {bar.kind for rows in panels.values() for row in rows for bar in row}
    handles = [Patch(color=color, label=k) for k, color in KINDS.items() if k in shown]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    save_figure(figure, path)


def _draw(axes: Axes, title: str, rows: Sequence[Sequence[Bar]], picture: float) -> None:
    """Draws a panel; `picture` is the width of both, in ms."""
    last = 1e3 * max(bar.stop for row in rows for bar in row)
    for number, row in enumerate(rows):
        for bar in row:
            start, width = 1e3 * bar.start, 1e3 * bar.seconds
            axes.barh(
                number, width, left=start, height=0.8, color=KINDS[bar.kind],
                edgecolor="none" if bar.kind == IDLE else "white", linewidth=0.4,
            )  # fmt: skip
            if bar.kind in PASSES and width > _LEAST_WIDTH * picture:
                axes.text(
                    start + width / 2, number, str(bar.micro_batch), color="white",
                    ha="center", va="center", fontsize=8,
                )  # fmt: skip
    stages = [sorted({bar.stage for bar in row if bar.kind != IDLE}) for row in rows]
    names = [f"rank {i}, stage {', '.join(map(str, s))}" for i, s in enumerate(stages)]
    axes.set_yticks(range(len(rows)), names)
    axes.invert_yaxis()
    axes.set_xlim(0, picture)
    idle, transfers = share(rows, IDLE), share(rows, TRANSFER)
    told = f"{title}: {last:.1f} ms, {idle:.0%} idle"
    axes.set_title(told + (f", {transfers:.0%} transfers" if transfers else ""), loc="left")


def _typical(ranks: Sequence[RankSpans]) -> list[list[_TimedPass]]:
    """Returns the passes of each rank in the step of median duration."""
    bounds = ranks[0].bounds
    steps = sorted(range(ranks[0].steps), key=lambda step: bounds[step + 1] - bounds[step])
    found = [list(_of_rank(rank, steps[len(steps) // 2])) for rank in ranks]
    if not all(found):
        raise UsageError("a schedule is that of stages, and none were profiled")
    return found


def _of_rank(rank: RankSpans, step: int) -> Iterator[_TimedPass]:
    begin, end = rank.bounds[step : step + 2]
    inside = [span for span in rank.spans if begin <= span.start and span.stop <= end]
    waits = sorted((s.start, s.stop) for s in inside if s.part == TRANSFER)
    for span in sorted((s for s in inside if s.part == PASS), key=lambda s: s.start):
        yield _pass_of(span, [w for w in waits if span.start <= w[0] and w[1] <= span.stop])


def _pass_of(span: Span, waits: list[tuple[float, float]]) -> _TimedPass:
    match = _LABEL.fullmatch(span.layer)
    assert match is not None
    kind, *numbers = match.groups()
    micro_batch, stage, group = map(int, numbers)
    return _TimedPass(kind, stage, micro_batch, group, span.start, span.stop, waits)


def _bars(row: Sequence[_TimedPass], ends: dict[_Key | None, float]) -> Iterator[Bar]:
    """Yields the bars of a rank's passes: their work, and their waiting in two kinds."""
    for each in row:
        pass_ = each.stage, each.micro_batch
        ready, at = ends.get(each.after, each.start), each.start
        for start, stop in [*each.waits, (each.stop, each.stop)]:
            arrives = min(max(start, ready), stop)
            yield Bar(each.kind, *pass_, at, start)
            yield Bar(IDLE, *pass_, start, arrives)
            yield Bar(TRANSFER, *pass_, arrives, stop)
            at = stop


def _filled(bars: Iterator[Bar] | Sequence[Bar], zero: float, last: float) -> Iterator[Bar]:
    """Yields bars relative to `zero`, with idle ones between them and until `last`."""
    at = zero
    for bar in bars:
        if bar.start > at:
            yield Bar(IDLE, bar.stage, bar.micro_batch, at - zero, bar.start - zero)
        if bar.stop > bar.start:
            yield bar._replace(start=bar.start - zero, stop=bar.stop - zero)
        at = bar.stop
    if last > at:
        yield Bar(IDLE, bar.stage, bar.micro_batch, at - zero, last - zero)
