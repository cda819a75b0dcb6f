"""Tests of timers: exclusive sums, and spans for recorders."""

from __future__ import annotations

import sys

import pytest

from pydist import timers as module
from pydist.timers import Timers


class Recorder:
    def __init__(self) -> None:
        self.spans: list[tuple] = []

    def begin(self, part, layer):
        return f"{layer} {part}"

    def end(self, begun, *span) -> None:
        assert begun in (f"{span[1]} {span[0]}", None)
        self.spans.append(span)


@pytest.fixture
def timers(monkeypatch) -> Timers:
    """Returns timers with a clock that reads 0, 1, 2, ..."""
    ticks = iter(range(100))
    monkeypatch.setattr(module, "perf_counter", lambda: float(next(ticks)))
    return Timers()


def test_a_part_leaves_out_what_is_measured_inside_of_it(timers):
    with timers.measure("compute"):  # 0 to 7
        with timers.measure("halo"), timers.measure("pack"):  # 1 to 4, 2 to 3
            pass
        with timers.measure("halo"):  # 5 to 6
            pass
    assert timers.snapshot() == {"pack": 1, "halo": 3, "compute": 3}


def test_a_block_that_raises_is_measured_and_leaves_the_others_right(timers):
    with timers.measure("compute"):  # 0 to 5
        with pytest.raises(ZeroDivisionError), timers.measure("halo"):  # 1 to 2
            raise ZeroDivisionError
        with timers.measure("halo"):  # 3 to 4
            pass
    assert timers.snapshot() == {"halo": 2, "compute": 3}


def test_spans_name_their_layer_and_what_is_their_own(timers):
    timers.recorder = recorder = Recorder()
    timers.layer = "features.conv1"
    with timers.measure("compute"):
        timers.layer = "elsewhere"
        with timers.measure("halo", "features.conv2"):
            pass
    assert recorder.spans == [
        ("halo", "features.conv2", 1, 2, 1),
        ("compute", "features.conv1", 0, 3, 2),
    ]


def test_what_the_caller_measured_is_a_span_as_well(timers):
    timers.recorder = recorder = Recorder()
    timers.layer = "conv"
    with timers.measure("compute"):  # 0 to 1
        timers.add("pack", 0.25, 0.5, "conv pack")
    assert recorder.spans == [("pack", "conv", 0.25, 0.5, 0.25), ("compute", "conv", 0, 1, 0.75)]
    assert timers.snapshot() == {"pack": 0.25, "compute": 0.75}


def test_a_recorder_that_comes_late_is_given_what_it_has_not_seen_begin(timers):
    with timers.measure("halo"):
        timers.recorder = recorder = Recorder()
    assert recorder.spans == [("halo", "", 0, 1, 1)]


def test_without_a_recorder_a_span_is_three_calls_and_two_looks_at_the_clock(timers):
    seen = []
    sys.setprofile(lambda frame, event, _: seen.append((event, frame)))
    with timers.measure("halo"):
        pass
    sys.setprofile(None)
    called = [frame.f_code.co_name for event, frame in seen if event == "call"]
    # The clock of these tests is a Python function, which the profile counts.
    clock = ["<lambda>"]
    assert called == ["measure", "__enter__", *clock, "__exit__", *clock]


def test_reset_starts_at_zero(timers):
    with timers.measure("halo"):
        pass
    timers.reset()
    assert timers.snapshot() == {}
