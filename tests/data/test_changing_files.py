"""Tests that the next read detects a change of an open file, whatever HDF5 returns."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from pydist.data import ShardDataset, indexed
from pydist.data.index import index_folder
from pydist.data.manifest import Manifest
from pydist.errors import DataError
from pydist.partition import Box
from support.data.damage import flip
from support.data.reading import refusal_of

SAMPLE = np.arange(1, 2 * 8 * 8 * 8 + 1, dtype=np.int16).reshape(2, 8, 8, 8)
BLOCK = Box((0, 4, 0, 0), (2, 8, 8, 8))


def cut(path: Path, length: int) -> None:
    with path.open("r+b") as file:
        file.truncate(length)


def refusal(dataset: ShardDataset) -> str:
    return refusal_of(lambda: dataset.read_block(0, BLOCK))


@pytest.mark.parametrize("storage", [{}, {"chunks": (1, 4, 8, 8), "compression": "gzip"}])
@pytest.mark.parametrize("keep", [0, 1, 0.3, 0.7, -1])
def test_a_file_that_shrinks_is_refused_at_the_next_read(
    write_samples: Callable[..., Path], storage: dict, keep: float
) -> None:
    root = write_samples([SAMPLE], **storage)
    path = root / "sample_0.hdf5"
    size = path.stat().st_size
    length = int(keep * size) if 0 < keep < 1 else int(keep % size)
    dataset = ShardDataset(root)
    dataset.read_block(0, Box((0, 0, 0, 0), (1, 1, 8, 8)))
    cut(path, length)
    assert refusal(dataset) == f"{path}: shrank from {size} to {length} bytes while it was open"
    assert str(path) in refusal(dataset)  # also when opened again


def test_targets_and_labels_are_held_to_the_same_rule(
    write_samples: Callable[..., Path],
) -> None:
    root = write_samples([SAMPLE, SAMPLE])
    dataset = ShardDataset(root)
    dataset.target(0)
    cut(root / "sample_0.hdf5", 3000)
    with pytest.raises(DataError, match="shrank from"):
        dataset.target(0)
    path = root / "sample_1.hdf5"
    with h5py.File(path, "a") as file:
        file["label"] = np.ones((8, 8, 8), np.uint8)
    labeled = Manifest(**{**vars(Manifest.load(root)), "label": "label"})
    dataset = ShardDataset(root, manifest=labeled)
    dataset.read_labels(1)
    cut(path, path.stat().st_size - 8)
    with pytest.raises(DataError, match="shrank from"):
        dataset.read_labels(1)


def test_a_file_that_is_overwritten_replaced_or_deleted_is_named(
    write_samples: Callable[..., Path],
) -> None:
    root = write_samples([SAMPLE])
    path = root / "sample_0.hdf5"
    other = Path(shutil.copy(path, root / "other"))
    for change, said in (
        (lambda: path.write_bytes(path.read_bytes()), "changed while it was open"),
        (lambda: other.replace(path), "replaced by another file while it was open"),
        (lambda: path.write_bytes(path.read_bytes() + b"x"), "grew from"),
        (path.unlink, "lost while it was open: No such file"),
    ):
        dataset = ShardDataset(root)
        dataset.read_block(0)
        change()
        assert said in refusal(dataset)


def test_what_still_has_its_checksum_is_read_anew(tmp_path: Path, universes: Path) -> None:
    """Users touch files, since sites delete old ones, or copy a file over itself."""
    shutil.copytree(universes, tmp_path / "data")
    dataset = ShardDataset(tmp_path / "data")
    expected = dataset.read_block(0)
    path = tmp_path / "data" / dataset.manifest.files[0].path
    os.utime(path)
    assert torch.equal(dataset.read_block(0), expected)
    whole = path.read_bytes()
    cut(path, 0)
    path.write_bytes(whole)
    assert torch.equal(dataset.read_block(0), expected)
    flip(path, -1)
    with pytest.raises(DataError, match="changed while it was open"):
        dataset.read_block(0)


def test_the_source_of_a_virtual_dataset_is_watched_as_well(
    write_samples: Callable[..., Path],
) -> None:
    root = write_samples([SAMPLE])
    path, source = root / "sample_0.hdf5", root / "source.h5"
    with h5py.File(source, "w") as file:
        file["full"] = SAMPLE
    with h5py.File(path, "a") as file:
        del file["full"]
        layout = h5py.VirtualLayout(SAMPLE.shape, SAMPLE.dtype)
        layout[...] = h5py.VirtualSource("source.h5", "full", SAMPLE.shape)
        file.create_virtual_dataset("full", layout)
    dataset = ShardDataset(root, allow_roots=[root])
    assert dataset.read_block(0)[1, 7, 7, 7] == SAMPLE[1, 7, 7, 7]
    cut(source, source.stat().st_size // 2)
    assert refusal(dataset).startswith(f"{source}: shrank from")


def test_a_file_that_changes_while_it_is_indexed(
    write_samples: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = write_samples([SAMPLE])
    real = indexed._kind

    def volume(*args: object) -> object:
        found = real(*args)
        cut(root / "sample_0.hdf5", 3000)
        return found

    monkeypatch.setattr(indexed, "_kind", volume)
    with pytest.raises(DataError, match=r"sample_0\.hdf5: shrank from"):
        index_folder(root)
