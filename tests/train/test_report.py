"""Tests of a run's tables and pictures."""

from __future__ import annotations

import csv
import math
import shutil

import h5py
import numpy as np
import pytest

from pydist import Mesh, layout_for_sample, run_local
from pydist.data import IndexOptions, Manifest, ShardDataset, index_dataset
from pydist.errors import DataError, DiskError, UsageError
from pydist.grid import SPATIAL_AXES
from pydist.train import report
from pydist.train.config import MeshConfig, SharesConfig

NAMES = ("Omega_m", "sigma_8", "N_spec", "H_0")


@pytest.mark.parametrize("spatial", [(1, 1, 1), (2, 1, 1), (3, 2, 1), (2, 3, 5)])
@pytest.mark.parametrize("shared", [False, True], ids=["even", "shares"])
def test_blocks_are_those_of_the_ranks_without_overlap(spatial, shared):
    covered = np.zeros((8, 7, 6), dtype=int)
    shares = {}
    if shared:
        shares = {a: tuple(range(1, n + 1)) for a, n in zip(SPATIAL_AXES, spatial, strict=True)}
    given = MeshConfig(spatial=spatial, shares=SharesConfig(**shares))
    blocks = report.blocks_of(covered.shape, given)
    assert len(blocks) == math.prod(spatial)
    for block in blocks:
        covered[tuple(slice(lo, hi) for lo, hi in zip(block.lo, block.hi, strict=True))] += 1
    assert (covered == 1).all()

    def layout(world):
        return layout_for_sample(Mesh(world, 1, spatial, shares=shares), (1, 1, *covered.shape))

    boxes = run_local(layout, len(blocks))[0].boxes
    assert [(b.lo, b.hi) for b in blocks] == [(b.lo[2:], b.hi[2:]) for b in boxes]


def test_predictions_are_a_table_with_a_row_a_sample(tmp_path):
    predicted, true = np.random.default_rng(0).normal(size=(2, 3, 4))
    path = tmp_path / "predictions.csv"
    report.write_predictions(path, NAMES, predicted, true)
    with path.open() as file:
        header, *rows = csv.reader(file)
    assert header[0] == "true Omega_m"
    assert header[7] == "predicted H_0"
    values = np.array(rows, dtype=float)
    assert (values[:, :4] == true).all()
    assert (values[:, 4:] == predicted).all()
    with pytest.raises(DiskError, match="No such file"):
        report.write_predictions(tmp_path / "no" / "where.csv", NAMES, predicted, true)


@pytest.mark.parametrize("validated", [True, False])
def test_the_picture_is_drawn_with_and_without_a_validation_set(tmp_path, universes, validated):
    if validated:
        rows = np.zeros((3, 4))
        report.write_predictions(tmp_path / report.PREDICTIONS_FILE, NAMES, rows, rows)
    curves = {"4 ranks": {1: 0.5, 2: 0.25}, "1 rank": {1: 0.5, 2: 0.25}}
    data = ShardDataset(universes)
    picture = report.draw_run(tmp_path, curves, data, MeshConfig(spatial=(2, 1, 1)))
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 20_000


def test_signed_samples_are_drawn(tmp_path):
    numbers = np.random.default_rng(0)
    for index in range(2):
        with h5py.File(tmp_path / f"{index}.h5", "w") as file:
            file["full"] = numbers.normal(size=(1, 4, 4, 4)).astype("float32") - 2
            file["unitPar"] = np.zeros(1, dtype="float32")
    index_dataset(tmp_path, IndexOptions())
    curves = {"1 rank": {1: 0.5, 2: 0.25}}
    picture = report.draw_run(tmp_path, curves, ShardDataset(tmp_path), MeshConfig())
    assert picture.stat().st_size > 20_000


def test_a_run_without_a_good_sample_is_drawn_without_it(tmp_path):
    for index in range(2):
        with h5py.File(tmp_path / f"{index}.h5", "w") as file:
            file["full"] = np.ones((1, 4, 4, 4), "float32")
            file["unitPar"] = np.zeros(1, dtype="float32")
    index_dataset(tmp_path, IndexOptions())
    for index in range(2):
        with h5py.File(tmp_path / f"{index}.h5", "r+") as file:
            file["full"][0, 0, 0, 0] = np.nan
    picture = report.draw_run(tmp_path, {"1 rank": {1: 0.5}}, ShardDataset(tmp_path), MeshConfig())
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_missing_plot_library_is_named_with_the_remedy(tmp_path, universes, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UsageError, match=r"pip install 'pydist\[plot\]'"):
        report.draw_run(tmp_path, {}, ShardDataset(universes), MeshConfig())


def test_a_run_from_links_that_are_allowed_is_drawn(tmp_path, universes):
    folder = tmp_path / "links"
    shutil.copytree(universes, folder)
    for file in Manifest.load(folder).files:
        (folder / file.path).rename(tmp_path / file.path)
        (folder / file.path).symlink_to(tmp_path / file.path)
    curves, data = {"1 rank": {1: 0.5, 2: 0.25}}, ShardDataset(folder, allow_roots=[tmp_path])
    report.draw_run(tmp_path, curves, data, MeshConfig())
    with pytest.raises(DataError, match="outside allow_roots"):
        report.draw_run(tmp_path, curves, ShardDataset(folder), MeshConfig())
