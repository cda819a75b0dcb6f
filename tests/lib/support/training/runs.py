"""Training runs for tests."""

from __future__ import annotations

from dataclasses import fields, replace

from pydist.mesh import Mesh
from pydist.train import config_io
from pydist.train.config import Config
from pydist.train.run import Result, train


def change(config: Config, **tables) -> Config:
    """`change(config, train={"steps": 3})`: a copy with other values."""
    changed = {}
    for table, values in tables.items():
        before = getattr(config, table)
        kind = config_io.CHOSEN[table].get(values["name"]) if "name" in values else type(before)
        own = {f.name for f in fields(kind)} & {f.name for f in fields(before)} - {"name"}
        changed[table] = kind(**{name: getattr(before, name) for name in own} | values)
    return replace(config, **changed)


def job(world, config: Config, data: int = 1, spatial=(1, 1, 1), listeners=()) -> Result:
    """One rank of a run, for `run_local`."""
    return train(config, Mesh(world, data, spatial, seed=config.train.seed), listeners)
