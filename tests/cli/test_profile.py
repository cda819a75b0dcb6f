"""Tests of `pydist profile`: alone, as a launcher, and with wrong arguments."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pydist.cli import main as cli

CONFIG = """
[model]
variant = "mlperf"
width = 32
[data]
path = "data"
[train]
epochs = 1
batch = 2
[output]
folder = "run"
"""


def profile(*arguments: str, code: int = 0) -> str:
    """Runs `pydist profile run.toml`; returns what it printed."""
    ended = subprocess.run(
        [sys.executable, "-m", "pydist", "profile", "run.toml", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env=dict(os.environ),
    )
    assert ended.returncode == code, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


def files(place: Path) -> set[str]:
    return {path.name for path in place.iterdir()}


def test_as_launcher_it_prints_one_table_and_writes_the_trace_alone(place):
    before = files(place)
    # More steps than the epochs of the configuration have, and than one epoch.
    shown = profile(
        "-n", "2", "--steps", "4", "--warmup", "1", "--trace", "trace.json",
        "--mesh.spatial", "2", "1", "1",
    )  # fmt: skip
    assert shown.count("mean of 4 steps on 2 ranks (depth 2, ") == 1
    for word in ("features.conv1", "outside layers", "optimiz.", "hidden by other work"):
        assert word in shown
    assert files(place) == before | {"trace.json"}
    events = json.loads((place / "trace.json").read_text())["traceEvents"]
    assert {e["pid"] for e in events} == {0, 1}
    assert {"pack", "halo", "compute", "gradients", "optimizer", "data"} <= {
        e["cat"] for e in events if "cat" in e
    }


def test_alone_it_profiles_in_this_process_and_writes_nothing(place, capsys):
    before = files(place)
    assert cli.main(["profile", "run.toml", "--steps", "1", "--warmup", "0"]) == 0
    shown = capsys.readouterr().out
    assert "mean of 1 step on 1 rank;" in shown
    assert "no halo was exchanged" in shown
    assert files(place) == before


def test_stages_are_profiled_with_a_picture_of_their_schedule(place):
    pytest.importorskip("matplotlib")
    before = files(place)
    shown = profile(
        "-n", "2", "--steps", "2", "--warmup", "1", "--picture", "schedule.png",
        "--mesh.stages", "2", "--mesh.micro-batches", "2",
    )  # fmt: skip
    assert shown.count("mean of 2 steps on 2 ranks (2 stages, ") == 1
    assert "transfer" in shown
    assert "picture    schedule.png: the schedule of a step, beside the ideal one" in shown
    assert files(place) == before | {"schedule.png"}
    assert (place / "schedule.png").read_bytes().startswith(b"\x89PNG")


def test_a_trace_that_cannot_be_written_ends_all_ranks_with_the_code_of_the_disk(place):
    full = "/dev/full"
    shown = profile("-n", "2", "--steps", "1", "--warmup", "0", "--trace", full, code=74)
    assert f"error: can't write {full}: No space left on device" in shown


def test_a_folder_in_the_place_of_a_trace_is_refused_before_ranks_start(place, capsys):
    assert cli.main(["profile", "run.toml", "-n", "2", "--trace", str(place)]) == 74
    assert f"error: {place}: it is a folder, and a file is needed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no configuration file was given; usage: pydist profile CONFIG"),
        (["run.toml", "--steps", "0"], "at least 1 step"),
        (["run.toml", "--warmup", "-1"], "at least 1 step and 0 for warm-up"),
        (["run.toml", "--train.batches", "3"], "--train.batch"),
        (["missing.toml"], "missing.toml"),
        (["run.toml", "--picture", "s.png"], "--picture draws the schedule of stages, and mesh.st"),
        (["run.toml", "-n", "3", "--mesh.stages", "2"], "mesh.stages needs 1 + 1 ranks, and there"),
    ],
)
def test_wrong_arguments_are_one_line(place, capsys, arguments, message):
    assert cli.main(["profile", *arguments]) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert shown.count("\n") == 1
