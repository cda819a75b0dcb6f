"""Tests of folders of NumPy files: any box, nothing unpickled, each fault in one line."""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.lib import format as npy

from pydist.data import ShardDataset
from pydist.data.formats import Storage
from pydist.data.manifest import DataFile, Manifest
from pydist.data.numpy_file import NumpyFolder, read_array
from pydist.errors import DataError
from support.data.reading import refusal_of

VALUES = np.arange(2 * 4 * 5 * 6, dtype="int16").reshape(2, 4, 5, 6)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    NumpyFolder.write(tmp_path / "a", {"full": VALUES, "t": np.zeros(2)}, {"k": "v"}, Storage())
    return tmp_path / "a"


def refusal(folder: Path, name: str = "full", **options: Any) -> str:
    return refusal_of(lambda: NumpyFolder.open(folder, **options).dataset(name), folder)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_any_box_equals_that_of_the_whole(folder: Path, data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(["<i2", ">i4", "<f4", ">f8", "u1", "<f2", "?"]))
    order = data.draw(st.sampled_from("CF"))
    shape = data.draw(st.tuples(*[st.integers(0, 5)] * 4))
    values = np.random.default_rng(0).integers(0, 9, shape).astype(dtype, order=order)
    np.save(folder / "x.npy", values)
    box = []
    for extent in shape:
        lo = data.draw(st.integers(0, extent))
        box.append(slice(lo, data.draw(st.integers(lo, extent))))
    file = NumpyFolder.open(folder)
    array = file.dataset("x")
    assert array.shape == shape
    found = file.read(array, tuple(box))
    np.testing.assert_array_equal(found, values[tuple(box)])
    assert not isinstance(found, np.memmap), "the file may be closed, and change"
    out = np.empty(found.shape, dtype)
    assert file.read(array, tuple(box), out) is out
    np.testing.assert_array_equal(out, found)


def test_data_set(folder: Path) -> None:
    files = (DataFile("a", "train", 0, "", ((0, 1, 0), (0, 1, 2))),)
    Manifest((2, 3, 2, 3), "CDHW", "int16", files, target="t", target_names=("a", "b"),
             file_format="numpy").save(folder.parent)  # fmt: skip
    data = ShardDataset(folder.parent)
    assert torch.equal(data.read_block(1), torch.from_numpy(VALUES[:, :3, 1:3, 2:5].astype("f4")))
    assert data.target(0).tolist() == [0, 0]
    (folder / "full.npy").write_bytes((folder / "full.npy").read_bytes()[:-2])
    with pytest.raises(DataError, match=r"full\.npy: shrank from"):
        data.read_block(0)


def test_texts(folder: Path) -> None:
    assert NumpyFolder.open(folder).texts() == {"k": "v"}
    (folder / "texts.json").write_text("{")
    with pytest.raises(DataError, match=r"texts\.json: not JSON"):
        NumpyFolder.open(folder).texts()
    (folder / "texts.json").unlink()
    assert NumpyFolder.open(folder).texts() == {}


class Bomb:
    """Object that leaves a trace if it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.trace,)


def header(**entries: Any) -> bytes:
    """Returns a file with any header."""
    text = repr({"descr": "<i2", "fortran_order": False, "shape": (4,), **entries}).encode()
    return npy.magic(1, 0) + len(text).to_bytes(2, "little") + text + bytes(100)


def nested(depth: int) -> bytes:
    """Returns a file whose header exceeds the stack of Python's parser."""
    return npy.magic(1, 0) + (depth + 1).to_bytes(2, "little") + b"-" * depth + b"1" + bytes(100)


def test_nothing_is_unpickled(folder: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    np.save(folder / "full.npy", np.array([Bomb(trace)], dtype=object), allow_pickle=True)
    trace.unlink(missing_ok=True)
    assert "holds object; real numbers of up to 8 bytes" in refusal(folder)
    (folder / "full.npy").write_bytes(pickle.dumps(Bomb(trace)))
    assert "damaged, or not NumPy's" in refusal(folder)
    assert not trace.exists()


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "damaged"),
        (b"\x93NUMPY\x01", "damaged"),
        (npy.magic(3, 0) + header()[8:], r"version (3, 0); 1.0 and 2.0"),
        (header(shape=(1 << 40, 1 << 40)), "cut short"),
        (header(shape=(1 << 32, 1 << 32)), "cut short"),
        (header(shape=(-4,)), "cut short"),
        (header(shape=(51,)), "cut short: "),
        (header(descr="<c8"), "holds complex64"),
        (header(descr="<U4"), "holds <U4"),
        (header(descr=[("a", "<i2")]), "holds [('a'"),
        (header(descr="|O"), "holds object"),
        (header(descr="__import__('os')"), "damaged"),
        (header(shape="abc"), "damaged"),
        (header(x="(" * 5000), "damaged"),
        (nested(3500), "damaged"),
        (nested(9000), "damaged"),
    ],
)
def test_headers_that_are_refused(folder: Path, content: bytes, why: str) -> None:
    (folder / "full.npy").write_bytes(content)
    assert why in refusal(folder)
    with pytest.raises(DataError, match=re.escape(why)):
        read_array(folder / "full.npy")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_mutated_files_end_in_one_line(folder: Path, data: st.DataObject) -> None:
    before = (folder / "full.npy").read_bytes()
    image = bytearray(before[: data.draw(st.integers(0, len(before)))])
    for position in data.draw(st.lists(st.integers(0, 140), max_size=3)):
        if position < len(image):
            image[position] ^= data.draw(st.integers(1, 255))
    (folder / "mutated.npy").write_bytes(image)
    try:
        file = NumpyFolder.open(folder)
        array = file.dataset("mutated")
        assert file.read(array, ()).shape == array.shape
    except DataError as error:
        assert "\n" not in str(error)  # noqa: PT017 - it may also be right


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("../a/full", "leads out of it"),
        ("fulll", "no array 'fulll'; it has full, t"),
        ("pipe", "not a regular file"),
    ],
)
def test_names(folder: Path, name: str, why: str) -> None:
    os.mkfifo(folder / "pipe.npy")
    (folder / "pipe.npy").rename(folder / "x")
    if name == "pipe":
        (folder / "x").rename(folder / "pipe.npy")
    assert why in refusal(folder, name)


def test_a_link_out_of_the_folder(folder: Path, tmp_path: Path) -> None:
    (folder / "full.npy").rename(tmp_path / "full.npy")
    (folder / "full.npy").symlink_to("../full.npy")
    assert "outside allow_roots (none)" in refusal(folder)
    file = NumpyFolder.open(folder, [tmp_path])
    np.testing.assert_array_equal(file.read(file.dataset("full"), ()), VALUES)


@pytest.mark.parametrize(
    "change", [lambda p: p.unlink(), lambda p: p.write_bytes(p.read_bytes()[:200])]
)
def test_a_mapped_file_that_shrinks(folder: Path, change: Callable[[Path], object]) -> None:
    """Reading lost memory would end the process with a signal."""
    file = NumpyFolder.open(folder)
    array = file.dataset("full")
    change(folder / "full.npy")
    with pytest.raises(DataError, match=r"full\.npy: (lost|shrank)"):
        file.read(array, ())


def test_what_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="file: not a folder"):
        NumpyFolder.open(tmp_path / "file")
    with pytest.raises(DataError, match="none: no such folder"):
        NumpyFolder.open(tmp_path / "none")
