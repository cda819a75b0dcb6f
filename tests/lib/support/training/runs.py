"""Training runs for tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from pydist.comm import Transport
from pydist.mesh import Mesh
from pydist.train import config_io
from pydist.train.config import Config
from pydist.train.log import Listener
from pydist.train.run import Result, train


def change(config: Config, **tables: Any) -> Config:
    """Returns a copy with other values, as in `change(config, train={"steps": 3})`."""
    changed = {}
    for table, values in tables.items():
        before = getattr(config, table)
        kind = config_io.CHOSEN[table].get(values["name"]) if "name" in values else type(before)
        own = {f.name for f in fields(kind)} & {f.name for f in fields(before)} - {"name"}
        changed[table] = kind(**{name: getattr(before, name) for name in own} | values)
    return replace(config, **changed)


def job(
    world: Transport,
    config: Config,
    data: int = 1,
    spatial: Sequence[int] = (1, 1, 1),
    listeners: Sequence[Listener] = (),
) -> Result:
    """Runs one rank of a training run, for `run_local`."""
    axes, shares = {"channel": config.mesh.channel}, config.mesh.shares.given
    mesh = Mesh(world, data, spatial, config.train.seed, axes=axes, shares=shares)
    return train(config, mesh, listeners)
