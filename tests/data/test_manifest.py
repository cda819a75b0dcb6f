"""Tests of the manifest: it loads as it was saved, and damage of both versions is refused."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pydist._loader import native
from pydist.data import Manifest
from pydist.data.file_table import FileTable
from pydist.data.manifest import DataFile
from pydist.errors import DataError
from support.data.damage import flip

EXAMPLE = Manifest(
    sample_shape=(4, 8, 9, 10),
    axes="DHWC",
    dtype="int16",
    files=(
        DataFile("a/b.hdf5", "train", 1234, "00ff00ff", ((0, 0, 0), (0, 8, 0)), (1.0, 0.1 + 0.2)),
        DataFile("c.hdf5", "val", 99, "", ((8, 0, 0),), extents=(5, 6, 7)),
        DataFile("\u00e9/\udcff.hdf5", "train", 1 << 40, "crc32c:0a00ff00", ((1, 2, 3),), (-0.5,)),
    ),
    target_names=("x", "y"),
    channel_names=("z=0",),
    log1p_mean=(0.1, 0.2, 0.3, 0.4),
    log1p_std=(1.0, 1.0, 1.0, 1.0),
    origin={"kind": "test"},
)

VERSION_1: dict[str, Any] = {
    "format": "pydist-dataset",
    "version": 1,
    "sample_shape": [4, 8, 9, 10],
    "axes": "DHWC",
    "dtype": "int16",
    "dataset": "full",
    "target": "unitPar",
    "target_names": ["x", "y"],
    "channel_names": ["z=0"],
    "splits": {"train": 3, "val": 1},
    "log1p_mean": [0.1, 0.2, 0.3, 0.4],
    "log1p_std": [1, 1, 1, 1],
    "intensity": [],
    "origin": {"kind": "test"},
    "files": [
        {
            "path": "a/b.hdf5", "split": "train", "bytes": 1234, "crc32": "00ff00ff",
            "offsets": [[0, 0, 0], [0, 8, 0]], "means": [1.0, 0.1 + 0.2], "extents": None,
        },
        {
            "path": "c.hdf5", "split": "val", "bytes": 99, "crc32": "",
            "offsets": [[8, 0, 0]], "means": [], "extents": [5, 6, 7],
        },
        {
            "path": "\u00e9/\udcff.hdf5", "split": "train", "bytes": 1 << 40,
            "crc32": "crc32c:0a00ff00", "offsets": [[1, 2, 3]], "means": [-0.5],
        },
    ],
}  # fmt: skip


def test_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    given = EXAMPLE.files[:]
    EXAMPLE.save(tmp_path)
    loaded = Manifest.load(str(tmp_path))
    assert loaded == EXAMPLE
    assert loaded.digest == EXAMPLE.digest
    assert loaded.splits == {"train": 3, "val": 1}
    assert tuple(loaded.files) == given
    assert isinstance(loaded.table._files.base.base, np.memmap), "the table is not mapped"
    assert pickle.loads(pickle.dumps(loaded)) == copy.deepcopy(EXAMPLE) == EXAMPLE


def test_version_1_has_the_same_content(tmp_path: Path) -> None:
    (tmp_path / "dataset.json").write_text(json.dumps(VERSION_1))
    loaded = Manifest.load(tmp_path)
    assert loaded == EXAMPLE
    assert loaded.digest == EXAMPLE.digest


def test_samples_of_a_split_in_the_order_of_the_files(tmp_path: Path) -> None:
    EXAMPLE.save(tmp_path)
    table = Manifest.load(tmp_path).table
    train = [table.sample(number) for number in table.samples_of("train")]
    first, _, last = EXAMPLE.files
    assert [(s.file, s.offset, s.mean) for s in train] == [
        (first, (0, 0, 0), 1.0), (first, (0, 8, 0), 0.1 + 0.2), (last, (1, 2, 3), -0.5),
    ]  # fmt: skip
    (val,) = table.samples_of("val")
    assert (table.sample(val).mean, table.sample(val).file.extents) == (1.0, (5, 6, 7))
    assert len(table.samples_of("other")) == 0
    assert not table.has_means
    assert [FileTable.of(EXAMPLE.files[k:]).has_means for k in (2, 1)] == [True, False]


def test_a_new_manifest_replaces_the_old_one_with_its_table(tmp_path: Path) -> None:
    EXAMPLE.save(tmp_path)
    (tmp_path / "dataset-mine.index").mkdir()  # not a name that save gives
    other = dataclasses.replace(EXAMPLE, files=EXAMPLE.files[:1])
    other.save(tmp_path)
    assert Manifest.load(tmp_path) == other
    table = tmp_path / json.loads((tmp_path / "dataset.json").read_text())["files"]
    before = table.stat().st_ino
    dataclasses.replace(other, class_names=("a", "b")).save(tmp_path)
    assert [*tmp_path.glob("dataset-????????????????.index")] == [table]
    assert len([*tmp_path.iterdir()]) == 3
    assert table.stat().st_ino == before, "a table that is in use was replaced"
    (table / "part-00000.pack").write_bytes(b"damage")
    other.save(tmp_path)
    assert Manifest.load(tmp_path) == other
    shutil.rmtree(table)
    with pytest.raises(DataError, match=r"dataset-[0-9a-f]{16}\.index.*: No such file"):
        Manifest.load(tmp_path)


def test_a_reader_of_the_old_manifest_opens_its_table_after_a_save(tmp_path: Path) -> None:
    EXAMPLE.save(tmp_path)
    text = (tmp_path / "dataset.json").read_text()
    others = [dataclasses.replace(EXAMPLE, files=EXAMPLE.files[:count]) for count in (1, 2)]
    others[0].save(tmp_path)
    assert Manifest.loads(text, "dataset.json", tmp_path) == EXAMPLE
    others[1].save(tmp_path)
    assert len([*tmp_path.glob("*.index")]) == 2
    with pytest.raises(DataError, match="No such file"):
        Manifest.loads(text, "dataset.json", tmp_path)


def test_a_writer_that_dies_leaves_the_old_manifest_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before and after each renaming; what is left does not hinder the next writer."""
    other = dataclasses.replace(EXAMPLE, files=EXAMPLE.files[:1])
    rename, left = Path.replace, []
    for at in range(4):
        folder = tmp_path / str(at)
        folder.mkdir()
        EXAMPLE.save(folder)
        steps = iter(range(10))

        def replace(path: Path, target: Path, at: int = at, steps: Any = steps) -> Path:
            if next(steps) == at:
                raise KeyboardInterrupt
            found = rename(path, target)
            if next(steps) == at:
                raise KeyboardInterrupt
            return found

        with monkeypatch.context() as patch:
            patch.setattr(Path, "replace", replace)
            with pytest.raises(KeyboardInterrupt):
                other.save(folder)
        left.append(len(Manifest.load(folder).files))
        other.save(folder)
        other.save(folder)
        assert Manifest.load(folder) == other
        assert len([*folder.iterdir()]) == 2
    assert left == [3, 3, 3, 1]


