"""Timers: sums that add up, and spans for whoever records them."""

from __future__ import annotations

import pytest

from pydist import timers as module
from pydist.timers import Timers


class Recorder:
    def __init__(self) -> None:
        self.spans: list[tuple] = []

    def add(self, *span) -> None:
        self.spans.append(span)


@pytest.fixture
def timers(monkeypatch) -> Timers:
    """By a clock that shows 0, 1, 2, ... each time it is read."""
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
    timers.record("halo in flight", "features.conv1", 0.5, 2.5)
    assert recorder.spans == [
        ("halo", "features.conv2", 1, 2, 1),
        ("compute", "features.conv1", 0, 3, 2),
        ("halo in flight", "features.conv1", 0.5, 2.5, 0),
    ]


def test_what_runs_beside_the_others_is_not_in_the_sums(timers):
    with timers.measure("compute"):
        timers.record("halo in flight", "", 0.0, 100.0)
    assert timers.snapshot() == {"compute": 1}


def test_reset_starts_at_zero(timers):
    with timers.measure("halo"):
        pass
    timers.reset()
    assert timers.snapshot() == {}
