"""Tests of sums over known spans, and of clocks of several machines."""

from __future__ import annotations

import threading
import time

import pytest

from pydist import owner
from pydist.comm import Transport, run_local
from pydist.profile.gathering import RankSpans, clock_offset, gather_spans
from pydist.profile.spans import Span
from pydist.profile.summary import summarize
from pydist.profile.table import format_table


def rank(index: int, wait: float) -> RankSpans:
    """Makes spans of two steps of 10 s; a halo is in flight for 4 s of the first."""
    spans = [
        Span("pack", "conv", False, 1, 2, 1),
        Span("halo", "conv", False, 6 - wait, 7, 1 + wait),
        Span("halo in flight", "conv", False, 2, 6, 0),
        Span("compute", "conv", False, 1, 8, 5 - wait),
        Span("compute", "conv", True, 11, 14, 3),
        Span("redistribute", "conv", True, 14, 15, 1),
        Span("optimizer", "", False, 16, 18, 2),
    ]
    return RankSpans(index, ["conv", "unused"], [0, 10, 20], spans)


def test_seconds_are_means_over_steps_and_ranks():
    summary = summarize([rank(0, wait=1), rank(1, wait=2)])
    assert (summary.steps, summary.ranks, summary.step) == (2, 2, 10)
    conv = {"posted": 0.5, "exposed": 1.25, "forward": 1.75, "backward": 1.5, "other": 0.5}
    assert {c: s for c, s in summary.layers["conv"].items() if s} == conv
    assert {c: s for c, s in summary.layers[""].items() if s} == {"optimizer": 1, "other": 3.5}
    assert set(summary.layers["unused"].values()) == {0}
    assert (summary.least["exposed"], summary.most["exposed"]) == (1, 1.5)
    assert sum(summary.total.values()) == summary.step


def test_hidden_is_the_flight_less_the_waits_in_it():
    summary = summarize([rank(0, wait=1), rank(1, wait=2)])
    assert summary.in_flight == 2  # 4 s in one of two steps
    assert summary.hidden == pytest.approx(1 - (1 + 2) / (4 + 4))


def test_without_halos_nothing_is_hidden():
    alone = RankSpans(0, [], [0, 1], [])
    summary = summarize([alone])
    assert summary.hidden is None
    assert "no halo was exchanged" in format_table(summary, "1 rank")
    assert "most of ranks" not in format_table(summary, "1 rank")


def test_layers_that_hardly_count_share_a_row():
    spans = [Span("compute", "large", False, 0, 9, 9)]
    spans += [Span("compute", f"small{n}", False, 9, 9.001, 0.001) for n in range(3)]
    layers = ["large", "small0", "small1", "small2"]
    table = format_table(summarize([RankSpans(0, layers, [0, 10], spans)]), "1 rank")
    rows = {line.split("  ")[0]: line.split() for line in table.splitlines()}
    assert rows["large"][1] == "9000.00"
    assert rows["3 smaller"][2] == "3.00"
    assert "small0" not in table


def test_ranks_of_one_machine_share_a_clock():
    assert run_local(clock_offset, 3) == [0.0] * 3


def test_clocks_of_other_machines_are_set_to_that_of_rank_0(monkeypatch):
    ahead = 1000.0
    clock = time.perf_counter

    def number() -> int:
        name = threading.current_thread().name
        return int(name.removeprefix("rank ")) if name.startswith("rank ") else 0

    def body(t: Transport) -> list[RankSpans]:
        late = ahead * t.rank
        own = [Span("compute", "conv", False, 5.0 + late, 6.0 + late, 1.0)]
        return gather_spans(t, RankSpans(t.rank, ["conv"], [4.0 + late, 7.0 + late], own))

    monkeypatch.setattr(owner, "kernel", lambda: str(number()))
    monkeypatch.setattr(time, "perf_counter", lambda: clock() + ahead * number())
    (zero, one), nothing = run_local(body, 2)
    assert nothing == []
    assert zero.spans[0].start == 5.0
    # All ranks leave a barrier within far less time than the clocks differ.
    assert one.spans[0].start == pytest.approx(5.0, abs=1.0)
    assert one.bounds == pytest.approx([4.0, 7.0], abs=1.0)
