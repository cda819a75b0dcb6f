"""Tests of `pydist train` in stages: as launcher, stopped and resumed, failing, and refusing."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pydist.cli import main as cli
from pydist.cli.options import override
from pydist.comm import LocalTransport
from pydist.train import checkpoint, config_io, log
from support.jobs.children import child_environment, wait_until
from support.training.runs import job

CONFIG = """
[model]
variant = "mlperf"
width = 32
[data]
path = "data"
normalize = "log1p"
[mesh]
stages = [{spatial = [2, 1, 1]}, {}]
micro_batches = 2
transport = "host"
[train]
epochs = 1
batch = 2
[optimizer]
name = "sgd"
[output]
folder = "run"
"""
WITHOUT = ["--mesh.stages", "None", "--mesh.micro-batches", "1"]


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "pydist", *arguments]


def train(*arguments: str) -> None:
    """Runs `pydist train` alone."""
    ended = subprocess.run(
        command("train", "run.toml", *arguments),
        capture_output=True, text=True, timeout=120, check=False, env=child_environment(),
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr


def losses(folder: str = "run") -> list[float]:
    return list(log.losses(Path(folder, "log.jsonl")).values())


def test_a_run_in_stages_is_stopped_and_goes_on_without_them(place):
    """All losses are those of one rank; the launcher draws what the last stage's rank logs."""
    options = ["--train.epochs", "1000", "--checkpoint.every", "1000000"]
    process = subprocess.Popen(
        command("train", "run.toml", "-n", "3", *options),
        stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=child_environment(),
    )  # fmt: skip
    wait_until(lambda: Path("run/log.jsonl").exists() and len(losses()) > 1, process)
    process.send_signal(signal.SIGINT)
    shown, said = process.communicate(timeout=60)
    assert process.returncode == 75, said
    assert "stopped by SIGINT after step" in said
    assert "3 ranks in 2 stages: depth 2 + " in shown
    assert "stage  calls  time" in shown
    (saved,) = checkpoint.complete(Path("run/ckpt"))
    step = checkpoint.read(saved)["step"]
    assert step == len(losses())
    length = ["--train.epochs", "1000", "--train.steps", str(step + 1)]
    train(*length, *WITHOUT)
    whole = [*length, *WITHOUT, "--output.folder", "whole"]
    job(LocalTransport(), override(config_io.load(Path("run.toml")), whole, "test"))
    assert losses() == pytest.approx(losses("whole"), abs=5e-6)
    assert len(losses()) == step + 1
    written = {path.name for path in Path("run").iterdir()}
    assert written == {path.name for path in Path("whole").iterdir()}


@pytest.mark.parametrize(
    ("subcommand", "arguments", "message"),
    [
        ("train", ["-n", "2"], "mesh.stages needs 2 + 1 ranks, and there are 2: possible are"),
        ("train", ["-n", "3", "--train.batch", "1"], "of train.batch = 1 a sample group has 1 sam"),
        ("train", ["-n", "2", "--mesh.stages", "two"], "mesh.stages = 'two': expected a count"),
        ("train", [], "mesh.stages needs 2 + 1 ranks, and there are 1: possible are mul"),
        ("balance", ["-n", "3"], "pydist balance divides an axis of one mesh, and mesh.stages"),
    ],
)  # fmt: skip
def test_a_wrong_description_is_refused_in_one_line_before_anything_starts(
    place, capsys, subcommand, arguments, message
):
    assert cli.main([subcommand, "run.toml", *arguments]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
    assert not Path("run").exists()
