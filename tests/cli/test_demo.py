"""Test that the demo does what the README says."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pydist.train import checkpoint, log, report


@pytest.mark.timeout(700)
def test_the_demo_learns_and_shows_that_split_and_whole_training_agree(tmp_path):
    ended = subprocess.run(
        [sys.executable, "-m", "pydist", "demo", "--folder", "a demo", "--universes", "620"],
        cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "the first 10 steps on 1 rank: largest difference of the loss " in ended.stdout
    assert "4 ranks: data 2 × depth 2" in ended.stdout
    assert "1 rank with initial weights moved by a millionth: " in ended.stdout
    assert "R² of 124 unseen universes: Omega_m" in ended.stdout
    folder = tmp_path / "a demo"
    assert (folder / "result.png").read_bytes().startswith(b"\x89PNG")
    split, whole = (log.losses(folder / name / "log.jsonl") for name in ("", "one-rank"))
    assert len(whole) == 10
    assert max(abs(split[step] - whole[step]) for step in (1, 2)) < 5e-6
    assert checkpoint.read((folder / "ckpt" / "last").resolve())["step"] == len(split)
    names, predicted, true = report.read_predictions(folder / "predictions.csv")
    assert names[:2] == ["Omega_m", "sigma_8"]
    for i in (0, 1):
        assert report.explained(predicted[:, i], true[:, i]) > 0.5, names[i]
