"""Tests of sets of universes on disk: layouts, determinism, atomicity."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest

from pydist.data import Manifest, UniverseOptions, generate_universes
from pydist.data import publish as publishing
from pydist.data.convert import convert_dataset
from pydist.data.index import verify_dataset
from pydist.data.options import ConvertOptions
from pydist.data.universes import generate
from pydist.data.universes.options import PARAMETER_BOXES, TARGET_NAMES
from pydist.data.universes.simulate import choose_array_module, draw_parameters, simulate
from pydist.errors import DiskError, UsageError
from support.data.damage import flip_bit, interrupt_at_the_end

SMALL = UniverseOptions(count=2, width=8, seed=3)


def contents(root: Path) -> dict[str, bytes]:
    files = (p for p in sorted(root.rglob("*")) if p.is_file())
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in files}


def test_each_channel_counts_all_particles_of_the_same_phases() -> None:
    counts = simulate(UniverseOptions(width=24, box_width=48), 0)
    assert counts.dtype == np.int16
    assert counts.shape == (4, 48, 48, 48)
    assert [int(c.sum(dtype=int)) for c in counts] == [48**3] * 4
    variances = counts.var(axis=(1, 2, 3))
    assert np.all(np.diff(variances) < 0), "less structure the earlier"
    smooth = counts.reshape(4, 8, 6, 8, 6, 8, 6).mean(axis=(2, 4, 6)).reshape(4, -1)
    assert np.corrcoef(smooth).min() > 0.8, "the same structures at all redshifts"


def test_typical_counts_of_the_large_box() -> None:
    """In 128^3 cells of 4 Mpc/h the count variances match those the formulas' authors measured."""
    options = UniverseOptions(width=128, box_width=128, cell=4.0)
    variance = np.mean([simulate(options, i).var(axis=(1, 2, 3)) for i in range(2)], axis=0)
    np.testing.assert_allclose(variance[[3, 2]], [0.60, 1.18], rtol=0.25)
    np.testing.assert_allclose(variance[[1, 0]], [2.13, 2.52], rtol=0.25)


def test_public_layout(public_universes: Path) -> None:
    with h5py.File(public_universes / "univ_000000.hdf5") as file:
        assert file["full"].shape == (16, 16, 16, 4)
        assert file["full"].dtype == np.int16
        assert file["full"].chunks is None
        assert int(file["full"][...].sum(dtype=int)) == 4 * 16**3
        np.testing.assert_array_equal(file["redshifts"], np.float32([0, 0.5, 1.5, 3]))
        assert [n.decode() for n in file["namePar"]] == list(TARGET_NAMES)
        center, half = np.array(PARAMETER_BOXES["wide"]).T
        np.testing.assert_allclose(file["physPar"], center + half * file["unitPar"][:], rtol=1e-6)
        assert {"dataset_tag", "seed9", "universe_tag"} <= set(file.attrs)
        assert 10**8 <= file.attrs["seed9"] < 10**9


def test_samples_are_cut_from_the_box(universes: Path, public_universes: Path) -> None:
    with h5py.File(public_universes / "univ_000001.hdf5") as file:
        box, unit = file["full"][...], file["unitPar"][...]
    for z, y, x in itertools.product(range(2), repeat=3):
        with h5py.File(universes / f"univ_000001_{z}_{y}_{x}.hdf5") as file:
            part = box[8 * z : 8 * z + 8, 8 * y : 8 * y + 8, 8 * x : 8 * x + 8]
            np.testing.assert_array_equal(file["full"], np.moveaxis(part, -1, 0))
            np.testing.assert_array_equal(file["unitPar"], unit)


def test_manifest_describes_the_files(universes: Path) -> None:
    manifest = Manifest.load(universes)
    assert manifest.splits == {"train": 24, "val": 8}
    assert manifest.sample_shape == (4, 8, 8, 8)
    assert manifest.target_names == TARGET_NAMES
    assert "own" in manifest.origin["parameter_box"]["choice"]
    samples, logs = [], []
    for entry in manifest.files:
        path = universes / entry.path
        assert path.stat().st_size == entry.bytes
        with h5py.File(path) as file:
            samples.append(file["full"][...].astype(float))
        assert entry.means == (pytest.approx(samples[-1].mean()),)
        if entry.split == "train":
            logs.append(np.log1p(samples[-1]))
    np.testing.assert_allclose(manifest.log1p_mean, np.mean(logs, axis=(0, 2, 3, 4)), rtol=1e-12)
    np.testing.assert_allclose(manifest.log1p_std, np.std(logs, axis=(0, 2, 3, 4)), rtol=1e-9)
    of_universe = {f.path[:11]: f.split for f in manifest.files}
    assert sorted(of_universe.values()) == ["train", "train", "train", "val"]


def test_equal_options_give_equal_files_on_any_number_of_workers(tmp_path: Path) -> None:
    generate_universes(tmp_path / "one", SMALL)
    generate_universes(tmp_path / "two", UniverseOptions(count=2, width=8, seed=3, workers=2))
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


