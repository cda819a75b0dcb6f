"""Tests of the file system: other libraries read packed files as they read those on disk."""

from __future__ import annotations

import importlib
import io
import pickle
import threading
from pathlib import Path

import fsspec
import h5py
import numpy as np
import pytest
from PIL import Image

from pydist.errors import DataError, UsageError
from pydist.packs import PackFileSystem, PackOptions, pack

try:
    import tomllib
except ModuleNotFoundError:
    import tomli as tomllib


@pytest.fixture(autouse=True)
def registered() -> None:
    """Registers the protocol, as the entry point of an installed pydist does."""
    fsspec.register_implementation("pydist", PackFileSystem, clobber=True)


@pytest.fixture(params=["raw", "zstd", "lz4"])
def files(source: Path, tmp_path: Path, request: pytest.FixtureRequest) -> PackFileSystem:
    image = np.arange(64 * 48 * 3, dtype=np.uint8).reshape(64, 48, 3)
    Image.fromarray(image).save(source / "image.png")
    np.save(source / "array.npy", np.arange(1000.0))
    pack(source, tmp_path / "pack", PackOptions(codec=request.param))
    return PackFileSystem(tmp_path / "pack")


def test_the_entry_point_is_the_file_system() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    points = tomllib.loads(text)["project"]["entry-points"]
    module, name = points["fsspec.specs"]["pydist"].split(":")
    assert getattr(importlib.import_module(module), name) is PackFileSystem


def test_hdf5_images_and_arrays_are_read(files: PackFileSystem, source: Path) -> None:
    with h5py.File(source / "volume.hdf5") as file:
        expected = file["full"][:]
    with files.open("volume.hdf5") as opened, h5py.File(opened, "r") as file:
        assert np.array_equal(file["full"][7, 3:9], expected[7, 3:9])
        assert np.array_equal(file["full"][:], expected)
    with files.open("image.png") as opened:
        assert np.array_equal(np.asarray(Image.open(opened)), Image.open(source / "image.png"))
    with files.open("array.npy") as opened:
        assert np.array_equal(np.load(opened), np.arange(1000.0))


@pytest.mark.parametrize("name", ["large.bin", "train/cat/4.txt"])
def test_seeking_and_parts_are_those_of_a_file(
    files: PackFileSystem, source: Path, name: str
) -> None:
    rng = np.random.default_rng(0)
    with files.open(name) as packed, (source / name).open("rb") as plain:
        size = (source / name).stat().st_size
        for _ in range(200):
            whence = int(rng.integers(3))
            low = {0: 0, 1: -plain.tell(), 2: -size}[whence]
            offset = int(rng.integers(low, size + 10))
            assert packed.seek(offset, whence) == plain.seek(offset, whence)
            count = int(rng.integers(-1, 100_000))
            assert packed.read(count) == plain.read(count)
            assert packed.tell() == plain.tell()
        with pytest.raises((OSError, ValueError)):
            packed.seek(-1)
        assert packed.seekable()
        assert packed.readable()
        assert not packed.writable()
        with pytest.raises((io.UnsupportedOperation, TypeError)):
            packed.write(b"x")


def test_slices_are_those_of_bytes(files: PackFileSystem, source: Path) -> None:
    whole = (source / "large.bin").read_bytes()
    for start, end in [(None, 5), (-7, None), (100, 200), (3 << 20, None), (5, -5), (9, 3)]:
        assert files.cat_file("large.bin", start, end) == whole[start:end]


def test_globs_walks_and_text(files: PackFileSystem, source: Path) -> None:
    assert files.glob("train/*/[01].txt") == [
        f"train/{kind}/{n}.txt" for kind in ("cat", "dog") for n in (0, 1)
    ]
    assert files.glob("**/4.txt") == sorted(files.glob("**/4.txt"))
    assert len(files.glob("**/4.txt")) == 4
    expected = sorted(str(p.relative_to(source)) for p in source.rglob("*") if p.is_file())
    assert files.find("") == expected
    assert [top for top, _, _ in files.walk("val")] == ["val", "val/cat", "val/dog"]
    assert files.du("train") == sum(p.stat().st_size for p in (source / "train").rglob("*.txt"))
    with files.open("train/cat/1.txt", "r") as text:
        assert text.read() == (source / "train/cat/1.txt").read_text()
    assert files.read_text("train/cat/1.txt") == (source / "train/cat/1.txt").read_text()
    assert files.cat(["train/cat/0.txt", "val/cat/0.txt"]) == {
        name: (source / name).read_bytes() for name in ("train/cat/0.txt", "val/cat/0.txt")
    }
    assert files.isdir("train")
    assert not files.exists("train/horse")
    assert files.modified("image.png").timestamp() == pytest.approx(
        (source / "image.png").stat().st_mtime
    )


def test_urls_name_the_pack_and_the_file(files: PackFileSystem, tmp_path: Path) -> None:
    url = f"pydist://{tmp_path}/pack/train/cat/2.txt"
    with fsspec.open(url) as opened:
        assert opened.read() == files.cat("train/cat/2.txt")
    system, path = fsspec.url_to_fs(url)
    assert path == "train/cat/2.txt"
    assert system.find("") == files.find("")
    assert system.unstrip_protocol(path) == url
    many = fsspec.open_files(f"pydist://{tmp_path}/pack/train/*/2.txt")
    assert [each.path for each in many] == ["train/cat/2.txt", "train/dog/2.txt"]
    assert fsspec.filesystem("pydist", target=str(tmp_path / "pack")).exists("large.bin")
    with pytest.raises(DataError, match="no folder on this path is a pack"):
        fsspec.open(f"pydist://{tmp_path}/none/x").open()


