"""Tests that contiguous datasets are read as HDF5 reads them, without it."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest
from h5py import h5t

from pydist.data.plain_array import plain_array
from pydist.data.safe_open import safe_open
from pydist.errors import DataError


@pytest.mark.parametrize("dtype", ["<i2", ">i2", "u1", "<f4", ">f8", "<f2", "<u8"])
@pytest.mark.parametrize("block", [0, 1024])
def test_boxes_are_those_of_hdf5(tmp_path: Path, dtype: str, block: int) -> None:
    random = np.random.default_rng(0)
    content = random.integers(0, 100, (3, 5, 4, 6)).astype(dtype)
    with h5py.File(tmp_path / "a.h5", "w", userblock_size=block) as file:
        file["full"] = content
    with safe_open(tmp_path / "a.h5") as opened:
        dataset = opened.dataset("full")
        plain = plain_array(dataset)
        assert plain is not None
        for _ in range(60):
            ends = [sorted(random.integers(0, n + 1, 2).tolist()) for n in content.shape]
            window = tuple(slice(*each) for each in ends)
            found = opened.read(dataset, window)
            assert found.dtype == content.dtype
            np.testing.assert_array_equal(found, content[window])
            out = np.empty(found.shape, np.dtype(dtype).newbyteorder("="))
            assert opened.read(dataset, window, out) is out
            np.testing.assert_array_equal(out, content[window])
            if plain.fits(out):
                np.testing.assert_array_equal(plain.read(window, out), content[window])


def test_other_datasets_are_left_to_hdf5(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file["full"] = np.arange(24.0).reshape(2, 3, 4)
        file.create_dataset("chunks", data=np.arange(24.0), chunks=(5,))
        file.create_dataset("bools", data=np.ones(5, bool))
        kind = h5t.STD_I16LE.copy()
        kind.set_precision(12)
        h5py.h5d.create(file.id, b"twelve bits", kind, h5py.h5s.create_simple((5,)))
        compact = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        compact.set_layout(h5py.h5d.COMPACT)
        space = h5py.h5s.create_simple((5,))
        h5py.h5d.create(file.id, b"compact", h5t.STD_I16LE, space, compact)
    with h5py.File(path) as file:
        found = {name: plain_array(file[name]) for name in file}
    assert [name for name, plain in found.items() if plain is not None] == ["full"]
    with path.open("rb") as source, h5py.File(source) as file:
        assert plain_array(file["full"]) is None, "its bytes come from a Python object"


def test_file_that_ends_within_the_array(tmp_path: Path) -> None:
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file["full"] = np.arange(10_000.0)
    with safe_open(path) as opened:
        dataset = opened.dataset("full")
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size - 100)
        np.testing.assert_array_equal(opened.read(dataset, (slice(0, 9),)), np.arange(9.0))
        with pytest.raises(OSError, match="the file ends within the array"):
            opened.read(dataset, (slice(0, 10_000),))
        with pytest.raises(ValueError, match="the box is not in the array"):
            opened.read(dataset, (slice(0, 10_001),))
    with pytest.raises(DataError, match="cut short"):
        safe_open(path)
