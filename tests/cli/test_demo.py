"""Test that the demo does what the README says."""

from __future__ import annotations

import re
import subprocess
import sys

from pydist.train import checkpoint, log


def test_the_demo_shows_that_split_and_whole_training_agree(tmp_path):
    ended = subprocess.run(
        [sys.executable, "-m", "pydist", "demo", "--folder", "a demo", "--universes", "20"],
        cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = re.search(
        r"the same 4 steps on 1 rank: largest difference of the loss (\S+)", ended.stdout
    )
    assert found
    assert float(found[1]) < 5e-6
    assert "4 ranks: data 2 × depth 2" in ended.stdout
    assert "1 rank with initial weights moved by a millionth: " in ended.stdout
    folder = tmp_path / "a demo"
    assert (folder / "result.png").read_bytes().startswith(b"\x89PNG")
    assert len(log.losses(folder / "log.jsonl")) == 4
    assert checkpoint.read((folder / "ckpt" / "last").resolve())["step"] == 4
