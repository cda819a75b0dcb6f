"""Tests of the curves of a run, which are drawn while it trains."""

from __future__ import annotations

import math
import sys

import pytest

from pydist.errors import UsageError
from pydist.train import curves
from pydist.train.config import OutputConfig
from pydist.train.log import EventLog


def step(number: int, **more) -> dict:
    return {"event": "step", "step": number, "loss": 1 / number, "lr": 1e-3, "time": 0.0, **more}


def validation(number: int) -> dict:
    dice = {"liver": 0.5, "tumor": math.nan}
    found = {"loss": 0.3, "dice": dice, "pooled_dice": dice, "samples": 2, "epoch": 0}
    return {"event": "validation", "step": number, "time": 0.0, **found}


def test_measures_are_numbers_by_name():
    assert curves.measures(validation(3)) == {"dice liver": 0.5}
    given = {"event": "validation", "step": 1, "epoch": 0, "samples": 2, "loss": 0.1, "time": 9.0}
    assert curves.measures({**given, "mae": 0.25, "accuracy": None}) == {"mae": 0.25}


def test_curves_are_drawn_in_epochs_and_continue_in_a_resumed_run(tmp_path):
    pytest.importorskip("matplotlib")
    log = EventLog(tmp_path / "log.jsonl")
    for number in range(1, 60):
        log.emit(**step(number, loss=math.nan if number == 3 else 1 / number))
    log.emit(
        "validation", **{k: v for k, v in validation(59).items() if k not in ("event", "time")}
    )
    log.close()
    output = OutputConfig(folder=tmp_path)
    (found,) = curves.drawn_in(output, tmp_path / "log.jsonl")
    assert len(found._losses) == 59
    path = tmp_path / curves.CURVES_FILE
    found(step(60))
    assert not path.exists()
    found({"event": "data", "split": "train", "step": 60})
    first = path.read_bytes()
    assert first.startswith(b"\x89PNG")
    path.unlink()
    found(validation(60))  # too soon after the first
    assert not path.exists()
    found({"event": "end"})
    assert path.read_bytes() != first
    path.unlink()
    path.mkdir()  # no picture can be written there
    found({"event": "end"})


def test_nothing_is_drawn_without_steps_or_if_not_wanted(tmp_path):
    assert curves.drawn_in(OutputConfig(folder=tmp_path, plot=False), tmp_path / "log.jsonl") == []
    found = curves.Curves(tmp_path / "progress.png", tmp_path / "none")
    found({"event": "end"})
    assert list(tmp_path.iterdir()) == []


def test_tensorboard_is_named_if_it_is_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    output = OutputConfig(folder=tmp_path, plot=False, tensorboard=True)
    with pytest.raises(UsageError, match=r"pip install 'pydist\[tensorboard\]'"):
        curves.drawn_in(output, tmp_path / "log.jsonl")


def test_tensorboard_gets_the_curves(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    output = OutputConfig(folder=tmp_path, plot=False, tensorboard=True)
    (found,) = curves.drawn_in(output, tmp_path / "log.jsonl")
    for event in (step(1, samples_per_second=2.0), validation(1), {"event": "end"}):
        found(event)
    read = EventAccumulator(str(tmp_path / curves.TENSORBOARD))
    read.Reload()
    assert read.Scalars("loss/training")[0].value == 1.0
    assert read.Scalars("validation/dice liver")[0].value == 0.5
