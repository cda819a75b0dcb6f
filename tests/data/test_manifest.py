"""Tests of the manifest: it loads as it was saved, and damage is refused by name."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pydist.data import Manifest
from pydist.data.manifest import DataFile
from pydist.errors import DataError

EXAMPLE = Manifest(
    sample_shape=(4, 8, 9, 10),
    axes="DHWC",
    dtype="int16",
    files=(
        DataFile("a/b.hdf5", "train", 1234, "00ff00ff", ((0, 0, 0), (0, 8, 0)), (1.0, 0.1 + 0.2)),
        DataFile("c.hdf5", "val", 99, "", ((8, 0, 0),)),
    ),
    target_names=("x", "y"),
    channel_names=("z=0",),
    log1p_mean=(0.1, 0.2, 0.3, 0.4),
    log1p_std=(1.0, 1.0, 1.0, 1.0),
    origin={"kind": "test"},
)


def test_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    EXAMPLE.save(tmp_path)
    loaded = Manifest.load(tmp_path)
    assert loaded == EXAMPLE
    assert loaded.digest == EXAMPLE.digest
    assert loaded.splits == {"train": 2, "val": 1}


def test_digest_tells_data_sets_apart() -> None:
    other = dataclasses.replace(EXAMPLE, dtype="float32")
    assert other.digest != EXAMPLE.digest


def changed(**entries: Any) -> Callable[[dict[str, Any]], None]:
    return lambda record: record.update(entries)


def in_file(**entries: Any) -> Callable[[dict[str, Any]], None]:
    return lambda record: record["files"][0].update(entries)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (changed(format="other"), "not a data set manifest"),
        (changed(version=2), "version 2; this pydist reads version 1"),
        (lambda record: record.pop("files"), "KeyError 'files'"),
        (changed(sample_shape=[4, 8, 8]), "damaged"),
        (changed(sample_shape=[4, 8, 8, -1]), "extent -1"),
        (changed(sample_shape=[4, 8, 8, 1 << 40]), "extent"),
        (changed(axes="WHDC"), "axes 'WHDC'"),
        (changed(files=3), "TypeError"),
        (changed(log1p_mean=[float("nan")]), "statistics"),
        (in_file(path="../../etc/passwd"), "leads out of"),
        (in_file(path="/etc/passwd"), "leads out of"),
        (in_file(offsets=[[0, 0]]), "damaged"),
        (in_file(offsets=[[0, 0, -3]]), "offset"),
        (in_file(means=[1.0]), "1 means for 2 samples"),
        (changed(dtype=[1]), r"dtype \[1\]"),
        (changed(dtype="f4,i4"), "dtype 'f4,i4'"),
        (changed(dtype="banana"), "damaged"),
        (changed(sample_shape=[True, 8, 8, 8]), "extent True"),
        (changed(dataset="a\0b"), "name 'a"),
        (in_file(path="a\0b"), "name 'a"),
        (in_file(path="a\ud800b"), "damaged"),
        (in_file(offsets=[[0, 0, 1.5], [0, 0, 0]]), "offset 1.5"),
        (in_file(offsets=[[0, 0, 1 << 70], [0, 0, 0]]), "offset"),
        (in_file(bytes="many"), "bytes 'many'"),
        (in_file(path="./c.hdf5"), "file 'c.hdf5' is listed more than once"),
    ],
)
def test_damage_is_named(tmp_path: Path, damage: Callable[[Any], None], message: str) -> None:
    EXAMPLE.save(tmp_path)
    path = tmp_path / "dataset.json"
    record = json.loads(path.read_text())
    damage(record)
    path.write_text(json.dumps(record))
    with pytest.raises(DataError, match=message) as caught:
        Manifest.load(tmp_path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_byte_order_mark_is_no_damage(tmp_path: Path) -> None:
    (tmp_path / "dataset.json").write_text(EXAMPLE.dumps(), encoding="utf-8-sig")
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