def test_universe_depends_on_seed_and_index_alone() -> None:
    more = UniverseOptions(count=9, width=8, seed=3, validation=0.5)
    np.testing.assert_array_equal(simulate(SMALL, 1), simulate(more, 1))
    assert not np.array_equal(simulate(SMALL, 0), simulate(SMALL, 1))
    other = UniverseOptions(count=2, width=8, seed=4)
    assert not np.array_equal(draw_parameters(SMALL, 0).unit, draw_parameters(other, 0).unit)


@pytest.mark.parametrize("box", ["wide", "narrow"])
def test_parameters_fill_their_box(box: str) -> None:
    options = UniverseOptions(parameters=box)
    drawn = [draw_parameters(options, i) for i in range(400)]
    unit = np.array([p.unit for p in drawn])
    assert abs(unit).max() <= 1
    assert abs(unit.mean(0)).max() < 5 * np.sqrt(1 / 3 / 400)
    np.testing.assert_allclose(unit.var(0), 1 / 3, rtol=0.2)
    assert all(p.cosmology.omega_m > 0.15 for p in drawn)


@pytest.mark.parametrize("layout", ["channel-first", "cosmoflow"])
@pytest.mark.parametrize("compression", ["none", "gzip"])
def test_chunks_carry_checksums(tmp_path: Path, layout: str, compression: str) -> None:
    options = UniverseOptions(
        count=1, width=8, seed=3, layout=layout, storage="chunked", compression=compression
    )
    manifest = generate_universes(tmp_path, options)
    with h5py.File(tmp_path / manifest.files[0].path) as file:
        assert file["full"].fletcher32
        assert file["full"].compression == (None if compression == "none" else "gzip")
        counts = file["full"][...]
        side = min(32, counts.shape[1])
        each = (side, side, side)
        assert file["full"].chunks == ((*each, 4) if layout == "cosmoflow" else (1, *each))
    if layout == "channel-first":
        counts = np.moveaxis(counts, 0, -1)
    expected = np.moveaxis(simulate(options, 0), 0, -1)
    np.testing.assert_array_equal(counts, expected[: len(counts), : len(counts), : len(counts)])


def test_cloud_in_cell_as_float32(tmp_path: Path) -> None:
    options = UniverseOptions(count=1, width=8, box_width=8, assignment="cic", dtype="float32")
    manifest = generate_universes(tmp_path, options)
    assert manifest.dtype == "float32"
    assert manifest.files[0].means[0] == pytest.approx(1, rel=1e-6)


def test_interrupted_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generate_universes(tmp_path / "whole", SMALL)
    made: list[int] = []

    def fail_at_the_second(options: UniverseOptions, index: int) -> np.ndarray:
        made.append(index)
        if index == 1 and len(made) == 2:
            raise KeyboardInterrupt
        return simulate(options, index)

    monkeypatch.setattr(generate, "simulate", fail_at_the_second)
    with pytest.raises(KeyboardInterrupt):
        generate_universes(tmp_path / "parts", SMALL)
    assert not (tmp_path / "parts" / "dataset.json").exists()
    told: list[tuple[int, int, str]] = []
    generate_universes(tmp_path / "parts", SMALL, lambda *what: told.append(what))
    assert made == [0, 1, 1], "universe 0 was kept"
    assert told == [(1, 2, "universe 0 kept"), (2, 2, "universe 1 made")]
    assert contents(tmp_path / "parts") == contents(tmp_path / "whole")


def test_damaged_leftover_is_made_again(tmp_path: Path) -> None:
    generate_universes(tmp_path, SMALL)
    before = contents(tmp_path)
    victim = tmp_path / "univ_000001_0_1_0.hdf5"
    victim.write_bytes(victim.read_bytes()[:300])
    (tmp_path / "univ_000000_0_0_0.hdf5").unlink()
    left = tmp_path / ".univ_000000_0_0_0.hdf5.tmp-00000000-1-1-01234567"
    left.write_bytes(b"left by a run that was killed long ago")
    os.utime(left, (0, 0))
    generate_universes(tmp_path, SMALL)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("layout", ["channel-first", "cosmoflow"])
@pytest.mark.parametrize("complete", [True, False], ids=["complete", "interrupted"])
def test_a_bit_that_flipped_after_an_earlier_run_is_not_blessed(tmp_path, layout, complete):
    options = UniverseOptions(count=2, width=8, box_width=8, seed=3, layout=layout)
    generate_universes(tmp_path / "whole", options)
    root = tmp_path / "again"
    with nullcontext() if complete else pytest.raises(KeyboardInterrupt):
        generate_universes(root, options, None if complete else interrupt_at_the_end)
    assert (root / "dataset.json").exists() == complete
    flip_bit(next(root.glob("univ_000001*.hdf5")), "full")
    told: list[str] = []
    generate_universes(root, options, lambda done, total, what: told.append(what))
    assert told == ["universe 0 kept", "universe 1 made"]
    assert contents(root) == contents(tmp_path / "whole")


