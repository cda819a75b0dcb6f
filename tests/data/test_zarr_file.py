"""Tests that blocks of Zarr arrays equal those of the whole, and read only chunks they meet."""

from __future__ import annotations

import io
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

zarr = pytest.importorskip("zarr")

from zarr.codecs import BloscCodec, BytesCodec, GzipCodec, TransposeCodec, ZstdCodec  # noqa: E402

from pydist.data import BadSample, Manifest, ShardDataset  # noqa: E402
from pydist.data.formats import Storage  # noqa: E402
from pydist.data.manifest import DataFile  # noqa: E402
from pydist.data.zarr_file import ZarrFile  # noqa: E402
from pydist.data.zarr_store import ChunkStore  # noqa: E402
from pydist.errors import DataError, UsageError  # noqa: E402
from pydist.partition import Box  # noqa: E402

COMPRESSORS = {
    "none": (),
    "gzip": (GzipCodec(level=1),),
    "zstd": (ZstdCodec(level=1),),
    "zstd with checksums": (ZstdCodec(level=1, checksum=True), zarr.codecs.Crc32cCodec()),
    "checksums before zstd": (zarr.codecs.Crc32cCodec(), ZstdCodec(level=1)),
    "blosc": (BloscCodec(cname="lz4", clevel=1, shuffle="shuffle", typesize=2),),
}
DTYPES = ("int8", "uint16", "int32", "float32", "float64", "float16", "uint64")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("zarr")


@st.composite
def arrays(draw: st.DrawFn) -> dict[str, Any]:
    """Draws the arguments of an array that the zarr package writes, and a box in it."""
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=4, max_size=4)))
    chunks = tuple(draw(st.integers(1, n + 2)) for n in shape)
    sharded = draw(st.booleans())
    box = []
    for extent in shape:
        lo = draw(st.integers(0, extent))
        box.append(slice(lo, draw(st.integers(lo, extent))))
    return {
        "shape": shape,
        "chunks": chunks,
        "shards": tuple(c * draw(st.integers(1, 3)) for c in chunks) if sharded else None,
        "dtype": draw(st.sampled_from(DTYPES)),
        "compressors": COMPRESSORS[draw(st.sampled_from(sorted(COMPRESSORS)))],
        "filters": (TransposeCodec(order=(3, 0, 2, 1)),) if draw(st.booleans()) else (),
        "serializer": BytesCodec(endian=draw(st.sampled_from(["little", "big"]))),
        "chunk_key_encoding": {"name": draw(st.sampled_from(["default", "v2"]))},
        "fill_value": draw(st.sampled_from([0, 7])),
        "box": tuple(box),
        "empty": draw(st.booleans()),
    }


