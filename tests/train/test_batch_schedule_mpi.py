"""Tests that runs on real ranks resume bit by bit within a change of the batch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pydist.launch import available
from pydist.train import checkpoint, log
from support.training.runs import assert_same_bits

CONFIG = """
[model]
variant = "mlperf"
width = 32
[data]
path = "{data}"
normalize = "log1p"
[mesh]
{mesh}
[optimizer]
lr = 1e-4
lr_batch = 2
[train]
epochs = 3
batch = 2
{train}
[checkpoint]
every = 1
[output]
folder = "{folder}"
plot = false
"""
MILESTONES = """accumulate = 2
batch_schedule = {milestones = [[1.0, 3], [1.5, 6]]}"""
NOISE = """batch_schedule = {noise_scale = true, largest = 6, decide_every = 0.5, measure_every = 1,
by = "batch"}""".replace("\n", " ")


def train(data: Path, folder: Path, mpi: str, tables: dict[str, str], *arguments: str) -> None:
    """Trains on two ranks."""
    folder.with_suffix(".toml").write_text(CONFIG.format(data=data, folder=folder, **tables))
    command = [sys.executable, "-m", "pydist", "train", str(folder.with_suffix(".toml"))]
    ended = subprocess.run(
        [*command, "-n", "2", "--mpi", mpi, *arguments],
        capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, "PYDIST_TUNE": "0"},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.parametrize("mpi", [each.name for each in available()])
def test_a_run_resumes_within_a_change(universes, tmp_path, mpi):
    """Split samples whose batch grows at milestones; and, with gloo, groups that measure noise."""
    tables = {"mesh": "spatial = [2, 1, 1]", "train": MILESTONES}
    stop = 4  # within the second epoch, between two changes
    if mpi == "gloo":
        tables, stop = {"mesh": "data = 2", "train": NOISE}, 3
    through, parts = tmp_path / "through", tmp_path / "parts"
    train(universes, through, mpi, tables)
    train(universes, parts, mpi, tables, "--train.steps", str(stop))
    train(universes, parts, mpi, tables)
    logs = [
        [e for e in log.read(folder / "log.jsonl") if e["event"] == "step"]
        for folder in (through, parts)
    ]
    for name in ("step", "epoch", "loss", "lr", "batch", "passes"):
        assert [e[name] for e in logs[1]] == [e[name] for e in logs[0]]
    assert len({e["batch"] for e in logs[0]}) > 1
    states = [checkpoint.read(checkpoint.complete(f / "ckpt")[-1]) for f in (through, parts)]
    assert_same_bits(*states)