def test_other_data_is_not_overwritten_unasked(tmp_path: Path) -> None:
    generate_universes(tmp_path, SMALL)
    with pytest.raises(UsageError, match="made of other files or with other options"):
        generate_universes(tmp_path, UniverseOptions(count=2, width=8, seed=4))
    other = UniverseOptions(count=1, width=8, seed=4, layout="cosmoflow", overwrite=True)
    generate_universes(tmp_path, other)
    index, *others = sorted(contents(tmp_path))[:1] + sorted(p.name for p in tmp_path.iterdir())
    assert index.startswith("dataset-")
    assert others == [index.partition("/")[0], "dataset.json", "univ_000000.hdf5"]


def test_a_set_grows_and_does_not_shrink_unasked(tmp_path: Path) -> None:
    generate_universes(tmp_path, SMALL)
    generate_universes(tmp_path, replace(SMALL, count=3))
    before = contents(tmp_path)
    with pytest.raises(UsageError, match=r"8 files of more universes than count=2; overwrite"):
        generate_universes(tmp_path, SMALL)
    assert contents(tmp_path) == before
    generate_universes(tmp_path, replace(SMALL, overwrite=True))
    assert verify_dataset(tmp_path) == []
    assert len(list(tmp_path.glob("univ_*"))) == 16


def test_an_interrupted_run_leaves_no_manifest_with_files_of_two_data_sets(tmp_path: Path) -> None:
    def stop(done: int, total: int, what: str) -> None:
        raise KeyboardInterrupt

    folders = tmp_path / "folders"
    generate_universes(tmp_path / "first", UniverseOptions(count=3, width=8))
    convert_dataset(tmp_path / "first", folders, ConvertOptions("numpy"))
    other = UniverseOptions(count=2, width=8, seed=4, overwrite=True)
    for root in (tmp_path / "first", folders):
        with pytest.raises(KeyboardInterrupt):
            generate_universes(root, other, stop)
        assert not (root / "dataset.json").exists()
        manifest = generate_universes(root, other)
        assert verify_dataset(root) == []
        kept = {file.path for file in manifest.files} | {"dataset.json"}
        assert {path.name for path in root.iterdir() if path.suffix != ".index"} == kept


def test_full_disk_leaves_nothing_under_a_final_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: Iterator[None] = iter([None] * 3)

    def full_at_the_fourth(descriptor: int) -> None:
        if next(synced, 1) is not None:
            raise OSError(28, os.strerror(28))

    monkeypatch.setattr(publishing.os, "fsync", full_at_the_fourth)
    with pytest.raises(
        DiskError, match=r"univ_000000_0_0_1\.hdf5: could not write \d+ bytes: No sp"
    ):
        generate_universes(tmp_path, SMALL)
    left = [p.name for p in tmp_path.iterdir()]
    assert "dataset.json" not in left
    assert not [name for name in left if ".tmp-" in name]


def test_too_small_disk_is_noticed_before_work(tmp_path: Path) -> None:
    with pytest.raises(DiskError, match=r"\d+ bytes are needed and \d+ are free"):
        generate_universes(tmp_path, UniverseOptions(count=10**9, width=64))


def test_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("")
    with pytest.raises(DiskError, match="x: it is a file, and a folder is needed"):
        generate_universes(tmp_path / "x", SMALL)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"count": 0}, "at least 1 universe"),
        ({"width": 32, "box_width": 80}, "possible are 32, 64, 96"),
        ({"width": 32, "box_width": 16}, "not a multiple"),
        ({"validation": 1.0}, "fraction"),
        ({"redshifts": ()}, "redshifts"),
        ({"redshifts": (-1.0,)}, "redshifts"),
        ({"assignment": "cic"}, "float32"),
        ({"compression": "gzip"}, "chunked"),
        ({"cell": 0.0}, "Mpc/h"),
        ({"workers": 0}, "at least 1"),
        ({"seed": -1}, "0 or more"),
    ],
)
def test_impossible_options_are_refused(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        UniverseOptions(**wrong)


def test_gpu_is_refused_where_there_is_none() -> None:
    try:
        import cupy
    except ImportError:
        with pytest.raises(UsageError, match="CuPy is not installed"):
            choose_array_module("gpu")
        assert choose_array_module("auto") is np
    else:
        assert choose_array_module("auto") in (cupy, np)


def test_universes_need_no_torch() -> None:
    script = "import sys, pydist.data.universes; sys.exit('torch' in sys.modules)"
    folder = Path(__file__).parent  # not the checkout's, where sources hide the package
    assert subprocess.run([sys.executable, "-c", script], check=False, cwd=folder).returncode == 0


def test_manifest_is_json_with_a_version(universes: Path) -> None:
    record = json.loads((universes / "dataset.json").read_text())
    assert (record["format"], record["version"]) == ("pydist-dataset", 2)
