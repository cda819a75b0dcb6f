"""Training runs for tests."""

from __future__ import annotations

from dataclasses import replace

from pydist.mesh import Mesh
from pydist.train.config import Config
from pydist.train.run import Result, train


def change(config: Config, **tables) -> Config:
    """`change(config, train={"steps": 3})`: a copy with other values."""
    changed = {name: replace(getattr(config, name), **values) for name, values in tables.items()}
    return replace(config, **changed)


def job(world, config: Config, data: int = 1, spatial=(1, 1, 1), listeners=()) -> Result:
    """One rank of a run, for `run_local`."""
    return train(config, Mesh(world, data, spatial, seed=config.train.seed), listeners)
