"""Tests of the runs of a study: several at a time, failures, continuation, and the end by a signal.

Jobs are shell scripts that write the log of a run.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from pydist.errors import Stopped, UsageError
from pydist.studies.runs import OUTPUT_FILE, Run, run_all
from pydist.train.config import Config, OutputConfig

STEP = {"event": "step", "time": 0, "step": 3, "loss": 0.5, "seconds": 2.0}
VALIDATION = {"event": "validation", "time": 0, "step": 3, "epoch": 1, "samples": 4, "loss": 0.25}
END = {"event": "end", "time": 0, "step": 3, "status": "done", "seconds": 3.0, "reason": ""}


def run(folder: Path, name: str, ranks: int = 1) -> Run:
    return Run(name, Config(output=OutputConfig(folder=folder / name)), ranks)


def script(run: Run, *events: dict, code: int = 0, before: str = "", says: str = "") -> list[str]:
    text = "".join(json.dumps(event) + "\n" for event in events)
    lines = [before, f"printf '%s' '{text}' >> '{run.folder}/log.jsonl'", f"echo '{says}'"]
    return ["sh", "-c", "\n".join([*lines, f"exit {code}"])]


class Told(list):
    def __call__(self, run, outcome):
        self.append((run.name, outcome and outcome.status))


def test_runs_share_the_ranks_and_start_in_order(tmp_path):
    runs = [run(tmp_path, name, ranks) for name, ranks in (("a", 1), ("b", 2), ("c", 1))]
    told = Told()
    busy: list[int] = []

    def tell(run, outcome):
        told(run, outcome)
        under_way = {n for n, status in told if status is None} - {n for n, s in told if s}
        busy.append(sum(r.ranks for r in runs if r.name in under_way))

    command = lambda r: script(r, STEP, VALIDATION, END, before="sleep 0.2")  # noqa: E731
    outcomes = run_all(runs, 3, command, tell)
    assert [o.status for o in outcomes] == ["done"] * 3
    assert [name for name, status in told if status is None] == ["a", "b", "c"]
    assert max(busy) == 3
    assert outcomes[0].steps == 3
    assert outcomes[0].loss == 0.5
    assert outcomes[0].seconds == 2.0
    assert outcomes[0].validation == {"loss": 0.25}


def test_a_failed_run_is_named_the_others_go_on_and_only_it_is_repeated(tmp_path):
    runs = [run(tmp_path, name) for name in ("logged", "killed", "printed", "good")]
    failed = {**END, "status": "failed", "reason": "no such folder"}
    commands = {
        "logged": lambda r: script(r, failed, code=65),
        "killed": lambda r: script(r, STEP, before="kill -9 $$"),
        "printed": lambda r: script(r, code=71, says="error: it does not work"),
        "good": lambda r: script(r, STEP, END),
    }
    outcomes = run_all(runs, 1, lambda r: commands[r.name](r), Told())
    assert [o.status for o in outcomes] == ["failed", "failed", "failed", "done"]
    assert [o.reason for o in outcomes[:3]] == [
        "no such folder", "exit code -9", "error: it does not work",
    ]  # fmt: skip
    told = Told()
    again = run_all(runs, 1, lambda r: script(r, STEP, END), told)
    assert [o.status for o in again] == ["done"] * 4
    assert [name for name, status in told if status is None] == ["logged", "killed", "printed"]


def test_a_job_that_leaves_no_end_has_failed(tmp_path):
    (outcome,) = run_all([run(tmp_path, "a")], 1, lambda r: script(r, END, STEP), Told())
    assert (outcome.status, outcome.reason) == ("failed", "it has no end in its log")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_reaches_the_jobs_and_ends_the_study_in_order(number, tmp_path):
    runs = [run(tmp_path, name) for name in ("a", "b", "later")]
    started = [r.folder / "started" for r in runs]
    # As srun, which goes on after a first SIGINT.
    trap = "trap '' INT; trap 'echo stopped; exit 75' TERM; touch '{}/started'; "
    trap += "while :; do sleep 0.05; done"

    def stop():
        while not all(path.exists() for path in started[:2]):
            time.sleep(0.02)
        os.kill(os.getpid(), number)

    threading.Thread(target=stop, daemon=True).start()
    told = Told()
    with pytest.raises(Stopped, match="the same command continues it"):
        run_all(runs, 2, lambda r: ["sh", "-c", trap.format(r.folder)], told)
    assert [status for _, status in told] == [None, None, "stopped", "stopped"]
    assert not started[2].exists()
    assert (runs[0].folder / OUTPUT_FILE).read_text() == "stopped\n"


def test_a_job_that_can_not_start_leaves_no_other_running(tmp_path):
    runs = [run(tmp_path, name) for name in ("a", "b")]
    started = runs[0].folder / "started"

    def command(each):
        if each is runs[0]:
            wait = "for i in $(seq 200); do sleep 0.05; done"
            return ["sh", "-c", f"trap 'echo ended; exit 75' TERM; touch '{started}'; {wait}"]
        while not started.exists():
            time.sleep(0.02)
        return ["no such launcher"]

    with pytest.raises(UsageError, match="there is no program 'no such launcher' to start ranks"):
        run_all(runs, 2, command, Told())
    assert (runs[0].folder / OUTPUT_FILE).read_text() == "ended\n"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda runs: [replace(runs[0], ranks=3)], r"a needs 3 ranks, and 2 are given \(-n\)"),
        (lambda runs: [*runs, replace(runs[0], name="b")], "b and a have the folder "),
        (
            lambda runs: [replace(runs[0], config=replace(runs[0].config, train=replace(
                runs[0].config.train, seed=1)))],
            "a has a run with other settings",
        ),
    ],
)  # fmt: skip
def test_what_can_not_run_is_refused_before_anything_starts(change, message, tmp_path):
    runs = [run(tmp_path, "a")]
    run_all(runs, 1, lambda r: script(r, END), Told())
    with pytest.raises(UsageError, match=message):
        run_all(change(runs), 2, lambda r: pytest.fail("it started"), Told())


def test_the_folder_of_another_run_and_a_missing_launcher_are_refused(tmp_path):
    mine = run(tmp_path, "a")
    with pytest.raises(UsageError, match="there is no program 'no-such-launcher'"):
        run_all([mine], 1, lambda r: ["no-such-launcher"], Told())
    foreign = run(tmp_path, "b")
    foreign.folder.mkdir()
    (foreign.folder / "log.jsonl").write_text(json.dumps(END) + "\n")
    with pytest.raises(UsageError, match="b has a run of no study: choose another folder"):
        run_all([foreign], 1, lambda r: script(r, END), Told())