@settings(deadline=None)
@given(wanted=arrays())
def test_any_box_of_any_array_equals_that_of_the_whole(
    folder: Path, wanted: dict[str, Any]
) -> None:
    box, empty = wanted.pop("box"), wanted.pop("empty")
    values = np.random.default_rng(1).integers(0, 4, wanted["shape"]).astype(wanted["dtype"])
    if empty:  # then zarr leaves out chunks that hold the fill value alone
        values[:, : values.shape[1] // 2] = wanted["fill_value"]
    path = folder / "array.zarr"
    theirs = zarr.create_group(path, overwrite=True).create_array("full", **wanted)
    theirs[...] = values
    file = ZarrFile.open(path)
    array = file.dataset("full")
    assert (array.shape, array.dtype, array.ndim) == (values.shape, values.dtype, 4)
    out = np.full(values[box].shape, 77, values.dtype)
    if out.size:
        assert file.read(array, box, out) is out
        np.testing.assert_array_equal(out, values[box])
    np.testing.assert_array_equal(file.read(array, box), theirs[box])
    np.testing.assert_array_equal(file.read(array, ()), values)
    assert file.change() is None


COUNTED = np.arange(2 * 9 * 7 * 8, dtype="int32").reshape(2, 9, 7, 8)
STORAGES = [Storage((2, 3, 4)), Storage((2, 3, 4), (4, 6, 4))]


@pytest.fixture(scope="module")
def counted(folder: Path) -> Path:
    for number, storage in enumerate(STORAGES):
        ZarrFile.write(folder / f"{number}.zarr", {"full": COUNTED}, {}, storage)
    return folder


@settings(deadline=None)
@given(data=st.data(), sharded=st.sampled_from([0, 1]))
def test_only_chunks_that_the_box_meets_are_read(
    counted: Path, data: st.DataObject, sharded: int
) -> None:
    shape, values, path = COUNTED.shape, COUNTED, counted / f"{sharded}.zarr"
    chunks, shards = STORAGES[sharded].of(shape)
    box = []
    for extent in shape:
        lo = data.draw(st.integers(0, extent - 1))
        box.append(slice(lo, data.draw(st.integers(lo + 1, extent))))
    reads: list[tuple[str, int]] = []
    real: Callable[..., Any] = ChunkStore.read

    def noted(store: ChunkStore, key: str, byte_range: Any) -> Any:
        found = real(store, key, byte_range)
        reads.append((key, len(found)))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ChunkStore, "read", noted)
        file = ZarrFile.open(path)
        np.testing.assert_array_equal(
            file.read(file.dataset("full"), tuple(box)), values[tuple(box)]
        )
    met = _met(box, shards or chunks)
    assert {key for key, _ in reads} == {f"c/{'/'.join(map(str, place))}" for place in met}
    chunk_bytes = int(np.prod(chunks)) * 4
    if not sharded:
        assert sorted(reads) == sorted((key, chunk_bytes) for key, _ in reads)
        return
    index = 16 * int(np.prod([s // c for s, c in zip(shards, chunks, strict=True)])) + 4
    assert sum(n for _, n in reads) == len(_met(box, chunks)) * chunk_bytes + len(met) * index


def _met(box: list[slice], extents: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Returns the places of the chunks that a box meets."""
    axes = (range(b.start // n, -(-b.stop // n)) for b, n in zip(box, extents, strict=True))
    return list(itertools.product(*axes))


def dataset(root: Path, values: np.ndarray, storage: Storage, **more: Any) -> ShardDataset:
    """Writes a data set of one sample with labels, and opens it."""
    labels = np.broadcast_to(np.arange(values.shape[3], dtype="uint8") % 3, values.shape[1:])
    ZarrFile.write(
        root / "0.zarr", {"ct": values, "label": labels, "t": np.array([1.5])}, {}, storage
    )
    files = (DataFile("0.zarr", "train", 0, "", ((0, 0, 0),)),)
    Manifest(
        values.shape, "CDHW", values.dtype.name, files, dataset="ct", label="label",
        class_names=("a", "b", "c"), file_format="zarr", **more,
    ).save(root)  # fmt: skip
    return ShardDataset(root)


@pytest.mark.parametrize("dtype", ["int16", "uint32", "float32"])
def test_data_set_with_labels(tmp_path: Path, dtype: str) -> None:
    values = np.arange(2 * 5 * 6 * 7).reshape(2, 5, 6, 7).astype(dtype)
    data = dataset(tmp_path, values, Storage((2, 2, 3), (4, 4, 6), "zstd"))
    box = Box((0, 1, 2, 0), (2, 5, 4, 7))
    assert torch.equal(data.read_block(0, box), torch.from_numpy(values[:, 1:5, 2:4].astype("f4")))
    stored = torch.empty((2, 4, 2, 7), dtype=data.stored_dtype)
    data.read_stored(0, box, stored)
    np.testing.assert_array_equal(stored.numpy(), values[:, 1:5, 2:4])
    assert data.read_labels(0)[0, 0].tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert data.bytes_read > 0


def test_a_chunk_lost_from_an_array_that_pydist_wrote(tmp_path: Path) -> None:
    """Zarr itself returns the fill value for it."""
    data = dataset(tmp_path, np.ones((1, 4, 4, 4), "int16"), Storage((2, 4, 4)))
    (tmp_path / "0.zarr/ct/c/0/1/0/0").unlink()
    assert data.read_block(0, Box((0, 0, 0, 0), (1, 2, 4, 4))).sum() == 32
    with pytest.raises(BadSample, match=r"0\.zarr: 'ct', sample 0 .*: chunk c/0/1/0/0 is missing"):
        data.read_block(0)


@pytest.mark.parametrize("compression", ["none", "gzip", "zstd", "blosc"])
@pytest.mark.parametrize("shards", [(), (4, 4, 4)])
@pytest.mark.parametrize("left", [0, 1, 30, -1])
def test_a_chunk_that_was_cut_short(
    tmp_path: Path, compression: Any, shards: tuple[int, ...], left: int
) -> None:
    values = np.random.default_rng(0).integers(0, 99, (1, 4, 4, 4)).astype("int16")
    data = dataset(tmp_path, values, Storage((4, 4, 4), shards, compression))
    (chunk,) = (p for p in (tmp_path / "0.zarr/ct/c").rglob("*") if p.is_file())
    chunk.write_bytes(chunk.read_bytes()[:left])
    with pytest.raises(BadSample, match=r"0\.zarr: 'ct', sample 0 of 'train': damaged: ") as caught:
        data.read_block(0)
    assert "\n" not in str(caught.value)


def test_metadata_that_change_while_the_file_is_open(tmp_path: Path) -> None:
    data = dataset(tmp_path, np.ones((1, 4, 4, 4), "int16"), Storage())
    data.read_block(0)
    metadata = tmp_path / "0.zarr/ct/zarr.json"
    metadata.write_text(metadata.read_text() + " ")
    with pytest.raises(DataError, match=r"zarr\.json: grew from"):
        data.read_block(0)


def test_texts_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "a.zarr"
    ZarrFile.write(path, {"x": np.arange(3)}, {"ü": "a\nb"}, Storage())
    assert ZarrFile.open(path).texts() == {"ü": "a\nb"}
    assert dict(zarr.open_group(path, mode="r").attrs) == {"ü": "a\nb"}
    assert ZarrFile.open(path / "x").texts() == {}


def test_what_is_no_zarr_folder(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    zarr.create_group(tmp_path / "old", zarr_format=2).create_array("x", shape=(2,), dtype="i4")
    with pytest.raises(DataError, match="file: not a folder"):
        ZarrFile.open(tmp_path / "file")
    with pytest.raises(DataError, match="none: no such folder"):
        ZarrFile.open(tmp_path / "none")
    with pytest.raises(DataError, match="old: of Zarr version 2; version 3 is read"):
        ZarrFile.open(tmp_path / "old")
    with pytest.raises(DataError, match="no array 'x'; it has nothing"):
        ZarrFile.open(tmp_path / "empty").dataset("x")
    with pytest.raises(UsageError, match="can't be read through a driver"):
        ZarrFile.open(tmp_path / "empty", (), io.BytesIO())


def test_without_the_zarr_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "zarr.buffer", None)
    with pytest.raises(UsageError, match=r"need zarr 3\.1 .*pip install 'pydist\[zarr\]'"):
        ZarrFile.open(tmp_path)
