"""Tests that copies of data sets in other formats hold the same samples."""

from __future__ import annotations

import itertools
import json
import threading
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

pytest.importorskip("zarr")

from pydist.data import CTOptions, Manifest, ShardDataset, generate_ct
from pydist.data import convert as module
from pydist.data.convert import convert_dataset
from pydist.data.index import index_dataset, verify_dataset
from pydist.data.lock import FolderLock
from pydist.data.numpy_file import NumpyFolder
from pydist.data.options import ConvertOptions, IndexOptions
from pydist.data.safe_open import safe_open
from pydist.errors import DataError, UsageError
from support.data.damage import flip_bit

CASES = [
    ConvertOptions("numpy"),
    ConvertOptions("numpy", "channel-first"),
    ConvertOptions("hdf5", "channel-first", chunks=(4, 4, 4), compression="gzip"),
    ConvertOptions("zarr", chunks=(4, 4, 8), compression="zstd"),
    ConvertOptions("zarr", "channel-first", (4, 4, 4), (8, 8, 8), "blosc"),
]


def equal(one: Path, other: Path) -> None:
    """Compares all samples of two data sets."""
    first, second = Manifest.load(one), Manifest.load(other)
    assert first.splits == second.splits
    for split in first.splits:
        ours, theirs = ShardDataset(one, split), ShardDataset(other, split)
        for i in range(len(ours)):
            for a, b in zip(ours[i], theirs[i], strict=True):
                assert torch.equal(a, b)


@pytest.mark.parametrize("options", CASES, ids=lambda o: f"{o.format} {o.layout}")
def test_universes(public_universes: Path, tmp_path: Path, options: ConvertOptions) -> None:
    told: list[tuple[int, int, str]] = []
    made = convert_dataset(public_universes, tmp_path, options, lambda *what: told.append(what))
    assert told[-1][:2] == (4, 4)
    assert (made.file_format, len(made.files)) == (options.format, 32 if made.axes == "CDHW" else 4)
    assert verify_dataset(tmp_path) == []
    equal(public_universes, tmp_path)
    before = Manifest.load(public_universes)
    assert (made.log1p_mean, made.target_names) == (before.log1p_mean, before.target_names)
    a = ShardDataset(public_universes, "val", normalize="mean").read_block(3)
    assert torch.equal(a, ShardDataset(tmp_path, "val", normalize="mean").read_block(3))


def test_any_format_to_any_other(tmp_path: Path) -> None:
    """Volumes with labels and texts go around through all formats, and stay the same."""
    generate_ct(tmp_path / "start", CTOptions(count=2, shape=(8, 9, 10), seed=1))
    (path, *_) = (tmp_path / "start").glob("*.hdf5")
    with h5py.File(path, "a") as file:
        file.attrs["of the scanner"] = np.bytes_("ü".encode())
        file.attrs["latin-1"] = np.bytes_(b"\xfc")
    manifest = Manifest.load(tmp_path / "start")
    files = tuple(
        module.replace(f, checksum=h, bytes=n)
        for f in manifest.files
        for n, h in [module.checksum_of_file(tmp_path / "start" / f.path)]
    )
    module.replace(manifest, files=files).save(tmp_path / "start")
    here = tmp_path / "start"
    for number, form in enumerate(("zarr", "numpy", "zarr", "hdf5", "numpy", "hdf5")):
        there = tmp_path / str(number)
        convert_dataset(here, there, ConvertOptions(form))
        equal(here, there)
        here = there
    equal(tmp_path / "start", here)
    with safe_open(here / path.name) as file:
        assert file.texts()["of the scanner"] == "ü"
    with h5py.File(here / path.name) as file:
        assert bytes(file.attrs["latin-1"]) == b"\xfc"


