"""Fixtures of small data sets and runs on them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pydist.backend import conv_tuning
from pydist.data import UniverseOptions, generate_universes
from pydist.data.medical.generate import generate_ct
from pydist.data.medical.options import CTOptions
from pydist.train.config import Config
from pydist.train.run import Result
from support.equivalence import on_one_core
from support.training.runs import alone, slow_run, universe_run


@pytest.fixture(autouse=True)
def _on_one_core() -> Iterator[None]:
    with on_one_core():
        yield


@pytest.fixture(scope="session")
def universes(tmp_path_factory) -> Path:
    """Makes 6 training and 3 validation samples of 32³, which 2 groups can't share evenly."""
    folder = tmp_path_factory.mktemp("universes")
    generate_universes(folder, UniverseOptions(count=9, width=32, box_width=32, validation=1 / 3))
    return folder


@pytest.fixture(scope="session")
def volumes(tmp_path_factory) -> Path:
    """Makes four training and three validation volumes."""
    folder = tmp_path_factory.mktemp("volumes")
    generate_ct(folder, CTOptions(count=7, shape=(16, 8, 8), validation=3 / 7))
    return folder


@pytest.fixture
def config(universes, tmp_path) -> Config:
    """Returns a run of the smaller network: two epochs of two steps with three samples each."""
    return universe_run(universes, tmp_path / "run")


@pytest.fixture(scope="session")
def whole_run(universes, tmp_path_factory) -> tuple[Config, Result]:
    """Returns a run at a low rate after it has trained on one rank, and its result."""
    config = slow_run(universes, tmp_path_factory.mktemp("whole") / "run")
    return config, alone(config)


@pytest.fixture
def tuned(monkeypatch, tmp_path) -> None:
    """Replaces measurements so that each run and each stage finds other kernels fastest."""
    monkeypatch.setenv("PYDIST_TUNE", "1")
    monkeypatch.setenv("PYDIST_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(conv_tuning, "_MEASURED_FLOPS", 0)
    seconds = iter(range(1, 1 << 20))
    monkeypatch.setattr(conv_tuning.Visits, "__call__", lambda self, name: 1.0 / next(seconds))
