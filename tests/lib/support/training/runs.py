"""Configures and runs training for tests, and compares the final states."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from pydist.comm import LocalTransport, Transport, run_local
from pydist.mesh import Mesh
from pydist.stages import Stages
from pydist.train import checkpoint, config_io, log
from pydist.train.config import Config, CosmoFlowConfig, DataConfig, OutputConfig, TrainConfig
from pydist.train.log import Listener
from pydist.train.ranks import check_ranks, ranks_a_sample, stage_arguments
from pydist.train.run import Result, train


def universe_run(universes: Path, folder: Path) -> Config:
    """Returns a run of the smaller CosmoFlow, which has dropout: two epochs of batches of three."""
    return Config(
        model=CosmoFlowConfig(variant="mlperf", width=32),
        data=DataConfig(path=universes, normalize="log1p"),
        train=TrainConfig(epochs=2, batch=3),
        output=OutputConfig(folder=folder, plot=False),
    )


def slow_run(universes: Path, folder: Path) -> Config:
    """Returns a run at a low rate.

    Adam's steps depend on the signs of gradients: at a high rate, errors of rounding grow in them.
    """
    return change(universe_run(universes, folder), optimizer={"lr": 1e-4})


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
    axes, shares = config.mesh.axes, config.mesh.shares.given
    mesh = Mesh(world, data, spatial, config.train.seed, axes=axes, shares=shares)
    return train(config, mesh, listeners)


def alone(config: Config, listeners: Sequence[Listener] = ()) -> Result:
    """Runs training on one rank in this thread."""
    return job(LocalTransport(), config, listeners=listeners)


def staged_job(world: Transport, config: Config, listeners: Sequence[Listener] = ()) -> Result:
    """Runs one rank of a training run in stages, for `run_local`."""
    check_ranks(config, world.size)
    stages = Stages(
        world, stage_arguments(config.mesh, world.size), config.train.seed, config.mesh.order
    )
    return train(config, stages, listeners)


def in_stages(config: Config, listeners: Sequence[Listener] = ()) -> list[Result]:
    """Runs training on the ranks that its stages need; returns the results in rank order."""
    ranks = ranks_a_sample(config.mesh) * (config.mesh.data or 1)
    return run_local(staged_job, ranks, config, listeners, timeout=240)


def events(config: Config, *kinds: str) -> list[dict[str, Any]]:
    """Returns the events of some kinds in a run's log."""
    path = config.output.folder / "log.jsonl"
    return [event for event in log.read(path) if event["event"] in kinds]


def curve(config: Config) -> list[float]:
    """Returns the losses in a run's log."""
    return list(log.losses(config.output.folder / "log.jsonl").values())


def last_state(config: Config) -> dict[str, Any]:
    """Returns the parts of a run's last checkpoint."""
    return checkpoint.read(checkpoint.complete(config.output.folder / "ckpt")[-1])


def assert_same_bits(one: Any, other: Any) -> None:
    """Asserts that nested states hold the same tensors, bit for bit, and the same values."""
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same_bits(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            assert_same_bits(a, b)
    else:
        assert one == other