def tables(root: Path) -> tuple[Path, bytearray]:
    (path,) = root.glob("dataset-*.index/part-00000.pack")
    return path, bytearray(path.read_bytes())


def test_a_damaged_bit_of_the_table_is_found(tmp_path: Path) -> None:
    EXAMPLE.save(tmp_path)
    path, content = tables(tmp_path)
    for at in (70, len(content) - 1):
        flip(path, at)
        with pytest.raises(DataError, match="does not match its checksum") as caught:
            Manifest.load(tmp_path)
        assert str(path.parent) in str(caught.value)
        flip(path, at)
    path.write_bytes(content[:-1])
    with pytest.raises(DataError, match=f"it has {len(content) - 1} bytes of {len(content)}"):
        Manifest.load(tmp_path)


def edited(name: str, row: int, value: Any) -> Callable[[FileTable], None]:
    def edit(table: FileTable) -> None:
        column = table._samples if name in ("mean", "offset") else table._files
        column[name][row] = value

    return edit


def with_path(text: bytes) -> Callable[[FileTable], None]:
    """Replaces the start of the first path, a/b.hdf5."""

    def edit(table: FileTable) -> None:
        table._paths = table._paths.copy()
        table._paths[: len(text)] = np.frombuffer(text, "u1")

    return edit


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (edited("path_end", 0, 1 << 63), "column path_end does not divide"),
        (edited("path_end", 2, 1000), "column path_end does not divide"),
        (edited("sample_end", 0, 4), "column sample_end does not divide"),
        (edited("sample_end", 2, 3), "column sample_end does not divide"),
        (edited("split", 1, 2), "row 1 has an impossible split"),
        (edited("checksum", 2, 3), "row 2 has an impossible checksum"),
        (edited("bytes", 0, 1 << 63), "row 0 has an impossible bytes"),
        (edited("extents", 1, (5, 0, 7)), "row 1 has an impossible extents"),
        (edited("extents", 1, 1 << 31), "row 1 has an impossible extents"),
        (edited("offset", 3, 1 << 31), "row 3 has an impossible offset"),
        (edited("mean", 0, np.inf), "row 0 has an impossible mean"),
        (with_path(b"../x"), r"path '\.\./xhdf5|path '\.\./x"),
        (with_path(b"/etc"), "leads out of"),
        (with_path(b"a\0b"), "leads out of"),
    ],
)
def test_an_impossible_table_is_refused(
    tmp_path: Path, damage: Callable[[FileTable], None], message: str
) -> None:
    """Its checksums are right, as those of a file that was made to deceive."""
    table = FileTable.of(EXAMPLE.files)
    damage(table)
    table.save(tmp_path / "dataset-0123456789abcdef.index")
    record = {**VERSION_1, "version": 2, "files": "dataset-0123456789abcdef.index"}
    (tmp_path / "dataset.json").write_text(json.dumps(record))
    with pytest.raises(DataError, match=message) as caught:
        [*Manifest.load(tmp_path).files]
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"files": "../dataset-0123456789abcdef.index"}, "files = '../dataset-"),
        ({"files": "/tmp"}, "files = '/tmp'"),
        ({"files": []}, r"files = \[\]"),
        ({"splits": [3]}, r"splits = \[3\]"),
        ({"splits": {"train": 4}}, "row 1 has an impossible split"),
    ],
)
def test_what_version_2_can_not_name(tmp_path: Path, entries: Any, message: str) -> None:
    EXAMPLE.save(tmp_path)
    path = tmp_path / "dataset.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))
    with pytest.raises(DataError, match=message):
        Manifest.load(tmp_path)


