"""A data set of universes, and a folder with a configuration, for tests of commands that train."""

from __future__ import annotations

from pathlib import Path

import pytest

from pydist.data import UniverseOptions, generate_universes


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "data"
    generate_universes(folder, UniverseOptions(count=6, width=32, box_width=32, validation=0.3))
    return folder


@pytest.fixture
def place(data, tmp_path, monkeypatch, request) -> Path:
    """Returns the current folder: a space in its name, the module's configuration, and data."""
    folder = tmp_path / "a place"
    folder.mkdir()
    (folder / "data").symlink_to(data)
    (folder / "run.toml").write_text(request.module.CONFIG)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return folder
