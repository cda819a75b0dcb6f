"""Tests of `pydist status`, which reads the log of a run from outside."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from pydist.cli.main import main
from pydist.cli.progress import describe_time
from pydist.cli.status import status_of
from pydist.data.lock import FolderLock
from pydist.errors import UsageError
from pydist.train.log import EventLog

START = {
    "device": "cpu", "transport": "mpi", "precision": "fp32", "unused_device": "",
    "mesh": "2 ranks", "epochs": 4, "steps": 40, "step": 0,
}  # fmt: skip
STEP = {"epoch": 1, "loss": 0.5, "lr": 1e-3, "samples_per_second": 2.0, "seconds": 1.0, "parts": {}}


@pytest.fixture
def run(tmp_path, monkeypatch) -> Path:
    log = EventLog(tmp_path / "log.jsonl")
    now = time.time()
    monkeypatch.setattr("pydist.train.log.time.time", lambda: next(moments))
    moments = iter(now - 100 + 2.0 * i for i in range(50))
    log.emit("start", **START)
    for number in range(1, 21):
        log.emit("step", step=number, **STEP)
    log.emit("validation", step=20, epoch=1, samples=2, loss=0.4, dice={"liver": 0.75})
    log.emit("checkpoint", step=20, path="ckpt/step-000020", seconds=0.1)
    log.close()
    monkeypatch.undo()
    return tmp_path


def test_a_running_run_tells_its_end(run, capsys):
    with FolderLock(run):
        found = status_of(run)
        assert (found["state"], found["step"]["step"]) == ("running", 20)
        assert found["seconds_left"] == pytest.approx(20 * 2.0)
        assert main(["status", str(run)]) == 0
    shown = capsys.readouterr().out
    assert f"run        {run} running, process " in shown
    assert "epoch 2/4  step 20/40  50%  40 s left" in shown
    assert "validation step 20  Dice liver 0.750" in shown
    assert "checkpoint step 20, 5" in shown


def test_a_run_without_a_process_was_killed_and_one_with_an_end_has_a_reason(run, capsys):
    with (run / "log.jsonl").open("a") as file:
        file.write('{"event": "step", "tim')  # a killed run was writing
    assert status_of(run)["state"] == "killed"
    EventLog(run / "log.jsonl").emit("end", status="failed", reason="no memory", step=20, seconds=1)
    assert main(["status", str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["state"], found["reason"], found["seconds_left"]) == ("failed", "no memory", None)
    EventLog(run / "log.jsonl").emit("start", **START)  # resumed
    with FolderLock(run):
        assert status_of(run)["state"] == "running"


def test_a_notice_ends_with_its_session(run, capsys):
    log = EventLog(run / "log.jsonl")
    log.emit("notice", text="nothing left to do")
    assert status_of(run)["notice"]["text"] == "nothing left to do"
    log.emit("start", **START)  # resumed
    assert main(["status", str(run)]) == 0
    assert "nothing left" not in capsys.readouterr().out
    assert status_of(run)["step"]["step"] == 20


def test_a_validation_that_is_not_finite_is_told(run, capsys):
    nan = float("nan")
    EventLog(run / "log.jsonl").emit("validation", step=20, epoch=1, samples=2, loss=nan, mae=nan)
    assert main(["status", str(run)]) == 0
    assert "validation step 20  mae not finite\n" in capsys.readouterr().out


def test_a_folder_of_no_run_is_named(tmp_path, capsys):
    with pytest.raises(UsageError, match=r"has no log\.jsonl"):
        status_of(tmp_path)
    (tmp_path / "log.jsonl").write_text("text\n")
    assert main(["status", str(tmp_path)]) == 2
    assert "has no log of a run that has begun" in capsys.readouterr().err


def test_durations():
    given = {0: "0 s", 59.7: "1 min 0 s", 599: "9 min 59 s", 3599: "59 min", 7260: "2 h 1 min"}
    assert {s: describe_time(s) for s in given} == given
    assert describe_time(90_000) == "1 d 1 h"
