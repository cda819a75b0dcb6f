"""Tests of indexing: foreign files become data sets, and checksums detect damage."""

from __future__ import annotations

import shutil
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from pydist.data import Manifest, ShardDataset
from pydist.data.index import IndexOptions, index_folder, verify_dataset
from pydist.errors import DataError, UsageError


@pytest.fixture
def foreign(public_universes: Path, tmp_path: Path) -> Path:
    """Returns files in the public layout without a manifest."""
    for path in public_universes.glob("*.hdf5"):
        shutil.copy(path, tmp_path)
    return tmp_path


def test_indexed_files_read_as_those_generated(foreign: Path, public_universes: Path) -> None:
    told: list[tuple[int, int, str]] = []
    options = IndexOptions(width=8, validation=0.25)
    manifest = index_folder(foreign, options, lambda *what: told.append(what))
    assert not (foreign / "dataset.json").exists(), "saving is the caller's"
    manifest.save(foreign)
    assert told[-1] == (4, 4, "univ_000003.hdf5")
    made = Manifest.load(public_universes)
    assert manifest.splits == made.splits
    assert manifest.target_names == made.target_names
    assert [f.crc32 for f in manifest.files] == [f.crc32 for f in made.files]
    np.testing.assert_allclose(manifest.log1p_std, made.log1p_std, rtol=1e-9)
    for normalize in ("mean", "standardize"):
        ours = ShardDataset(foreign, "val", normalize=normalize)
        theirs = ShardDataset(public_universes, "val", normalize=normalize)
        for i in range(8):
            torch.testing.assert_close(ours[i], theirs[i])


def test_manifest_of_a_folder_that_can_not_be_written(foreign: Path) -> None:
    dataset = ShardDataset(foreign, manifest=index_folder(foreign))
    assert len(dataset) == 4
    assert dataset.sample_shape == (4, 16, 16, 16)


def test_folders_name_splits(universes: Path, tmp_path: Path) -> None:
    for i, path in enumerate(sorted(universes.glob("*.hdf5"))[:6]):
        folder = tmp_path / "set" / ("train", "val", "test")[i % 3]
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, folder)
    manifest = index_folder(tmp_path, IndexOptions(statistics=False, checksums=False))
    assert manifest.splits == {"train": 2, "val": 2, "test": 2}
    assert manifest.sample_shape == (4, 8, 8, 8)
    with pytest.raises(DataError, match="no means"):
        ShardDataset(tmp_path, normalize="mean", manifest=manifest)


def test_files_that_do_not_fit_together(foreign: Path) -> None:
    with h5py.File(foreign / "zzz.hdf5", "w") as file:
        file["full"] = np.zeros((16, 16, 16, 4), np.float32)
        file["unitPar"] = np.zeros(4)
    with pytest.raises(DataError, match=r"zzz\.hdf5 holds .*float32.*univ_000000\.hdf5 holds"):
        index_folder(foreign)
    with h5py.File(foreign / "aaa.hdf5", "w") as file:
        file["full"] = np.zeros((16, 16, 16), np.int16)
        file["unitPar"] = np.zeros(4)
    with pytest.raises(DataError, match=r"aaa\.hdf5: 'full' has the shape \(16, 16, 16\)"):
        index_folder(foreign)


def test_wrong_calls(foreign: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    with pytest.raises(DataError, match=r"fits no 64\^3"):
        index_folder(foreign, IndexOptions(width=64))
    with pytest.raises(UsageError, match="fraction"):
        index_folder(foreign, IndexOptions(validation=1.0))
    with pytest.raises(DataError, match=r"no files of the format hdf5, zarr, numpy"):
        index_folder(tmp_path_factory.mktemp("empty"))
    with pytest.raises(DataError, match="no 'volume' in '/'; it has full"):
        index_folder(foreign, IndexOptions(dataset="volume"))


def test_nan_is_found_while_indexing(tmp_path: Path) -> None:
    volume = np.ones((8, 8, 8, 2), np.float32)
    volume[1, 6, 3, 0] = np.nan
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["full"] = volume
        file["unitPar"] = np.zeros(3)
    with pytest.raises(DataError, match=r"NaN or infinity in \(0, 4, 0\)"):
        index_folder(tmp_path, IndexOptions(width=4))


def test_verify_finds_every_kind_of_damage(public_universes: Path, tmp_path: Path) -> None:
    root = tmp_path / "copy"
    shutil.copytree(public_universes, root)
    assert verify_dataset(root) == []
    image = bytearray((root / "univ_000001.hdf5").read_bytes())
    image[20000] ^= 1
    (root / "univ_000001.hdf5").write_bytes(image)
    (root / "univ_000002.hdf5").write_bytes(image[:-1])
    (root / "univ_000003.hdf5").unlink()
    faults = verify_dataset(root)
    assert len(faults) == 3
    for fault, (name, why) in zip(
        faults, [("1", "checksum"), ("2", "bytes"), ("3", "No such file")], strict=True
    ):
        assert f"univ_00000{name}.hdf5" in fault
        assert why in fault
