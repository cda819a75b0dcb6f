"""Tests of links out of a data set, and of commands on untrusted files."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from pydist.cli.main import main
from pydist.data import (
    ConvertOptions,
    FileTrust,
    IndexOptions,
    ShardDataset,
    convert_dataset,
    deep_facts,
    index_dataset,
    index_folder,
    verify_dataset,
)
from pydist.data.info import kept_facts
from pydist.data.made import checksum_of_file
from pydist.data.safe_open import SafeFile
from pydist.errors import DataError

FORMAT_NAMES = ("hdf5", "numpy", "zarr")


@pytest.fixture(params=FORMAT_NAMES)
def linked(request: pytest.FixtureRequest, universes: Path, tmp_path: Path) -> Path:
    """Makes a data set, then replaces a file of it by a link to a place outside of it."""
    if request.param == "zarr":
        pytest.importorskip("zarr")
    folder = tmp_path / "data"
    convert_dataset(universes, folder, ConvertOptions(request.param, layout="channel-first"))
    file = sorted(folder.glob("univ*"))[0]
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere", target_is_directory=request.param != "hdf5")
    return folder


def test_a_link_out_of_the_data_set_is_refused(linked: Path, tmp_path: Path) -> None:
    why = f"a link to {tmp_path / 'elsewhere'}, outside allow_roots \\(none\\)"
    (fault,) = verify_dataset(linked)
    assert why.replace("\\", "") in fault
    assert [why.replace("\\", "") in each for each in faults_of(linked)] == [True]
    with pytest.raises(DataError, match=why):
        read_all(ShardDataset(linked))
    with pytest.raises(DataError, match=why):
        convert_dataset(linked, tmp_path / "copy", ConvertOptions("numpy"))
    with pytest.raises(DataError, match=why):
        index_folder(linked)


def test_a_link_to_an_allowed_folder_is_followed(linked: Path, tmp_path: Path) -> None:
    trust = FileTrust((tmp_path,))
    assert verify_dataset(linked, trust=trust) == []
    assert not any(each.faults for each in deep_facts(linked, trust=trust).values())
    read_all(ShardDataset(linked, allow_roots=[tmp_path]))
    index_folder(linked, trust=trust)
    convert_dataset(linked, tmp_path / "copy", ConvertOptions("numpy"), trust=trust)
    assert main(["data", "verify", str(linked), "--allow-roots", str(tmp_path)]) == 0


def test_a_link_of_a_folder_on_the_way_is_refused(universes: Path, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    (folder / "train").mkdir(parents=True)
    for path in universes.glob("*.hdf5"):
        os.link(path, folder / "train" / path.name)
    index_dataset(folder, IndexOptions(width=8))
    (folder / "train").rename(tmp_path / "moved")
    (folder / "train").symlink_to(tmp_path / "moved")
    faults = verify_dataset(folder)
    assert faults
    assert all("outside allow_roots (none)" in fault for fault in faults)


def test_a_link_within_the_data_set_is_followed(universes: Path, tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    for path in universes.glob("*.hdf5"):
        os.link(path, tmp_path / "store" / f"{path.name}.kept")
        (tmp_path / path.name).symlink_to(f"store/{path.name}.kept")
    index_dataset(tmp_path, IndexOptions(width=8))
    assert verify_dataset(tmp_path) == []


def test_indexed_samples_of_a_linked_folder(universes: Path, tmp_path: Path) -> None:
    """The folder's link names their split; without `allow_roots` it is refused with its target."""
    data, pool = tmp_path / "data", tmp_path / "pool"
    for n, path in enumerate(sorted(universes.glob("*.hdf5"))[:4]):
        folder = (data / "train", pool / "kept")[n % 2]
        folder.mkdir(parents=True, exist_ok=True)
        os.link(path, folder / path.name)
    (data / "val").symlink_to(pool / "kept")
    with pytest.raises(
        DataError, match=f"data/val: a link to {pool / 'kept'}, outside allow_roots"
    ):
        index_dataset(data)
    trust = FileTrust((pool,))
    assert index_dataset(data, trust=trust).splits == {"train": 2, "val": 2}
    assert verify_dataset(data, trust=trust) == []
    read_all(ShardDataset(data, "val", allow_roots=[pool]))


