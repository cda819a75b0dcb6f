"""Test of a small U-Net demo: it trains on 2 ranks, draws, and its network predicts a volume."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import nibabel as nib
import numpy as np

from pydist.data.medical.generate import generate_ct
from pydist.data.medical.options import CTOptions
from pydist.train import log


def pydist(*arguments: str, cwd: Path) -> str:
    ended = subprocess.run(
        [sys.executable, "-m", "pydist", *arguments],
        cwd=cwd, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def test_the_demo_trains_and_draws_and_its_network_predicts(tmp_path):
    small = ("--volumes", "4", "--width", "16", "--epochs", "1")
    shown = pydist("demo", "unet", "--folder", "a demo", *small, cwd=tmp_path)
    assert re.search(r"Dice on 1 unseen volumes: liver [\d.n]+, tumor [\d.n]+", shown)
    assert "2 ranks: depth 2" in shown
    folder = tmp_path / "a demo"
    assert (folder / "result.png").read_bytes().startswith(b"\x89PNG")
    assert len(log.losses(folder / "log.jsonl")) == 2

    generate_ct(tmp_path, CTOptions(count=2, shape=(12, 16, 20), seed=9, format="nifti"))
    shown = pydist("predict", "a demo", "imagesTr", "-o", "out", "-n", "2", cwd=tmp_path)
    assert shown.startswith("predict    device ")
    assert shown.count("predicted") == 2
    found = nib.load(tmp_path / "out" / "ct_0001.nii.gz")
    truth = nib.load(tmp_path / "labelsTr" / "ct_0001.nii.gz")
    assert found.shape == truth.shape == (20, 16, 12)
    np.testing.assert_array_equal(found.affine, truth.affine)
