"""Tests of the data set of a pack's files: order, decoding, and workers of a DataLoader."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path

import pytest
from torch.utils.data import DataLoader

from pydist.errors import DataError
from pydist.packs import PackFiles, PackOptions, pack
from support.trees import size_of


def test_items_are_the_files_in_order_of_their_paths(source: Path, packed: Path) -> None:
    files = PackFiles(packed)
    names = sorted(str(path.relative_to(source)) for path in source.rglob("*") if path.is_file())
    assert [files.path(index) for index in range(len(files))] == names
    assert list(files) == [(name, (source / name).read_bytes()) for name in names]
    assert files[-1] == files[len(files) - 1]
    with pytest.raises(IndexError):
        files[len(files)]
    with pytest.raises(TypeError):
        files["0"]  # type: ignore[index]


def test_a_folder_and_suffixes_choose_files(packed: Path) -> None:
    assert [PackFiles(packed, under="train/dog").path(i) for i in (0, 4)] == [
        "train/dog/0.txt",
        "train/dog/4.txt",
    ]
    assert len(PackFiles(packed, suffixes=(".hdf5", ".bin"))) == 2
    assert len(PackFiles(packed, suffixes=(".jpg",))) == 0
    assert len(PackFiles(packed, suffixes=".bin")) == 1
    assert len(PackFiles(packed, suffixes=".n5")) == 0
    with pytest.raises(DataError, match="no folder 'horse'"):
        PackFiles(packed, under="horse")
    with pytest.raises(DataError, match=r"index.pdx: No such file.*`pydist data pack S"):
        PackFiles(packed / "none")


def test_a_relative_path_is_that_of_the_beginning(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(packed.parent)
    files = PackFiles(packed.name)  # no partition is open yet
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert list(files) == list(pickle.loads(pickle.dumps(files))) == list(PackFiles(packed))


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_read_what_the_process_reads(packed: Path, method: str) -> None:
    files = PackFiles(packed, size_of, under="train")
    expected = list(files)  # the partitions are open before the fork
    loader = DataLoader(
        files, batch_size=None, num_workers=2, multiprocessing_context=method, timeout=60
    )
    assert [tuple(item) for item in loader] == expected


def test_a_pickled_one_wants_the_same_pack(source: Path, packed: Path) -> None:
    files = PackFiles(packed, size_of, suffixes=(".txt",))
    text = pickle.dumps(files)
    again = pickle.loads(text)
    assert list(again) == list(files)
    shutil.rmtree(packed)
    pack(source, packed, PackOptions(seed=1))
    with pytest.raises(DataError, match="replaced by another"):
        pickle.loads(text)
