"""Tests that programs which know nothing of packs train networks on one as on loose files."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import h5py
import numpy as np
import torch
from PIL import Image

from pydist.packs import PackOptions, pack
from support.mounts import Case


def test_networks_are_the_same_bits(tmp_path: Path) -> None:
    """An image classifier, a recurrent network on a table, and two adversarial networks."""
    folder, random = tmp_path / "folder", np.random.default_rng(0)
    for number in range(18):
        path = folder / "images" / "abc"[number % 3] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = random.integers(0, 256, (20, 24, 3), dtype=np.uint8)
        pixels[..., number % 3] |= 128
        Image.fromarray(pixels).save(path)
    with (folder / "table.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerows([["x", "y", "z"], *random.normal(size=(300, 3)).cumsum(0).tolist()])
    with h5py.File(folder / "volume.h5", "w") as file:
        file["full"] = random.random((4, 32, 32, 32))
    torch.save({"w": torch.arange(300_000.0)}, folder / "tensor.pt")
    pack(folder, tmp_path / "packs", PackOptions(partitions=2, codec="zstd"))
    case = Case(folder, tmp_path / "packs", tmp_path / "mount")

    program = Path(__file__).with_name("networks.py")
    loose = case.loose(sys.executable, program)
    assert loose.endswith(b"exit code 0"), loose.decode()
    # What is stored raw, as the volume, is over the limit and read in place.
    assert case.packed(sys.executable, program, large="100kB").decode() == loose.decode()