def test_a_table_that_lacks_a_column(tmp_path: Path) -> None:
    EXAMPLE.save(tmp_path)
    (folder,) = tmp_path.glob("dataset-*.index")
    shutil.rmtree(folder)
    folder.mkdir()
    writer = native.PartitionWriter(bytes(folder / native.partition_name(0)), 0, bytes(16))
    index = native.IndexWriter(0o755, 0)
    index.store(index.add(0, b"files", False, 0o644, 0), writer.append_bytes(bytes(43), "raw"))
    (folder / native.PACK_INDEX).write_bytes(index.content(bytes(16), [writer.finish()], "{}"))
    with pytest.raises(DataError, match="no table of files"):
        Manifest.load(tmp_path)


def test_digest_tells_data_sets_apart() -> None:
    other = dataclasses.replace(EXAMPLE, dtype="float32")
    assert other.digest != EXAMPLE.digest


def changed(**entries: Any) -> Callable[[dict[str, Any]], None]:
    return lambda record: record.update(entries)


def in_file(**entries: Any) -> Callable[[dict[str, Any]], None]:
    return lambda record: record["files"][0].update(entries)


@pytest.mark.parametrize("spelling", ["<f4", ">f4", "f4", "float32", "single"])
def test_a_type_has_one_name(spelling: str) -> None:
    """`getattr(torch, manifest.dtype)` needs it."""
    text = dataclasses.replace(EXAMPLE, dtype=spelling).dumps()
    assert Manifest.loads(text, "test").dtype == "float32"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (changed(format="other"), "not a data set manifest"),
        (changed(version=3), "version 3; this pydist reads versions 1 and 2"),
        (lambda record: record.pop("files"), "no entry 'files'"),
        (changed(sample_shape=[4, 8, 8]), r"sample_shape\.3"),
        (changed(sample_shape=[4, 8, 8, -1]), r"sample_shape\.3 = -1: input should be greater"),
        (changed(sample_shape=[4, 8, 8, 1 << 40]), "1099511627776: input should be less than"),
        (changed(axes="WHDC"), "axes = 'WHDC': input should be 'CDHW', 'DHWC', 'CHW'"),
        (changed(files=3), "files = 3: input should be a valid list"),
        (changed(log1p_mean=[float("nan")]), r"log1p_mean\.0 = nan: .*finite"),
        (in_file(path="../../etc/passwd"), r"files.* leads out of"),
        (in_file(path="/etc/passwd"), "leads out of"),
        (in_file(offsets=[[0, 0]]), "damaged"),
        (in_file(offsets=[[0, 0, -3]]), "-3: input should be greater than or equal to 0"),
        (in_file(means=[1.0]), "1 means for 2 samples"),
        (in_file(crc32="12"), "checksum '12'"),
        (changed(dtype=[1]), r"dtype = \[1\]"),
        (changed(dtype="f4,i4"), "dtype = 'f4,i4'"),
        (changed(dtype="banana"), "damaged"),
        (changed(sample_shape=[True, 8, 8, 8]), r"sample_shape\.0 = True"),
        (changed(dataset="a\0b"), r"dataset = 'a\\x00b': a text without NUL"),
        (in_file(path="a\0b"), "a text without NUL"),
        (in_file(path="a\ud800b"), "damaged"),
        (in_file(offsets=[[0, 0, 1.5], [0, 0, 0]]), r"1\.5: input should be a valid integer"),
        (in_file(offsets=[[0, 0, 1 << 70], [0, 0, 0]]), "damaged"),
        (in_file(bytes="many"), "'many': input should be a valid integer"),
        (in_file(path="./c.hdf5"), "file 'c.hdf5' is listed more than once"),
        (
            changed(intensity=[{"lower": 2, "upper": 1, "mean": 0, "std": 1}]),
            r"intensity\.0 .*lower is above upper",
        ),
    ],
)
def test_damage_is_named(tmp_path: Path, damage: Callable[[Any], None], message: str) -> None:
    path = tmp_path / "dataset.json"
    record = copy.deepcopy(VERSION_1)
    damage(record)
    path.write_text(json.dumps(record))
    with pytest.raises(DataError, match=message) as caught:
        Manifest.load(tmp_path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_byte_order_mark_is_no_damage(tmp_path: Path) -> None:
    (tmp_path / "dataset.json").write_text(json.dumps(VERSION_1), encoding="utf-8-sig")
    assert Manifest.load(tmp_path) == EXAMPLE


def test_missing_manifest_says_what_is_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no dataset\.json in it; it has nothing"):
        Manifest.load(tmp_path)
    (tmp_path / "readme").touch()
    with pytest.raises(DataError, match="it has readme"):
        Manifest.load(tmp_path)
    with pytest.raises(DataError, match="no such folder"):
        Manifest.load(tmp_path / "nowhere")
    (tmp_path / "dataset.json").write_text("{")
    with pytest.raises(DataError, match="not JSON"):
        Manifest.load(tmp_path)
