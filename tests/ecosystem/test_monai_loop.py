"""The example with a loop of its own and MONAI: killed and resumed, it has the same bits."""

from __future__ import annotations

import runpy
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from pydist import checkpoint
from pydist.data.medical.generate import generate_ct
from pydist.data.medical.options import CTOptions
from pydist.train.checkpoint import read
from support.equivalence import on_one_core
from support.jobs.children import child_environment, wait_until

EXAMPLE = Path(__file__).parents[2] / "examples" / "monai_unet.py"

pytest.importorskip("monai")

pytestmark = pytest.mark.filterwarnings("ignore:NvImgCodec")  # MONAI makes all of its readers


def run(folder: Path, epochs: int, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Runs the example in this process; returns its last checkpoint."""
    arguments = [str(folder.parent / "volumes"), "--run", str(folder), "--epochs", str(epochs)]
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), *arguments])
    with on_one_core():
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    return read(folder / "last")


def test_the_example_goes_on_where_it_was_killed(tmp_path, monkeypatch, capsys):
    """Within an epoch of two steps, after at least one whole epoch."""
    assert len(EXAMPLE.read_text().splitlines()) <= 80
    volumes, killed = tmp_path / "volumes", tmp_path / "killed"
    generate_ct(volumes, CTOptions(count=5, shape=(16, 16, 16), format="nifti"))
    process = subprocess.Popen(
        [sys.executable, EXAMPLE, volumes, "--run", killed, "--epochs", "99"],
        cwd=tmp_path, env=child_environment(OMP_NUM_THREADS="1"), text=True,
    )  # fmt: skip
    try:
        wait_until((killed / "step-000003").exists, process)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    last = checkpoint.latest(killed)
    assert last is not None
    step = int(last.name.removeprefix("step-"))
    epochs = step // 2 + 2
    through = run(tmp_path / "through", epochs, monkeypatch)
    told = capsys.readouterr().out.splitlines()
    resumed = run(killed, epochs, monkeypatch)
    assert resumed["step"] == 2 * epochs > step
    for part in ("model", "optimizer", "scheduler"):
        torch.testing.assert_close(resumed[part], through[part], rtol=0, atol=0)
    (mine,), (expected,) = (each["ranks"]["states"] for each in (resumed, through))
    assert torch.equal(mine["random"]["torch"], expected["random"]["torch"])  # the seeded ones
    again = capsys.readouterr().out.splitlines()
    assert told[-len(again) :] == again  # the whole volume's prediction, too
    assert "Dice" in again[-1]
    assert not list(killed.glob("*.tmp*"))
