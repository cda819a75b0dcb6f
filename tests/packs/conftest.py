"""A folder with files of several kinds, and a pack of it."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest

from pydist.packs import pack

LARGE = np.random.default_rng(5).integers(0, 256, 3 << 20, dtype=np.uint8)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Makes a folder with small files in classes, one of 3 MiB, and one in HDF5."""
    folder = tmp_path / "source"
    for split in ("train", "val"):
        for kind in ("cat", "dog"):
            (folder / split / kind).mkdir(parents=True)
            for number in range(5):
                text = f"{split} {kind} {number} " * (1 + 10 * number)
                (folder / split / kind / f"{number}.txt").write_text(text)
    (folder / "large.bin").write_bytes(LARGE.tobytes())
    with h5py.File(folder / "volume.hdf5", "w") as file:
        file["full"] = np.arange(200_000, dtype=np.int64).reshape(50, 40, 100)
    return folder


@pytest.fixture
def packed(source: Path, tmp_path: Path) -> Path:
    """Packs the folder, with files stored raw."""
    pack(source, tmp_path / "pack")
    return tmp_path / "pack"
