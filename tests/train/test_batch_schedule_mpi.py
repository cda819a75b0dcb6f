"""Tests that runs on real ranks resume within a change of the batch, with the bits of threads."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from pydist.comm import run_local
from pydist.launch.backends import available
from pydist.train import config_io
from pydist.train.config import Config
from support.training.runs import assert_same_bits, change, events, job, last_state

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
[output]
folder = "{folder}"
plot = false
"""
MILESTONES = """accumulate = 2
batch_schedule = {milestones = [[1.0, 3], [1.5, 6]]}"""
NOISE = """batch_schedule = {noise_scale = true, largest = 6, decide_every = 0.5, measure_every = 1,
by = "batch"}""".replace("\n", " ")


def train(config: Config, mpi: str | None) -> None:
    """Trains on two ranks, which are processes of a launcher or threads."""
    if mpi is None:
        run_local(job, 2, config, config.mesh.data or 1, config.mesh.spatial)
        return
    path = config.output.folder.with_suffix(".toml")
    path.write_text(config_io.dumps(config))
    ended = subprocess.run(
        [sys.executable, "-m", "pydist", "train", str(path), "-n", "2", "--mpi", mpi],
        capture_output=True, text=True, timeout=120, check=False,
        env={**os.environ, "PYDIST_TUNE": "0"},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.parametrize(
    ("mesh", "table", "stop", "launchers"),
    [
        ("spatial = [2, 1, 1]", MILESTONES, 4, ("openmpi", "mpich")),
        ("data = 2", NOISE, 3, (None, "gloo")),
    ],
    ids=["milestones", "noise scale"],
)
def test_a_run_resumes_within_a_change(universes, tmp_path, mesh, table, stop, launchers):
    """It stops within the second epoch, between two changes, and goes on under another launcher."""
    if not {*launchers} <= {None, *(each.name for each in available())}:
        pytest.skip(f"{launchers} are not all installed")
    text = CONFIG.format(data=universes, folder=tmp_path / "parts", mesh=mesh, train=table)
    parts = config_io.loads(text, "run.toml")
    for mpi, steps in zip(launchers, (stop, None), strict=True):
        train(change(parts, train={"steps": steps}), mpi)
    through = change(parts, output={"folder": tmp_path / "through"})
    train(through, None)
    logs = [events(run, "step") for run in (through, parts)]
    for name in ("step", "epoch", "loss", "lr", "batch", "passes"):
        assert [e[name] for e in logs[1]] == [e[name] for e in logs[0]]
    assert len({e["batch"] for e in logs[0]}) > 1
    assert_same_bits(last_state(through), last_state(parts))
