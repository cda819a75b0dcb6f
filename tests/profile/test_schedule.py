"""Tests of the schedule of stages: its bars from known spans, and those of real passes."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pydist.errors import DiskError, UsageError
from pydist.profile import Profiler
from pydist.profile.gathering import RankSpans
from pydist.profile.schedule import PASSES, Bar, as_it_ran, draw_schedule, ideal, share
from pydist.profile.spans import Span
from pydist.stages import pipeline
from pydist.stages.schedule import Pass, Schedule
from support.equivalence import randn
from support.networks.small import initialized
from support.staged import DEEP, ONE, on_stages


def passed(kind: str, m: int, stage: int, start: float, stop: float) -> Span:
    label = Pass(kind, stage, m).label(0)
    return Span("pass", label, kind == "backward", start, stop, stop - start)


def waited(start: float, stop: float) -> Span:
    return Span("transfer", "conv", False, start, stop, stop - start)


@pytest.fixture
def ranks() -> list[RankSpans]:
    """Returns two stages in a step with two micro-batches, between two shorter and longer ones."""
    first = [
        passed("forward", 0, 0, 10, 12), passed("forward", 1, 0, 12, 14),
        waited(14, 20), passed("backward", 0, 0, 14, 22),
        waited(22, 26.5), passed("backward", 1, 0, 22, 28.5),
    ]  # fmt: skip
    second = [
        waited(10, 13), passed("forward", 0, 1, 9, 15), passed("backward", 0, 1, 15, 19),
        waited(19, 19.5), passed("forward", 1, 1, 19, 22), passed("backward", 1, 1, 22, 26),
    ]  # fmt: skip
    bounds = [0, 9, 30, 60]
    return [RankSpans(0, ["conv"], bounds, first), RankSpans(1, ["conv"], bounds, second)]


def test_waiting_is_idle_until_the_other_stage_has_finished(ranks):
    """The step of median duration begins at 9 s; the other steps have no passes."""
    first, second = as_it_ran(ranks)
    assert first == [
        Bar("idle", 0, 0, 0, 1),
        Bar("forward", 0, 0, 1, 3),
        Bar("forward", 0, 1, 3, 5),
        Bar("idle", 0, 0, 5, 10),
        Bar("transfer", 0, 0, 10, 11),
        Bar("backward", 0, 0, 11, 13),
        Bar("idle", 0, 1, 13, 17),
        Bar("transfer", 0, 1, 17, 17.5),
        Bar("backward", 0, 1, 17.5, 19.5),
    ]
    assert second == [
        Bar("forward", 1, 0, 0, 1),
        Bar("idle", 1, 0, 1, 3),
        Bar("transfer", 1, 0, 3, 4),
        Bar("forward", 1, 0, 4, 6),
        Bar("backward", 1, 0, 6, 10),
        Bar("transfer", 1, 1, 10, 10.5),
        Bar("forward", 1, 1, 10.5, 13),
        Bar("backward", 1, 1, 13, 17),
        Bar("idle", 1, 1, 17, 19.5),
    ]
    assert share([first, second], "transfer") == pytest.approx((1 + 0.5 + 1 + 0.5) / 39)


def test_in_the_ideal_schedule_transfers_take_no_time(ranks):
    """Means of a forward and a backward pass are 2 and 2 s on the first stage, 2.75 and 4."""
    first, second = ideal(ranks)
    assert first == [
        Bar("forward", 0, 0, 0, 2),
        Bar("forward", 0, 1, 2, 4),
        Bar("idle", 0, 0, 4, 8.75),
        Bar("backward", 0, 0, 8.75, 10.75),
        Bar("idle", 0, 1, 10.75, 15.5),
        Bar("backward", 0, 1, 15.5, 17.5),
    ]
    assert [(bar.kind, bar.start) for bar in second] == [
        ("idle", 0), ("forward", 2), ("backward", 4.75), ("forward", 8.75), ("backward", 11.5),
        ("idle", 15.5),
    ]  # fmt: skip


def test_without_stages_there_is_no_schedule():
    alone = RankSpans(0, ["conv"], [0, 10], [Span("compute", "conv", False, 0, 9, 9)])
    with pytest.raises(UsageError, match="a schedule is that of stages, and none were profiled"):
        as_it_ran([alone])


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble"])
@pytest.mark.parametrize("recompute", [False, True])
def test_every_pass_and_wait_of_a_step_is_recorded(tmp_path, schedule, recompute):
    net = initialized(nn.Sequential(*(nn.Conv3d(c, 2, 3, padding=1) for c in (1, 2, 2, 2))))
    x, target = randn(6, 1, 8, 4, 4), randn(6, 2, 8, 4, 4, seed=1)

    def rank(stages):
        model = copy.deepcopy(net)
        pipe = pipeline(
            model, stages, x[:1], micro_batches=3, schedule=schedule, cuts=["2"],
            recompute=recompute,
        )  # fmt: skip
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        with Profiler(stages, model, warmup=1) as profiler:
            for _ in range(4):
                pipe.step(x, target, F.mse_loss)
                optimizer.step()
                optimizer.zero_grad()
                profiler.step()
        return profiler

    first, *_ = on_stages([DEEP, ONE], rank)
    assert [each.rank for each in first.ranks] == [0, 1, 2]
    rows = as_it_ran(first.ranks)
    for stage, row, spans in zip((0, 0, 1), rows, first.ranks, strict=True):
        expected = Schedule(schedule, [0, 1]).passes(3)[stage]
        passes = [span for span in spans.spans if span.part == "pass"]
        assert [p.layer for p in passes] == [each.label(0) for each in expected] * 3
        waits = [span for span in spans.spans if span.part == "transfer"]
        # A message and its description come; a gradient comes at once.
        assert len(waits) == 3 * (3 if stage == 0 else 2 * 3)
        for wait in waits:
            assert any(p.start <= wait.start <= wait.stop <= p.stop for p in passes)
        seen = dict.fromkeys((b.kind, b.micro_batch) for b in row if b.kind in PASSES)
        assert list(seen) == [(each.kind, each.micro_batch) for each in expected]
        ends = [bar.stop for bar in row]
        assert [bar.start for bar in row] == pytest.approx([0.0, *ends[:-1]])
        assert ends[-1] == pytest.approx(rows[0][-1].stop)
    summary = first.summary()
    assert summary.total["transfer"] > 0
    assert sum(summary.total.values()) == pytest.approx(summary.step)
    pytest.importorskip("matplotlib")
    first.draw_schedule(tmp_path / "schedule.png")
    assert (tmp_path / "schedule.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(DiskError, match="nowhere"):
        draw_schedule(tmp_path / "nowhere" / "schedule.png", first.ranks)