def test_missing_paths_and_folders_are_refused_as_by_the_system(files: PackFileSystem) -> None:
    for call in (files.info, files.ls, files.open, files.cat_file):
        with pytest.raises(FileNotFoundError, match="train/horse"):
            call("train/horse")
    for call in (files.open, files.cat_file):
        with pytest.raises(IsADirectoryError, match="train"):
            call("train")
    assert files.ls("large.bin") == [files.info("large.bin")]


def test_nothing_can_be_written(files: PackFileSystem, tmp_path: Path) -> None:
    calls = [
        lambda: files.open("new", "wb"),
        lambda: files.open("large.bin", "ab"),
        lambda: files.pipe("new", b"x"),
        lambda: files.rm("large.bin"),
        lambda: files.rm("train", recursive=True),
        lambda: files.mkdir("new"),
        lambda: files.makedirs("new/folder"),
        lambda: files.touch("new"),
        lambda: files.mv("large.bin", "other"),
        lambda: files.put(str(tmp_path / "source" / "large.bin"), "other"),
    ]
    for call in calls:
        with pytest.raises(UsageError, match="packs can only be read"):
            call()


def test_single_files_and_folders_are_extracted(files: PackFileSystem, tmp_path: Path) -> None:
    files.get("train/cat/3.txt", f"{tmp_path}/one.txt")
    assert (tmp_path / "one.txt").read_bytes() == files.cat("train/cat/3.txt")
    files.get("val", f"{tmp_path}/val", recursive=True)
    assert len(list((tmp_path / "val").rglob("*.txt"))) == 10
    times = [(tmp_path / root / "val" / "cat").stat().st_mtime_ns for root in ("", "source")]
    assert times[0] == times[1]
    files.get_file("train/cat/3.txt", buffer := io.BytesIO())
    assert buffer.getvalue() == files.cat("train/cat/3.txt")


def test_instances_are_pickled_and_shared(files: PackFileSystem) -> None:
    again = pickle.loads(pickle.dumps(files))
    assert again.cat("large.bin") == files.cat("large.bin")
    results: list[bool] = []

    def read() -> None:
        results.extend(
            files.cat(name) == again.cat(name) for name in again.find("") for _ in range(3)
        )

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4 * 3 * len(files.find(""))
    assert all(results)


def two_packs(tmp_path: Path) -> None:
    """Packs two folders, each as `pack` in a folder of its own."""
    for name in ("one", "other"):
        (tmp_path / name / "source").mkdir(parents=True)
        (tmp_path / name / "source" / "file").write_text(name)
        pack(tmp_path / name / "source", tmp_path / name / "pack")


def test_a_relative_path_leads_from_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two_packs(tmp_path)
    found = []
    for name in ("one", "other"):
        monkeypatch.chdir(tmp_path / name)
        for files in (PackFileSystem("pack"), PackFileSystem(target="pack")):
            assert files.read_text("file") == name
            found.append(files)
        with fsspec.open("pydist://pack/file", "r") as opened:
            assert opened.read() == name
    assert found[0] == found[1] != found[2] == found[3]
    assert hash(found[0]) == hash(found[1])
    assert found[0].pack is found[1].pack
    assert found[0].read_text("file") == "one"
    assert found[0].unstrip_protocol("file") == f"pydist://{tmp_path}/one/pack/file"


def test_what_is_pickled_is_the_same_pack_or_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two_packs(tmp_path)
    monkeypatch.chdir(tmp_path / "one")
    for files in (PackFileSystem("pack"), PackFileSystem(target="pack")):
        pickled = pickle.dumps(files)
        monkeypatch.chdir(tmp_path / "other")
        again = pickle.loads(pickled)
        assert (again.read_text("file"), again) == ("one", files)
        monkeypatch.chdir(tmp_path / "one")
    for name in ("one", "other"):
        (tmp_path / name / "pack").rename(tmp_path / f"pack of {name}")
    (tmp_path / "pack of other").rename(tmp_path / "one" / "pack")
    with pytest.raises(DataError, match="one/pack: the pack was replaced by another one"):
        pickle.loads(pickled)
    assert PackFileSystem("pack").read_text("file") == "other"


def test_extraction_makes_no_program_of_another_user(tmp_path: Path) -> None:
    (tmp_path / "source" / "folder").mkdir(parents=True)
    (tmp_path / "source" / "program").touch()
    (tmp_path / "source" / "program").chmod(0o6755)
    (tmp_path / "source" / "folder").chmod(0o3750)
    pack(tmp_path / "source", tmp_path / "pack")
    files = PackFileSystem(tmp_path / "pack")
    assert files.info("program")["mode"] & 0o7777 == 0o6755
    files.get("", f"{tmp_path}/extracted", recursive=True)
    modes = [(tmp_path / "extracted" / name).stat().st_mode for name in ("program", "folder")]
    assert [mode & 0o7777 for mode in modes] == [0o755, 0o750]


def test_a_large_file_is_read_in_parts(packed: Path) -> None:
    files = PackFileSystem(packed)
    entry = files.entry("large.bin")
    with (packed / "part-00000.pack").open("r+b") as partition:
        at = entry.offset + entry.size - 1
        partition.seek(at)
        last = partition.read()[0]
        partition.seek(at)
        partition.write(bytes([last ^ 1]))
    with files.open("large.bin") as opened:
        start = opened.read(1000)
    with pytest.raises(DataError, match=r"large.bin: damaged: it does not match its checksum"):
        files.cat("large.bin")
    assert len(start) == 1000
