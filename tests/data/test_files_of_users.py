"""Tests that commands which make data sets neither replace nor remove files of a user."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest

from pydist.data import (
    ConvertOptions,
    CTOptions,
    IndexOptions,
    UniverseOptions,
    convert_dataset,
    generate_ct,
    generate_universes,
    index_dataset,
)
from pydist.errors import UsageError

MADE = {"convert": "ct_0000.hdf5", "ct": "ct_0000.hdf5", "universes": "univ_000000_0_0_0.hdf5"}
"""The first file that each writes."""


@pytest.fixture(scope="module")
def writers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Callable[..., object]]:
    source, ct = tmp_path_factory.mktemp("source"), {"count": 1, "shape": (8, 8, 8)}
    generate_ct(source, CTOptions(**ct))
    small = {"count": 1, "width": 8, "box_width": 8, "validation": 0}
    return {
        "convert": lambda root, **kw: convert_dataset(source, root, ConvertOptions("hdf5", **kw)),
        "ct": lambda root, **kw: generate_ct(root, CTOptions(**ct, **kw)),
        "universes": lambda root, **kw: generate_universes(root, UniverseOptions(**small, **kw)),
    }


def sample(path: Path) -> None:
    with h5py.File(path, "w") as file:
        file["full"], file["unitPar"] = np.ones((1, 4, 4, 4), "float32"), np.zeros(2)


def contents(root: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("mine", ["mine.hdf5", None])
def test_files_that_were_indexed_in_place_stay(
    writers: dict[str, Callable[..., object]], tmp_path: Path, name: str, mine: str | None
) -> None:
    file = tmp_path / (mine or MADE[name])
    sample(file)
    index_dataset(tmp_path, IndexOptions(validation=0))
    before = contents(tmp_path)
    with pytest.raises(UsageError, match=r"dataset.json describes files that no run has made"):
        writers[name](tmp_path, overwrite=True)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("overwrite", [False, True])
def test_files_of_the_same_names_are_not_replaced(
    writers: dict[str, Callable[..., object]], tmp_path: Path, name: str, overwrite: bool
) -> None:
    file = tmp_path / MADE[name]
    file.symlink_to("nowhere") if overwrite else file.write_text("precious")
    with pytest.raises(UsageError, match=f"{MADE[name]} would be replaced, and no run has made it"):
        writers[name](tmp_path, overwrite=overwrite)
    assert [path.name for path in tmp_path.iterdir()] == [MADE[name]]
    file.unlink()
    writers[name](tmp_path, overwrite=overwrite)
    writers[name](tmp_path, overwrite=overwrite)