def test_an_interrupted_copy_goes_on(
    universes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ConvertOptions("numpy")

    def stop(done: int, total: int, what: str) -> None:
        if done == 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert_dataset(universes, tmp_path, options, stop)
    assert not (tmp_path / "dataset.json").exists()
    copied: list[str] = []
    real = NumpyFolder.write

    def write(path: Path, *rest: Any) -> None:
        copied.append(path.name)
        real(path, *rest)

    monkeypatch.setattr(NumpyFolder, "write", write)
    damaged = tmp_path / "univ_000000_0_0_0" / "full.npy"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\x01")
    made = convert_dataset(universes, tmp_path, options)
    assert len(copied) == 12 + 1
    assert "univ_000000_0_0_0" in copied
    assert not (tmp_path / ".made.jsonl").exists()
    equal(universes, tmp_path)
    copied.clear()
    assert convert_dataset(universes, tmp_path, options) == made
    assert copied == []


def test_another_copy_is_not_overwritten(universes: Path, tmp_path: Path) -> None:
    convert_dataset(universes, tmp_path, ConvertOptions("numpy"))
    other = ConvertOptions("hdf5")
    with pytest.raises(UsageError, match="made of other files or with other options"):
        convert_dataset(universes, tmp_path, other)
    convert_dataset(universes, tmp_path, ConvertOptions("hdf5", overwrite=True))
    equal(universes, tmp_path)
    folders = [p.name for p in tmp_path.iterdir() if p.is_dir()]
    assert all(name.endswith(".index") for name in folders), "the NumPy folders are still there"


def test_an_interrupted_run_leaves_no_manifest_with_files_of_two_data_sets(
    universes: Path, tmp_path: Path
) -> None:
    def stop(done: int, total: int, what: str) -> None:
        raise KeyboardInterrupt

    convert_dataset(universes, tmp_path, ConvertOptions("hdf5"))
    compressed = ConvertOptions("hdf5", compression="gzip", overwrite=True)  # the same names
    with pytest.raises(KeyboardInterrupt):
        convert_dataset(universes, tmp_path, compressed, stop)
    assert not (tmp_path / "dataset.json").exists()
    convert_dataset(universes, tmp_path, compressed)
    assert verify_dataset(tmp_path) == []
    equal(universes, tmp_path)


def test_a_second_copy_into_the_folder_is_refused(universes: Path, tmp_path: Path) -> None:
    refused: list[str] = []

    def second() -> None:
        try:
            convert_dataset(universes, tmp_path, ConvertOptions("numpy"))
        except UsageError as error:
            refused.append(str(error))

    with FolderLock(tmp_path):
        thread = threading.Thread(target=second)
        thread.start()
        thread.join()
    assert len(refused) == 1
    assert "process" in refused[0]


def test_damage_is_not_copied(public_universes: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    convert_dataset(public_universes, source, ConvertOptions("hdf5"))
    flip_bit(source / "univ_000002.hdf5", "full")
    with pytest.raises(DataError, match=r"univ_000002\.hdf5: checksum"):
        convert_dataset(source, tmp_path / "copy")
    assert not (tmp_path / "copy" / "dataset.json").exists()


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"format": "tiff"}, "format 'tiff' is none of hdf5, zarr, numpy, tfrecord"),
        ({"format": "numpy", "compression": "gzip"}, "no chunks, shards or compression"),
        ({"format": "hdf5", "shards": (32, 32, 32)}, "no shards"),
        ({"format": "hdf5", "compression": "zstd"}, "no compression but gzip"),
        ({"shards": (48, 32, 32)}, "multiples of the chunks'"),
        ({"chunks": (4, 0, 4)}, "voxels along depth, height and width"),
    ],
)
def test_wrong_options(universes: Path, tmp_path: Path, options: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        convert_dataset(universes, tmp_path / "new", ConvertOptions(**options))
    assert not (tmp_path / "new").exists()


def test_a_file_that_would_be_in_the_folder_of_another(universes: Path, tmp_path: Path) -> None:
    """The folder of the first sample would replace the one with the second in it."""
    manifest = Manifest.load(universes)
    pair = [module.replace(manifest.files[0], path=name) for name in ("a.h5", "a/b.h5")]
    module.replace(manifest, files=tuple(pair)).save(tmp_path)
    with pytest.raises(DataError, match="would become 'a' and, in it, 'a/b'"):
        convert_dataset(tmp_path, tmp_path / "new", ConvertOptions("numpy"))
    assert not (tmp_path / "new").exists()


def test_into_itself_or_two_into_one(universes: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(universes, target_is_directory=True)
    with pytest.raises(UsageError, match="overwrite what it is made from"):
        convert_dataset(universes, tmp_path / "link")
    manifest = Manifest.load(universes)
    entry = manifest.files[0]
    twice = (entry, module.replace(entry, path=entry.path.replace(".hdf5", ".h5")))
    module.replace(manifest, files=twice).save(tmp_path)
    with pytest.raises(DataError, match=r"would become 'univ_000000_0_0_0\.zarr'"):
        convert_dataset(tmp_path, tmp_path / "new")


def test_samples_of_different_shapes(tmp_path: Path) -> None:
    for count, extent in ((2, 8), (1, 16)):
        generate_ct(tmp_path / f"{extent}", CTOptions(count=count, shape=(8, extent, 8)))
    one, two = Manifest.load(tmp_path / "8"), Manifest.load(tmp_path / "16")
    (tmp_path / "16" / two.files[0].path).rename(tmp_path / "8" / "large.hdf5")
    files = (*one.files, module.replace(two.files[0], path="large.hdf5"))
    module.replace(one, files=files, sample_shape=two.sample_shape).save(tmp_path / "8")
    for form, layout in itertools.product(("zarr", "numpy"), ("keep", "channel-first")):
        convert_dataset(tmp_path / "8", tmp_path / form / layout, ConvertOptions(form, layout))
        equal(tmp_path / "8", tmp_path / form / layout)


def test_what_a_format_can_not_hold(universes: Path, tmp_path: Path) -> None:
    """HDF5 has a limit of 64 kB for an attribute."""
    convert_dataset(universes, tmp_path / "a", ConvertOptions("numpy"))
    manifest = Manifest.load(tmp_path / "a")
    first = tmp_path / "a" / manifest.files[0].path
    (first / "texts.json").write_text(json.dumps({"long": "x" * 100_000}))
    size, checksum = module.checksum_of_file(first)
    files = (module.replace(manifest.files[0], bytes=size, checksum=checksum), *manifest.files[1:])
    module.replace(manifest, files=files).save(tmp_path / "a")
    with pytest.raises(DataError, match=r"univ_000000_0_0_0: can't be stored as hdf5: "):
        convert_dataset(tmp_path / "a", tmp_path / "b", ConvertOptions("hdf5"))


def test_booleans_are_not_written_as_an_enumeration(tmp_path: Path) -> None:
    for array, values in (("full", np.ones((1, 4, 4, 4), bool)), ("unitPar", np.ones(2))):
        (tmp_path / "a" / "0").mkdir(parents=True, exist_ok=True)
        np.save(tmp_path / "a" / "0" / f"{array}.npy", values)
    index_dataset(tmp_path / "a", IndexOptions(validation=0))
    convert_dataset(tmp_path / "a", tmp_path / "b", ConvertOptions("zarr"))
    equal(tmp_path / "a", tmp_path / "b")
    with pytest.raises(DataError, match="'full' holds booleans, and HDF5 files hold numbers alone"):
        convert_dataset(tmp_path / "a", tmp_path / "c", ConvertOptions("hdf5"))
