"""Holds the result of a check, and formats it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from pydist.check.calls import ShardedCall
from pydist.check.compare import INPUT, NOISE, Differences
from pydist.tables import table

_AXES = {1: "C", 2: "D", 3: "H", 4: "W"}


@dataclass
class Report:
    """Result that `check` returns.

    Attributes:
        sample: shape of one sample.
        spatial: the partition of the spatial dims.
        axes: numbers of parts along other axes, such as {"channel": 2}.
        batch: number of samples.
        dtype: dtype of the partitioned run.
        found: largest differences over all ranks.
        bounds: the largest allowed differences.
        calls: the calls of every rank, in order; none of runs in stages.
        plan: the table of the stages.
        stages: their number.
        micro_batches: number of parts of the batch.
        kinds: class of each module, by path.
        dropout_off: dropout modules that were switched off for the comparison.
        casts: narrower types to which the network itself casts; bounds take them into account.
        noise: bound above which a tensor is only noise.
        unsteady: whether the check is inconclusive, as noise in the last bit changes the entire
            output on one device as well: the network is random, or chaotic.
    """

    sample: tuple[int, ...]
    spatial: tuple[int, ...]
    axes: dict[str, int]
    batch: int
    dtype: torch.dtype
    found: Differences
    bounds: Differences
    calls: list[list[ShardedCall]]
    kinds: dict[str, str]
    plan: str = ""
    stages: int = 1
    micro_batches: int = 1
    dropout_off: list[str] = field(default_factory=list)
    casts: list[str] = field(default_factory=list)
    unsteady: bool = False
    noise: float = NOISE

    @property
    def ok(self) -> bool:
        """Whether no call was refused and no tensor differs by more than its bound."""
        return not self.refusals and not self.failures and not self.unsteady

    @property
    def refusals(self) -> list[str]:
        """Refusals that calls without an exact form met, without duplicates."""
        return list(dict.fromkeys(c.refusal for c in (self.calls or [[]])[0] if c.refusal))

    def is_noise(self, bound: float) -> bool:
        """Returns whether a tensor with this bound is only noise."""
        return bound > self.noise

    @property
    def failures(self) -> list[str]:
        """Names of the tensors that differ by more than their bound."""
        kinds, pairs = ("output of", "gradient of", "buffer"), self.found.pairs(self.bounds)
        return [
            f"{kind} {name or '(network)'}"
            for kind, (values, limits) in zip(kinds, pairs, strict=True)
            for name, value in values.items()
            if not value <= limits[name]
        ]

    @property
    def largest(self) -> float:
        """The largest difference of all tensors that are not only noise."""
        every = [
            value
            for values, limits in self.found.pairs(self.bounds)
            for name, value in values.items()
            if limits[name] <= self.noise
        ]
        return math.nan if any(map(math.isnan, every)) else max(every, default=0.0)


@dataclass
class _FunctionSummary:
    """Summary that covers all calls of one function."""

    count: int = 0
    refused: int = 0
    halo: dict[int, tuple[int, int]] = field(default_factory=dict)
    moved: int = 0
    is_global: bool = False
    forms: Counter[str] = field(default_factory=Counter)


def format_report(report: Report) -> str:
    """Formats the tables of calls and layers, and the verdict."""
    # Images have no depth, and lines neither depth nor height.
    grid = "×".join(map(str, report.spatial[4 - len(report.sample) :]))
    others = [f"{axis} {count}" for axis, count in report.axes.items() if count > 1]
    grid = ", ".join([*others, grid])
    shape = ", ".join(map(str, report.sample))
    kind = str(report.dtype).removeprefix("torch.")
    how = f"split {grid} over {len(report.calls)} ranks"
    if report.plan:
        how = f"in {report.micro_batches} micro-batches through {report.stages} stages of {grid}"
    parts = [report.plan] if report.plan else _calls(report)
    lines = [f"{report.batch} × [{shape}] {how}, {kind}", "", *parts, "", *_layers(report), ""]
    bounds = report.bounds
    if any(map(report.is_noise, (*bounds.gradients.values(), *bounds.buffers.values()))):
        lines.append("noise: zero except for rounding, also on one device (a bias before a norm)")
    if report.casts:
        lines.append(f"the network itself casts to {', '.join(report.casts)}: in the bounds")
    if report.dropout_off:
        lines.append(f"dropout was off in {len(report.dropout_off)} modules")
    lines += [f"refused: {refusal}" for refusal in report.refusals]
    if report.failures:
        lines.append(f"above the bound: {', '.join(report.failures)}")
    verdict = "NOT the same" if report.failures else "split equals whole"
    if report.refusals:
        verdict += ", except for refused calls, computed on full tensors"
    verdict += f": largest difference {report.largest:.1e}"
    if report.unsteady:
        verdict = (
            "INCONCLUSIVE: the output differs in each run of the network (does it draw random"
            " numbers? in evaluation mode it must not), or noise in the last bit changes it"
        )
    lines.append(verdict)
    return "\n".join(line.rstrip() for line in lines)


def _calls(report: Report) -> list[str]:
    kinds: dict[str, _FunctionSummary] = {}
    for rank, calls in enumerate(report.calls):
        for call in calls:
            kind = kinds.setdefault(call.name, _FunctionSummary())
            if rank == 0:
                kind.count += 1
                kind.refused += bool(call.refusal)
                kind.forms[call.form] += 1
            kind.is_global |= call.is_global
            kind.moved = max(kind.moved, call.moved)
            for dim, (before, after) in call.halo.items():
                known = kind.halo.get(dim, (0, 0))
                kind.halo[dim] = max(known[0], before), max(known[1], after)
    rows = [["call", "times", "supported", "halo (before, after)", "reduced", "form"]]
    for name, kind in sorted(kinds.items()):
        supported = f"{kind.refused} refused" if kind.refused else "yes"
        row = [name, str(kind.count), supported, _halo(kind), _reduced(kind), _forms(kind)]
        rows.append(row)
    has_forms = any(call.form for calls in report.calls for call in calls)
    return _ruled(rows if has_forms else [row[:-1] for row in rows])


def _halo(kind: _FunctionSummary) -> str:
    if not kind.halo:
        return "–"
    return "  ".join(
        f"{_AXES.get(dim, dim)} {before}, {after}"
        for dim, (before, after) in sorted(kind.halo.items())
    )


def _reduced(kind: _FunctionSummary) -> str:
    return "over ranks" if kind.is_global else "–"


def _forms(kind: _FunctionSummary) -> str:
    return ", ".join(f"{form} {n}" for form, n in sorted(kind.forms.items()) if form) or "–"


def _layers(report: Report) -> list[str]:
    found, bounds = report.found, report.bounds
    rows = [["layer", "kind", "output", "gradients", "largest bound"]]
    paths = [path for path in found.outputs if path]
    for path in [*paths, ""]:
        if path not in found.outputs:
            continue
        names = [n for n in found.gradients if path and n.rpartition(".")[0] == path]
        limits = [bounds.outputs[path], *(bounds.gradients[n] for n in names)]
        real = [n for n in names if not report.is_noise(bounds.gradients[n])]
        grads = _number(max(found.gradients[n] for n in real)) if real else "–"
        if len(real) < len(names):
            grads = f"{grads}, noise" if real else "noise"
        steady = [limit for limit in limits if not report.is_noise(limit)]
        rows.append([
            path or "(network)", report.kinds.get(path, ""), _number(found.outputs[path]), grads,
            _number(max(steady)) if steady else "noise",
        ])  # fmt: skip
    owned = {n for p in paths for n in found.gradients if n.rpartition(".")[0] == p}
    for name in (n for n in found.gradients if n not in owned):
        kind = "" if name == INPUT else "parameter"
        values = found.gradients[name], bounds.gradients[name]
        rows.append([name, kind, "–", *map(_number, values)])
    for name, value in found.buffers.items():
        noisy = report.is_noise(bounds.buffers[name])
        shown = (
            ["noise", "–", "noise"]
            if noisy
            else [_number(value), "–", _number(bounds.buffers[name])]
        )
        rows.append([name, "buffer", *shown])
    return _ruled(rows)


def _number(value: float) -> str:
    return f"{value:.1e}" if value else "0"


def _ruled(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns the lines of a table, with a line below its head."""
    head, *others = table(rows, left=len(rows[0])).split("\n")
    return [head, "-" * max(map(len, (head, *others))), *others]
