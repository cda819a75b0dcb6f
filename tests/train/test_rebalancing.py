"""Tests of runs whose parts change between epochs, as a rank is or becomes slow."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn

from pydist import Mesh, ShardedTensor, run_local
from pydist.errors import NotSupported, UsageError
from pydist.train import config_io, log
from pydist.train.config import Config, MeshConfig, SharesConfig
from pydist.train.job import Job
from pydist.train.parts import WARMUP
from pydist.train.ranks import check_settings
from pydist.train.rebalancing import LEAST_GAIN, LEAST_STEPS, Rebalancing
from support.equivalence import error
from support.training.runs import change, events, job, last_state


@pytest.fixture
def slow_rank() -> Any:
    """Makes rank 1 slow: 2 ms more for each plane of its part, in each convolution."""

    def wait(module: nn.Module, args: tuple[Any, ...], _: Any) -> None:
        if isinstance(module, nn.Conv3d) and isinstance(args[0], ShardedTensor):
            x = args[0]
            if x.mesh.rank == 1:
                time.sleep(2e-3 * x.to_local().shape[2])

    handle = nn.modules.module.register_module_forward_hook(wait)
    yield
    handle.remove()


@pytest.mark.usefixtures("slow_rank")
def test_a_slow_rank_gets_a_smaller_part_and_the_run_goes_on(config, tmp_path):
    config = change(config, train={"batch": 1, "epochs": 4, "validate_every": 4})
    even = change(config, output={"folder": tmp_path / "even"})
    config = change(config, mesh={"rebalance": "depth", "spatial": (2, 1, 1)})
    run_local(job, 2, config, 1, (2, 1, 1))
    run_local(job, 2, even, 1, (2, 1, 1))
    first, *_ = found = events(config, "rebalance")
    assert first["axis"] == "depth"
    assert first["sizes"] == [16, 16]
    assert first["busy"][1] > first["busy"][0]
    assert first["next_sizes"][1] < 16
    written = config_io.load(config.output.folder / "config.toml")
    assert written.mesh.shares.given == {"depth": tuple(map(float, found[-1]["next_sizes"]))}
    assert [event["step"] for event in events(config, "step")] == [*range(1, 25)]
    assert len(events(config, "validation")) == 1
    assert [*log.read(config.output.folder / "log.jsonl")][-1]["status"] == "done"
    one, other = (last_state(each)["model"] for each in (config, even))
    for name, value in one.items():
        assert error(value, other[name]) < 1e-3, name  # 24 steps in float32


def decided(sizes: tuple[int, ...], busy: tuple[float, ...], steps: int) -> Any:
    """Returns what is decided for parts whose ranks are busy for so many seconds of a step."""

    def body(world: Any) -> tuple[bool, Any]:
        shares = {"channel": tuple(map(float, sizes))}
        mesh = MeshConfig(channel=len(sizes), rebalance="channel")
        config = change(Config(mesh=mesh), mesh={"shares": SharesConfig(**shares)})
        mesh = Mesh(world, axes={"channel": len(sizes)}, shares=shares)
        found = Rebalancing(config, Job.of(mesh), torch.device("cpu"))
        for step in range(steps):
            late = 10.0 if step < WARMUP else 0.0  # autotuning does not count
            found.note(busy[world.rank] + late + 5, {"halo": 2.0, "gradients": 3.0, "compute": 1.0})
        decision = found.decide()
        return decision, found.chosen

    decisions = run_local(body, len(sizes))
    assert len(set(decisions)) == 1
    return decisions[0]


ENOUGH = WARMUP + LEAST_STEPS


def test_the_decision():
    assert decided((50, 50), (1.0, 3.0), ENOUGH) == (True, (75, 25))
    assert decided((80, 20), (4.0, 1.0), ENOUGH) == (True, (50, 50))
    assert decided((25, 50, 25), (1.0, 1.0, 1.0), ENOUGH) == (False, None)
    just = 1 + LEAST_GAIN  # the best parts save half of the excess
    assert decided((50, 50), (1.0, just), ENOUGH) == (False, None)
    assert decided((50, 50), (1.0, 3.0), ENOUGH - 1) == (False, None), "too few steps"


def test_parts_that_did_not_help_are_taken_back():
    def body(world: Any) -> list[Any]:
        config = Config(mesh=MeshConfig(channel=2, rebalance="channel"))
        before, found = None, []
        for late in (3.0, 4.0, 5.0):  # rank 1 is busier with each part
            shares = config.mesh.shares.given
            job = Job.of(Mesh(world, axes={"channel": 2}, shares=shares))
            each = Rebalancing(config, job, torch.device("cpu"), before)
            for _ in range(ENOUGH):
                each.note(late if world.rank else 1.0, {})
            found.append((each.decide(), each.sizes, each.chosen))
            if each.chosen is None:
                break
            before, (config, _) = each, each.moved()
        return found

    first, second, third = run_local(body, 2)[0]
    assert first == (True, (50, 50), (75, 25))
    assert second == (True, (75, 25), (50, 50))
    assert third == (False, (50, 50), None), "settled"


@pytest.fixture
def said_to_be_slow(monkeypatch) -> None:
    """Makes rank 1 seem busy twice as long with a plane, however busy the machine is."""
    note = Rebalancing.note

    def of_planes(self: Rebalancing, _: float, __: Any) -> None:
        rank = self._job.mesh.rank
        note(self, self.sizes[rank] * (1.0 + rank), {})

    monkeypatch.setattr(Rebalancing, "note", of_planes)


@pytest.mark.usefixtures("said_to_be_slow")
def test_a_resumed_run_has_the_parts_of_the_last_one(config):
    config = change(config, train={"batch": 1, "epochs": 3, "validate_every": 0})
    config = change(config, mesh={"rebalance": "depth", "spatial": (2, 1, 1)})
    run_local(job, 2, config, 1, (2, 1, 1))
    last = events(config, "rebalance")[-1]["next_sizes"]
    run_local(job, 2, change(config, train={"epochs": 4}), 1, (2, 1, 1))
    written = config_io.load(config.output.folder / "config.toml")
    assert written.mesh.shares.given == {"depth": tuple(map(float, last))}
    assert events(config, "rebalance")[-1]["next_sizes"] == last, "no further change"


def test_what_is_refused():
    config = Config(mesh=MeshConfig(stages=2, rebalance="depth"))
    with pytest.raises(UsageError, match=r'mesh.rebalance = "depth" with mesh.stages'):
        check_settings(config)
    job = Job.of(run_local(Mesh, 1)[0])
    with pytest.raises(NotSupported, match=r"mesh\.rebalance on CUDA devices"):
        Rebalancing(config, job, torch.device("cuda"))
    with pytest.raises(UsageError, match=r"mesh\.rebalance = channel: the mesh has 1"):
        Rebalancing(Config(mesh=MeshConfig(rebalance="channel")), job, torch.device("cpu"))
