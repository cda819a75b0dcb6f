"""Tests of file formats of other packages: each fault of a file gives one clear line."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from pydist.data import BadSample, ShardDataset
from pydist.data.formats import StoredArray, StoredFile
from pydist.data.index import verify_dataset
from pydist.data.manifest import DataFile, Manifest
from pydist.errors import DataError, UsageError
from pydist.partition import Box
from pydist.registry import FORMATS

SHAPE = (1, 4, 5, 6)


class NumpyFolder(StoredFile):
    def dataset(self, name: str) -> StoredArray:
        return np.load(self.path / f"{name}.npy", mmap_mode="r")


class Unasked(NumpyFolder):
    """Format that returns the array of a test for every request."""

    given: Any = None

    def read(self, *_: Any) -> npt.NDArray[Any]:
        return self.given


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns a folder with samples, labels and targets in replaceable array files."""
    get = FORMATS.get
    formats = {"npy": NumpyFolder, "unasked": Unasked, "class": int, "module": np}
    monkeypatch.setattr(FORMATS, "get", lambda name: formats.get(name) or get(name))
    (tmp_path / "0").mkdir()
    values = np.arange(np.prod(SHAPE), dtype="float32").reshape(SHAPE)
    np.save(tmp_path / "0" / "ct.npy", values)
    np.save(tmp_path / "0" / "labels.npy", np.ones(SHAPE[1:], "uint8"))
    np.save(tmp_path / "0" / "numbers.npy", np.array([1.5, 2.5]))
    return tmp_path


def opened(folder: Path, file_format: str = "npy", **changes: Any) -> ShardDataset:
    given: dict[str, Any] = {"target": "numbers", "target_names": ("a", "b"), **changes}
    files = (DataFile("0", "train", 0, "", ((0, 0, 0),)),)
    manifest = Manifest(
        SHAPE, "CDHW", "float32", files, dataset="ct", file_format=file_format, **given
    )
    manifest.save(folder)
    return ShardDataset(folder)


@pytest.mark.parametrize("order", "CF")
@pytest.mark.parametrize("endian", "<>")
def test_any_order_of_bytes_and_axes(folder: Path, order: Any, endian: str) -> None:
    values = np.random.default_rng(0).normal(size=SHAPE).astype(f"{endian}f4", order=order)
    np.save(folder / "0" / "ct.npy", values)
    data = opened(folder)
    assert torch.equal(data.read_block(0), torch.from_numpy(values.astype("f4", order="C")))
    part = data.read_block(0, Box((0, 1, 2, 0), (1, 3, 5, 4)))
    assert np.array_equal(part.numpy(), values[:, 1:3, 2:5, :4])
    assert data.target(0).tolist() == [1.5, 2.5]


BROKEN: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_bytes(b""),
    "a damaged header": lambda path: path.write_bytes(
        path.read_bytes().replace(b"'fortran_order'", b"'fortran_order (")
    ),
    "cut short": lambda path: path.write_bytes(path.read_bytes()[:-10]),
    "missing": lambda path: path.unlink(),
}


@pytest.mark.parametrize("damage", BROKEN.values(), ids=BROKEN)
def test_a_damaged_file_is_named(folder: Path, damage: Callable[[Path], object]) -> None:
    damage(folder / "0" / "ct.npy")
    with pytest.raises(DataError, match=f"^{folder / '0'}: .*") as caught:
        opened(folder).read_block(0)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dtype", ["U3", "complex64", "datetime64[s]"])
def test_targets_that_are_no_numbers(folder: Path, dtype: str) -> None:
    np.save(folder / "0" / "numbers.npy", np.array([1, 2], "i8").astype(dtype))
    with pytest.raises(DataError, match=r"'numbers', sample 0 of 'train' holds .*; numbers are"):
        opened(folder).target(0)


def test_labels_beyond_63_bits(folder: Path) -> None:
    np.save(folder / "0" / "labels.npy", np.full(SHAPE[1:], 2**64 - 255, "uint64"))
    with pytest.raises(DataError, match=r"'labels', .*: labels are integers of up to 63 bits"):
        opened(folder, label="labels").read_labels(0)


@pytest.mark.parametrize(
    "given",
    [np.zeros((1, 1, 5, 6), "f4"), np.zeros(SHAPE[1:], "f4"), np.float32(0), None, "text"],
    ids=["a plane", "no channels", "a number", "None", "text"],
)
@pytest.mark.parametrize("stored", [False, True])
def test_another_shape_than_was_asked_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch, given: Any, stored: bool
) -> None:
    monkeypatch.setattr(Unasked, "given", given)
    data = opened(folder, "unasked")
    read = partial(data.read_stored, 0, None, torch.empty(SHAPE)) if stored else data.read_block
    with pytest.raises(DataError, match=r"was read where \(1, 4, 5, 6\) was asked for"):
        read(*(() if stored else (0,)))


def test_an_array_that_gives_another_shape(folder: Path) -> None:
    class Short:
        shape, dtype, ndim = SHAPE, np.dtype("f4"), 4

        def __getitem__(self, window: tuple[slice, ...]) -> npt.NDArray[Any]:
            return np.zeros((1, 1, 5, 6), "f4")

    file = NumpyFolder(folder / "0")
    with pytest.raises(ValueError, match=r"\(1, 1, 5, 6\) was read where \(1, 4, 5, 6\)"):
        file.read(Short(), (slice(None),) * 4, np.empty(SHAPE, "f4"))


@pytest.mark.parametrize(("name", "said"), [("class", "<class 'int'>"), ("module", "<module")])
def test_what_is_no_format(folder: Path, name: str, said: str) -> None:
    with pytest.raises(UsageError, match=f"format '{name}' is {said}.*no subclass of"):
        opened(folder, name)


def test_verifying(folder: Path) -> None:
    opened(folder)
    assert verify_dataset(folder) == []
    with pytest.raises(UsageError, match="format 'none' is none of hdf5"):
        opened(folder, "none")
    with pytest.raises(UsageError, match="format 'none' is none of hdf5"):
        verify_dataset(folder)
    (folder / "0").rename(folder / "1")
    opened(folder)
    (fault,) = verify_dataset(folder)
    assert fault == f"{folder / '0'}: No such file or directory"


def test_no_driver(folder: Path) -> None:
    opened(folder)
    with pytest.raises(UsageError, match="can't be read through a driver"):
        ShardDataset(folder, driver=lambda _: io.BytesIO()).read_block(0)


def test_damage_is_a_bad_sample_that_may_be_skipped(folder: Path) -> None:
    class Damaged(NumpyFolder):
        def read(self, *_: Any) -> npt.NDArray[Any]:
            raise ValueError("checksum of chunk 3")

    data = opened(folder)
    data._files._format = Damaged
    with pytest.raises(BadSample, match="'ct', sample 0 of 'train': damaged: checksum of chunk 3"):
        data.read_block(0)
