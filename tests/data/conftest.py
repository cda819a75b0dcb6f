"""Fixtures of small data sets, which are made once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest

from pydist.data import UniverseOptions, generate_universes
from pydist.data.manifest import DataFile, Manifest
from pydist.data.medical.generate import generate_ct
from pydist.data.medical.options import CTOptions


@pytest.fixture(scope="session")
def universes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes 4 universes of 16^3, cut into samples of 8^3, channel first: 24 train, 8 val."""
    root = tmp_path_factory.mktemp("universes")
    generate_universes(root, UniverseOptions(count=4, width=8, seed=3))
    return root


@pytest.fixture(scope="session")
def public_universes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes the same universes in the layout of the public data."""
    root = tmp_path_factory.mktemp("public")
    generate_universes(root, UniverseOptions(count=4, width=8, seed=3, layout="cosmoflow"))
    return root


@pytest.fixture(scope="session")
def volumes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes 7 volumes with labels."""
    root = tmp_path_factory.mktemp("volumes")
    generate_ct(root, CTOptions(count=7, shape=(16, 8, 24), validation=0))
    return root


@pytest.fixture
def write_samples(tmp_path: Path) -> Callable[..., Path]:
    """Returns a function that writes arrays [C, D, H, W] as a data set, one file each."""

    def write(samples: list[np.ndarray], targets: int = 4, **storage: object) -> Path:
        files = []
        for i, sample in enumerate(samples):
            path = tmp_path / f"sample_{i}.hdf5"
            with h5py.File(path, "w") as file:
                file.create_dataset("full", data=sample, **storage)
                file["unitPar"] = np.full(targets, i, dtype=np.float32)
            mean = float(np.nan_to_num(sample).mean())
            files.append(
                DataFile(path.name, "train", path.stat().st_size, "", ((0, 0, 0),), (mean,))
            )
        Manifest(
            sample_shape=samples[0].shape,
            axes="CDHW",
            dtype=samples[0].dtype.name,
            files=tuple(files),
            target_names=tuple(f"p{i}" for i in range(targets)),
        ).save(tmp_path)
        return tmp_path

    return write


@pytest.fixture
def edit_manifest() -> Callable[..., None]:
    """Returns a function that changes top-level entries of a `dataset.json`."""

    def edit(root: Path, **entries: object) -> None:
        path = root / "dataset.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))

    return edit
