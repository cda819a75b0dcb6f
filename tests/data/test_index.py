"""Tests of indexing: foreign files become data sets, and checksums detect damage."""

from __future__ import annotations

import dataclasses
import errno
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from pydist.data import Manifest, ShardDataset, index
from pydist.data.convert import convert_dataset
from pydist.data.index import index_dataset, index_folder, verify_dataset
from pydist.data.info import deep_facts
from pydist.data.lock import FolderLock
from pydist.data.options import ConvertOptions, IndexOptions
from pydist.data.trust import FileTrust
from pydist.errors import DataError, UsageError
from support.data.damage import flip


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
    assert [f.checksum for f in manifest.files] == [f.checksum for f in made.files]
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


def test_a_folder_that_can_not_be_read(foreign: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `lost+found`; root may read it, so that the error is made here."""
    inner = foreign / "lost+found"
    inner.mkdir()
    iterdir = Path.iterdir

    def denied(path: Path) -> Iterator[Path]:
        if path == inner:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return iterdir(path)

    monkeypatch.setattr(Path, "iterdir", denied)
    with pytest.raises(DataError, match=r"lost\+found: Permission denied"):
        index_folder(foreign)


def test_folders_name_splits(universes: Path, tmp_path: Path) -> None:
    for i, path in enumerate(sorted(universes.glob("*.hdf5"))[:6]):
        folder = tmp_path / "set" / ("train", "Val", "TEST")[i % 3]
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
    with pytest.raises(DataError) as caught:
        index_folder(foreign)
    held = (
        "samples of 4 × 16 × 16 × 16 (channels, depth, height, width) with the axes DHWC, "
        "targets: 4"
    )
    assert str(caught.value) == (
        f"{foreign}/zzz.hdf5 holds float32 {held}, "
        f"but {foreign}/univ_000000.hdf5 holds int16 {held}"
    )
    with h5py.File(foreign / "aaa.hdf5", "w") as file:
        file["full"] = np.zeros((16, 16, 16), np.int16)
        file["unitPar"] = np.zeros(4)
    with pytest.raises(DataError, match=r"'full' has the shape \(16, 16, 16\), which may be"):
        index_folder(foreign)


def test_a_link_to_nothing_is_named(foreign: Path) -> None:
    (foreign / "not-fetched.hdf5").symlink_to("elsewhere/key")
    with pytest.raises(DataError, match=r"not-fetched.hdf5 is a link to elsewhere/key"):
        index_dataset(foreign)


def test_a_file_under_two_names_is_refused(foreign: Path, tmp_path_factory: Any) -> None:
    """Its samples could be in the training and the validation data."""
    (foreign / "again.hdf5").symlink_to("univ_000001.hdf5")
    with pytest.raises(DataError, match=r"again.hdf5 is a link to the same file as .*univ_000001"):
        index_dataset(foreign)
    (foreign / "again.hdf5").unlink()
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "sample.hdf5"
    shutil.copy(foreign / "univ_000001.hdf5", elsewhere)
    for name in ("one", "two"):
        (foreign / f"{name}.hdf5").symlink_to(elsewhere)
    trust = FileTrust(allow_roots=(elsewhere.parent,))
    with pytest.raises(DataError, match=r"two.hdf5 is a link to the same file as .*one.hdf5"):
        index_dataset(foreign, trust=trust)
    (foreign / "two.hdf5").unlink()
    assert len(index_dataset(foreign, trust=trust).files) == 5


def test_links_to_folders_without_data_or_back_are_left_out(
    foreign: Path, tmp_path_factory: Any
) -> None:
    notes = tmp_path_factory.mktemp("notes")
    (notes / "README").write_text("words")
    (foreign / "notes").symlink_to(notes)
    (foreign / "self").symlink_to(".")
    count = len([*foreign.glob("*.hdf5")])
    assert len(index_dataset(foreign).files) == count
    shutil.copy(foreign / "univ_000001.hdf5", notes)
    with pytest.raises(DataError, match=r"notes.* a link to "):
        index_dataset(foreign)


def test_a_folder_with_several_formats_needs_a_choice(foreign: Path) -> None:
    (foreign / "sample").mkdir()
    np.save(foreign / "sample" / "full.npy", np.zeros((4, 6, 4, 2), np.int16))
    count = len([*foreign.glob("*.hdf5")])
    message = rf"has files of several formats: {count} of hdf5, 1 of numpy; choose one: --format"
    with pytest.raises(UsageError, match=message):
        index_dataset(foreign)
    assert len(index_dataset(foreign, IndexOptions(format="hdf5")).files) == count


def test_wrong_calls(foreign: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    with pytest.raises(DataError, match=r"fits no 64\^3"):
        index_folder(foreign, IndexOptions(width=64))
    with pytest.raises(UsageError, match="fraction"):
        index_folder(foreign, IndexOptions(validation=1.0))
    with pytest.raises(DataError, match=r"no files of the format hdf5, zarr, numpy, tfrecord"):
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


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_target_that_is_not_finite(foreign: Path, value: float) -> None:
    manifest = index_dataset(foreign, IndexOptions(checksums=False))
    path = foreign / "univ_000001.hdf5"
    with h5py.File(path, "a") as file:
        file["unitPar"][2] = value
    why = rf"univ_000001\.hdf5: 'unitPar' is \[.*, {value}, .*\]; finite numbers are needed"
    with pytest.raises(DataError, match=why):
        index_folder(foreign, IndexOptions(statistics=False))
    size = path.stat().st_size
    files = [dataclasses.replace(f, bytes=size) for f in manifest.files if f.path == path.name]
    dataclasses.replace(manifest, files=tuple(files)).save(foreign)
    (fault,) = verify_dataset(foreign)
    assert re.search(why, fault)
    (fault,) = deep_facts(foreign)["train"].faults
    assert re.search(why, fault)


def test_verify_finds_every_kind_of_damage(public_universes: Path, tmp_path: Path) -> None:
    root = tmp_path / "copy"
    shutil.copytree(public_universes, root)
    assert verify_dataset(root) == []
    flip(root / "univ_000001.hdf5", 20000)
    (root / "univ_000002.hdf5").write_bytes((root / "univ_000001.hdf5").read_bytes()[:-1])
    (root / "univ_000003.hdf5").unlink()
    faults = verify_dataset(root)
    assert len(faults) == 3
    for fault, (name, why) in zip(
        faults, [("1", "checksum"), ("2", "bytes"), ("3", "No such file")], strict=True
    ):
        assert f"univ_00000{name}.hdf5" in fault
        assert why in fault


def formats(root: Path, source: Path) -> dict[str, Path]:
    """Returns folders with the same universes in each format, without a manifest."""
    pytest.importorskip("zarr")
    folders = {}
    for name in ("hdf5", "zarr", "numpy"):
        folders[name] = root / name
        convert_dataset(source, folders[name], ConvertOptions(name))
        (folders[name] / "dataset.json").unlink()
    return folders


def test_files_of_any_format(public_universes: Path, tmp_path: Path) -> None:
    made = []
    for name, folder in formats(tmp_path, public_universes).items():
        manifest = index_dataset(folder, IndexOptions(width=8))
        assert manifest.file_format == name
        assert verify_dataset(folder) == []
        data = ShardDataset(folder, normalize="standardize")
        made.append((manifest.splits, manifest.log1p_std, data[5]))
        again = index_dataset(folder, IndexOptions(width=8, format=name), workers=2)
        assert again.files == manifest.files
    for splits, std, (x, y) in made[1:]:
        assert (splits, std) == made[0][:2]
        assert torch.equal(x, made[0][2][0])
        assert torch.equal(y, made[0][2][1])
    with pytest.raises(DataError, match="no files of the format zarr below it"):
        index_folder(tmp_path / "numpy", IndexOptions(format="zarr"))


def test_indexing_goes_on_where_it_stopped(foreign: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    real = index.index_file
    monkeypatch.setattr(index, "index_file", lambda task: read.append(task.name) or real(task))

    def stop(done: int, total: int, what: str) -> None:
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        index_dataset(foreign, progress=stop)
    assert not (foreign / "dataset.json").exists()
    first = foreign / "univ_000000.hdf5"
    first.write_bytes(first.read_bytes() + b"x")
    manifest = index_dataset(foreign)
    assert read == [f"univ_00000{n}.hdf5" for n in (0, 1, 2, 0, 3)]
    assert manifest == Manifest.load(foreign)
    assert sorted(p.name for p in foreign.glob(".*")) == []
    read.clear()
    assert index_dataset(foreign, IndexOptions(width=8)).splits == {"train": 32}
    assert len(read) == 4, "another manifest of the same files"


def test_manifests_that_are_kept(universes: Path, tmp_path: Path) -> None:
    root = tmp_path / "copy"
    shutil.copytree(universes, root)
    with pytest.raises(UsageError, match=r"is a data set already .*; --overwrite"):
        index_dataset(root)
    assert index_dataset(root, overwrite=True).splits == {"train": 29, "val": 3}
    with FolderLock(root):
        for attempt in (index_dataset, verify_dataset):
            with pytest.raises(UsageError, match="process"):
                attempt(root)
    with pytest.raises(DataError, match="none: no such folder"):
        index_dataset(tmp_path / "none")


def test_layout_of_mlperf(tmp_path: Path) -> None:
    for split in ("train", "validation"):
        (tmp_path / split).mkdir()
        with h5py.File(tmp_path / split / "univ.hdf5", "w") as file:
            file["x"] = np.ones((8, 8, 8, 4), np.int16)
            file["y"] = np.zeros(4, np.float32)
    manifest = index_dataset(tmp_path, IndexOptions(dataset="x", target="y"))
    assert manifest.splits == {"train": 1, "val": 1}
    assert manifest.target_names == ("Omega_m", "sigma_8", "N_spec", "H_0")


def test_values_without_logarithms_have_no_statistics(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "ct.h5", "w") as file:
        file["full"] = np.full((1, 4, 4, 4), -1000, np.int16)
        file["unitPar"] = np.zeros(1)
    manifest = index_dataset(tmp_path)
    assert (manifest.log1p_mean, manifest.files[0].means) == ((), (-1000.0,))
    assert Manifest.load(tmp_path) == manifest


@pytest.mark.parametrize("text", ['["univ_000000.hdf5", 5]', '["univ_000000.hdf5", {}]', "{"])
def test_a_damaged_journal_is_ignored(foreign: Path, text: str) -> None:
    (foreign / ".indexed.jsonl").write_text(text)
    assert index_dataset(foreign).splits == {"train": 4}


def test_names_of_classes(tmp_path: Path) -> None:
    for number in range(4):
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            file["full"] = np.full((1, 2, 2, 2), number, np.int16)
            file["unitPar"] = np.array([number % 3], np.float32)
    options = IndexOptions(class_names=("cat", "dog", "fox"))
    manifest = index_dataset(tmp_path, options)
    assert (manifest.class_names, manifest.target_names) == (("cat", "dog", "fox"), ("class",))
    assert Manifest.load(tmp_path) == manifest
    with pytest.raises(DataError, match=r"2\.h5: 'unitPar' is \[2\.0\]; .* from 0 to 1"):
        index_dataset(tmp_path, IndexOptions(class_names=("cat", "dog")))
    for names in (("cat",), ("cat", "cat")):
        with pytest.raises(UsageError, match=r"at least two, and each name once"):
            index_folder(tmp_path, IndexOptions(class_names=names))


def test_a_file_that_is_listed_twice(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["full"], file["unitPar"] = np.zeros((1, 2, 2, 2)), np.zeros(1)
    manifest = index_folder(tmp_path)
    dataclasses.replace(manifest, files=manifest.files[:] * 2).save(tmp_path)
    assert verify_dataset(tmp_path) == [f"{tmp_path / 'a.h5'}: listed 2 times"]