@pytest.mark.parametrize(
    ("target", "refusal"),
    [("train", "a link to the same file as .*/train/univ_0"), ("val/inner", "the same folder as")],
)
def test_a_linked_folder_with_the_samples_of_another_is_refused(
    universes: Path, tmp_path: Path, target: str, refusal: str
) -> None:
    for name in ("train", "val/inner"):
        (tmp_path / name).mkdir(parents=True)
    for n, path in enumerate(sorted(universes.glob("*.hdf5"))[:2]):
        os.link(path, tmp_path / ("train", "val/inner")[n] / path.name)
    for name in ("test", "val/again") if target == "val/inner" else ("val/again",):
        (tmp_path / name).symlink_to(tmp_path / target)
    with pytest.raises(DataError, match=refusal):
        index_folder(tmp_path)


@pytest.mark.parametrize("is_folder", [True, False])
def test_a_change_at_the_target_of_a_link_in_a_sample_is_found(
    tmp_path: Path, is_folder: bool
) -> None:
    data, pool = tmp_path / "data", tmp_path / "pool"
    (data / "sample").mkdir(parents=True)
    pool.mkdir()
    np.save(pool / "full.npy", np.ones((1, 4, 4, 4), "float32"))
    np.save(data / "sample" / "unitPar.npy", np.ones(1, "float32"))
    link = data / "sample" / ("arrays" if is_folder else "full.npy")
    link.symlink_to(pool if is_folder else pool / "full.npy")
    (pool / "circle").symlink_to(pool)
    trust = FileTrust((pool,))
    options = IndexOptions(validation=0, dataset="arrays/full" if is_folder else "full")
    index_dataset(data, options, trust=trust)
    assert verify_dataset(data, trust=trust) == []
    assert deep_facts(data, trust=trust)["train"].nan == 0
    assert kept_facts(data, trust) is not None
    np.save(pool / "full.npy", np.full((1, 4, 4, 4), np.nan, "float32"))
    os.utime(pool / "full.npy", ns=(0, 0))  # so that the times differ, however fast this is
    assert kept_facts(data, trust) is None
    (fault,) = verify_dataset(data, trust=trust)
    assert "the manifest says" in fault
    assert faults_of(data, trust=trust) == [fault]


def test_folders_outside_allow_roots_are_not_part_of_a_sample(tmp_path: Path) -> None:
    sample, outside = tmp_path / "sample", tmp_path / "outside"
    sample.mkdir()
    outside.mkdir()
    (outside / "file").write_text("content")
    (sample / "link").symlink_to(outside)
    assert checksum_of_file(sample)[0] == 0
    assert checksum_of_file(sample, allow_roots=[outside])[0] == len("content")


def faults_of(folder: Path, **options: Any) -> list[str]:
    return [fault for facts in deep_facts(folder, **options).values() for fault in facts.faults]


def read_all(data: ShardDataset) -> None:
    for index in range(len(data)):
        data.read_block(index)
    data.close()


def test_untrusted_files_are_read_by_another_process(
    universes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process the library is not called at all."""

    def refused(*_: Any, **__: Any) -> Any:
        raise AssertionError("opened in this process")

    for path in universes.glob("*.hdf5"):
        os.link(path, tmp_path / path.name)
    options = IndexOptions(width=8)
    plain = index_folder(tmp_path, options)
    monkeypatch.setattr(SafeFile, "open", refused)
    trust = FileTrust(untrusted=True)
    assert index_dataset(tmp_path, options, trust=trust) == plain
    assert verify_dataset(tmp_path, trust=trust) == []
    facts = deep_facts(tmp_path, trust=trust)
    copy = ConvertOptions("numpy", layout="channel-first")
    convert_dataset(tmp_path, tmp_path / "copy", copy, trust=trust)
    monkeypatch.undo()
    (tmp_path / ".info.json").unlink()
    assert deep_facts(tmp_path) == facts
    convert_dataset(tmp_path, tmp_path / "other", copy)
    names = [p.relative_to(tmp_path / "copy") for p in (tmp_path / "copy").rglob("univ*/*")]
    assert names
    for name in names:
        assert (tmp_path / "copy" / name).read_bytes() == (tmp_path / "other" / name).read_bytes()


def test_texts_of_untrusted_files_are_converted(universes: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(universes, source, ignore=shutil.ignore_patterns("dataset*"))
    for path in source.glob("*.hdf5"):
        with h5py.File(path, "a") as file:
            file.attrs["note"] = np.bytes_(f"of {path.name}")
    index_dataset(source, IndexOptions(width=8))
    convert_dataset(source, tmp_path / "a", ConvertOptions("numpy"))
    trust = FileTrust(untrusted=True)
    convert_dataset(source, tmp_path / "b", ConvertOptions("numpy"), trust=trust)
    texts = [sorted((tmp_path / name).glob("*/texts.json")) for name in "ab"]
    assert texts[0]
    for one, other in zip(*texts, strict=True):
        assert '"note": "of univ' in one.read_text() == other.read_text()
