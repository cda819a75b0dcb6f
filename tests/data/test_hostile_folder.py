"""Tests of folders from anywhere: what stands in place of pydist's own files in a data set."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pydist.data import IndexOptions, Manifest, ShardDataset, deep_facts, index_dataset
from pydist.data.convert import convert_dataset
from pydist.data.journal import Journal
from pydist.data.made import JOURNAL, MadeFiles
from pydist.data.numpy_file import NumpyFolder
from pydist.data.options import ConvertOptions
from pydist.data.regular import TrustedTree
from pydist.errors import DataError, DiskError

PLACES: dict[str, Callable[[Path, Path], None]] = {
    "a link": lambda path, target: path.symlink_to(target),
    "a pipe": lambda path, _: os.mkfifo(path),
    "a folder": lambda path, _: path.mkdir(),
}


@pytest.fixture
def data(universes: Path, tmp_path: Path) -> Path:
    """Makes a data set of the same files, which it may change beside them."""
    folder = tmp_path / "data"
    folder.mkdir()
    for path in universes.glob("*.hdf5"):
        os.link(path, folder / path.name)
    index_dataset(folder, IndexOptions(width=8))
    return folder


@pytest.mark.parametrize("place", PLACES)
def test_a_journal_is_never_written_elsewhere(tmp_path: Path, place: str) -> None:
    target = tmp_path / "precious"
    target.write_text('["a", 1]\n')
    PLACES[place](tmp_path / "journal", target)
    journal = Journal(tmp_path / "journal")
    assert journal.get("a") is None
    with pytest.raises(DiskError, match="journal: "):
        journal.add("b", 2)
    assert target.read_text() == '["a", 1]\n'


@pytest.mark.parametrize("place", PLACES)
def test_info_neither_waits_nor_follows(data: Path, tmp_path: Path, place: str) -> None:
    target = tmp_path / "precious"
    target.write_text("{}")
    PLACES[place](data / ".info.json", target)
    facts = deep_facts(data)
    assert sum(each.files for each in facts.values()) == len(Manifest.load(data).files)
    assert target.read_text() == "{}"
    assert facts == deep_facts(data)


def test_folders_within_each_other(tmp_path: Path) -> None:
    deepest = tmp_path
    for _ in range(120):
        deepest /= "d"
    deepest.mkdir(parents=True)
    with pytest.raises(DataError, match="below more than 100 folders"):
        index_dataset(tmp_path)


def test_a_manifest_that_is_too_large(data: Path) -> None:
    os.truncate(data / "dataset.json", 1 << 40)  # which takes no space on the disk
    with pytest.raises(DataError, match=r"dataset\.json: 1099511627776 bytes"):
        Manifest.load(data)


def test_texts_that_are_too_large(tmp_path: Path) -> None:
    np.save(tmp_path / "full.npy", np.zeros(3))
    (tmp_path / "texts.json").write_text("{}")
    os.truncate(tmp_path / "texts.json", 1 << 40)
    with pytest.raises(DataError, match=r"texts\.json: 1099511627776 bytes"):
        NumpyFolder.open(tmp_path).texts()


@pytest.fixture
def linked(tmp_path: Path) -> tuple[Path, Path]:
    """Makes a folder with a link to another one, and a file in that."""
    (tmp_path / "made").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "made" / "sub").symlink_to(tmp_path / "elsewhere")
    important = tmp_path / "elsewhere" / "important"
    important.write_text("precious")
    return tmp_path / "made", important


def listing(data: Path, name: str) -> Manifest:
    """Returns the manifest of a data set, with another name of its first file."""
    manifest = Manifest.load(data)
    return replace(manifest, files=(replace(manifest.files[0], path=name), *manifest.files[1:]))


NUMPY = ConvertOptions("numpy", overwrite=True)


@pytest.mark.parametrize("by", ["journal", "manifest"])
def test_conversion_removes_nothing_elsewhere(
    universes: Path, linked: tuple[Path, Path], by: str
) -> None:
    folder, important = linked
    (folder / "old").touch()
    if by == "journal":
        (folder / JOURNAL).write_text('["", ["sub/important", "old", "\\ud800"]]\n')
    else:
        manifest = listing(universes, "sub/important")
        files = (*manifest.files[:-1], replace(manifest.files[-1], path="old"))
        replace(manifest, files=files).save(folder)
    convert_dataset(universes, folder, NUMPY)
    assert important.read_text() == "precious"
    assert not (folder / "old").exists()


def test_a_data_set_that_replaces_another_one_removes_nothing_elsewhere(
    universes: Path, linked: tuple[Path, Path]
) -> None:
    folder, important = linked
    (folder / "old").touch()
    (folder / JOURNAL).write_text('["", ["old"]]\n')
    MadeFiles(folder, listing(universes, "sub/important"), ()).complete(Manifest.load(universes))
    assert important.read_text() == "precious"
    assert not (folder / "old").exists()


def test_conversion_writes_nothing_elsewhere(data: Path, linked: tuple[Path, Path]) -> None:
    folder, important = linked
    first = min(data.glob("*.hdf5"))
    (data / "sub").mkdir()
    first.rename(data / "sub" / first.name)
    index_dataset(data, IndexOptions(width=8), overwrite=True)
    with pytest.raises(DataError, match=r"sub: a link to .*elsewhere"):
        convert_dataset(data, folder, NUMPY)
    assert list(important.parent.iterdir()) == [important]


def test_a_path_without_links_is_looked_up_once(
    universes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a shared file system each look-up is a message: those above the data set say nothing."""
    convert_dataset(universes, tmp_path / "made", NUMPY)
    looked_up: list[str] = []
    lstat = os.lstat

    def counted(path: Any, **options: Any) -> os.stat_result:
        looked_up.append(os.fspath(path))
        return lstat(path, **options)

    dataset = ShardDataset(tmp_path / "made")
    monkeypatch.setattr(os, "lstat", counted)
    dataset.read_block(0)
    assert looked_up == [str(tmp_path / "made" / dataset.manifest.files[0].path)]


def test_links_within_folders_of_a_data_set_are_followed(tmp_path: Path) -> None:
    """Also where the data set is itself reached by a link."""
    (tmp_path / "real" / "a" / "b").mkdir(parents=True)
    (tmp_path / "real" / "a" / "b" / "file").write_text("content")
    (tmp_path / "real" / "link").symlink_to("a/b")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "file").touch()
    (tmp_path / "real" / "a" / "out").symlink_to(tmp_path / "outside")
    (tmp_path / "root").symlink_to("real")
    for root in ("real", "root"):
        tree = TrustedTree(tmp_path / root)
        assert tree.path("link/file").read_text() == "content"
        for name in ("a/out", "a/out/file"):
            for _ in range(2):  # what was refused is not remembered
                with pytest.raises(DataError, match=r"a link to .*outside"):
                    tree.path(name)
                with pytest.raises(DataError, match=r"a link to .*outside"):
                    tree.open(name)
        allowed = TrustedTree(tmp_path / root, [tmp_path / "outside"])
        assert allowed.path("a/out/file").exists()
