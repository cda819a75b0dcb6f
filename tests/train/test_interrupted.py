"""Tests of runs that a signal or a kill ends: they save, stop together, and go on from there."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress

import pytest

from pydist.comm import run_local
from pydist.errors import (
    Stopped,
)  # fmt: skip
from pydist.train import checkpoint, report
from pydist.train.config import Config
from pydist.train.signals import ending_at_once
from support.training.runs import (
    alone,
    assert_same_bits,
    curve,
    events,
    job,
    last_state,
    slow_run,
)


@pytest.fixture
def config(universes, tmp_path) -> Config:
    return slow_run(universes, tmp_path / "run")


class Killed(BaseException):
    """Simulated kill of the process, which leaves the run's files as they are."""


def validations(config) -> dict[int, tuple]:
    """Returns the validation results by step; asserts that no step is validated twice."""
    found = [(e["step"], (e["epoch"], e["loss"], e["mae"])) for e in events(config, "validation")]
    assert len(found) == len(dict(found))
    return dict(found)


@pytest.mark.parametrize(("end", "step"), [("killed", 2), ("killed", 4), ("signal", 4)])
def test_a_validation_that_was_cut_off_is_done_on_resume(config, whole_run, end, step):
    """After the last checkpoint the final results are missing as well."""
    through = whole_run[0]

    def interrupt(event):
        if end == "signal" and event["event"] == "step" and event["step"] == step - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        if end == "killed" and event["event"] == "checkpoint" and event["step"] == step:
            raise Killed

    with pytest.raises((Stopped, Killed)):
        alone(config, [interrupt])
    assert step not in validations(config)
    alone(config)
    assert curve(config) == curve(through)
    assert_same_bits(last_state(config), last_state(through))
    assert validations(config) == validations(through)
    name = "predictions.csv"
    assert (config.output.folder / name).read_text() == (through.output.folder / name).read_text()
    assert not events(config, "notice")


def test_results_that_were_cut_off_are_written_on_resume_and_a_complete_run_says_so(
    config, monkeypatch
):
    with monkeypatch.context() as patch:
        patch.setattr(report, "write_predictions", kill)
        with pytest.raises(Killed):
            alone(config)
    table = config.output.folder / "predictions.csv"
    assert not table.exists()
    alone(config)
    assert len(table.read_text().splitlines()) == 4
    assert not events(config, "notice")
    table.unlink()
    result = run_local(job, 2, config, 2)[0]
    assert result.validation is None
    assert [e["step"] for e in events(config, "step")] == [1, 2, 3, 4]
    (notice,) = events(config, "notice")
    assert notice["text"].startswith("nothing left to do: step 4 of 4 is done")


def kill(*_) -> None:
    raise Killed


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_saves_and_stops_and_the_run_goes_on_from_there(config, whole_run, number):
    def interrupt(event):
        if event["event"] == "step" and event["step"] == 1:
            os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    with pytest.raises(Stopped, match=f"stopped by {number.name} after step 2, checkpoint saved"):
        alone(config, [interrupt])
    assert signal.getsignal(number) is before
    assert events(config, "end")[-1]["status"] == "stopped"
    assert [p.name for p in checkpoint.complete(config.output.folder / "ckpt")] == ["step-000002"]
    alone(config)
    assert curve(config) == curve(whole_run[0])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_before_and_after_its_steps_a_signal_ends_a_run_at_once(config, monkeypatch, number):
    def interrupt(event):
        if event["event"] == "start":
            os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    message = f"stopped by {number.name} before or after training"
    with pytest.raises(Stopped, match=message), ending_at_once():
        alone(config, [interrupt])
    assert not events(config, "step")
    assert events(config, "end")[-1]["status"] == "stopped"
    with monkeypatch.context() as patch:
        patch.setattr(report, "write_predictions", lambda *_: os.kill(os.getpid(), number))
        with pytest.raises(Stopped, match=message), ending_at_once():
            alone(config)
    with ending_at_once():
        assert alone(config).steps == 4
    assert signal.getsignal(number) is before


def test_what_catches_every_exception_does_not_lose_a_signal():
    """Packages do so while they are imported."""

    def imported():
        with suppress(Exception):
            os.kill(os.getpid(), signal.SIGTERM)
        pytest.fail("lost")

    with pytest.raises(Stopped), ending_at_once():
        imported()


def test_a_signal_during_an_import_comes_again_after_it(tmp_path, monkeypatch):
    """Where a package is imported by another one that does without it, it would be lost."""
    (tmp_path / "interrupted.py").write_text(
        "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\nfound = [1]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    found = []

    def run():
        import interrupted

        found.extend(interrupted.found)
        threading.Event().wait(10)
        pytest.fail("lost")

    with pytest.raises(Stopped), ending_at_once():
        run()
    assert found == [1]


def test_a_signal_to_one_rank_stops_all_at_the_same_step(config, monkeypatch):
    """A rank that stopped alone would leave the others waiting."""
    from pydist.train import loop

    class Request(loop.StopRequest):
        def __init__(self):
            super().__init__()
            made.append(self)

    made = []
    monkeypatch.setattr(loop, "StopRequest", Request)

    def interrupt(event):
        if event["event"] == "step":
            made[1].signal = signal.SIGUSR1

    with pytest.raises(Stopped, match="checkpoint saved"):
        run_local(job, 3, config, 3, (1, 1, 1), [interrupt])
    assert len(events(config, "step")) == 2
