"""Tests of stages that store slices of weights along the channel axis of their meshes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pydist import ShardedTensor
from pydist.exchange.own_slice import is_sharded_weight, own_slice
from pydist.slices import state_on_rank_0
from pydist.stages import Stages, pipeline
from support.equivalence import Task, assert_equal, error, randn
from support.networks.small import initialized
from support.staged import ONE, check_stages, in_sequence, on_stages, results, step_of

X, TARGET = randn(4, 2, 6, 4, 4, seed=1), randn(4, 3, seed=2)
CHANNEL: dict[str, Any] = {"channel": 2}
MESHES = {
    "both": [CHANNEL, CHANNEL],
    "first": [CHANNEL, ONE],
    "last, cut in depth": [ONE, {"channel": 2, "spatial": (2, 1, 1)}],
    "3 and 2:1": [{"channel": 3}, {"channel": 2, "shares": {"channel": (2, 1)}}],
    "two groups": [{"data": 2, "channel": 2}, {"data": 2}],
}


def head(features: int) -> list[nn.Module]:
    return [nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(features, 5), nn.Linear(5, 3)]


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv3d(2, 6, 3, padding=1, bias=False), nn.BatchNorm3d(6), nn.ReLU(),
        nn.Conv3d(6, 4, 3, padding=1), nn.Tanh(), nn.ConvTranspose3d(4, 6, 2, 2),
        nn.Conv3d(6, 6, 1, groups=3), nn.Tanh(), *head(6),
    )  # fmt: skip


class Shared(nn.Module):
    """Two layers with one weight, on different stages."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv3d(2, 4, 1), nn.Conv3d(4, 4, 3, padding=1)
        self.third = nn.Conv3d(4, 4, 3, padding=1)
        self.third.weight = self.second.weight
        self.head = nn.Sequential(*head(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.third(torch.tanh(self.second(self.first(x))))))


NETWORKS: dict[str, Callable[[], nn.Module]] = {"convolutions": convolutions, "shared": Shared}
CUTS = {"convolutions": "5", "shared": "third"}


def task_of(name: str) -> Task:
    return Task(initialized(NETWORKS[name]()), X, TARGET, F.mse_loss)


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
@pytest.mark.parametrize("meshes", MESHES.values(), ids=MESHES)
@pytest.mark.parametrize("name", NETWORKS)
def test_a_step_is_that_of_one_device(name, meshes, schedule):
    options = {"schedule": schedule, "cuts": [CUTS[name]]}
    check_stages(task_of(name), meshes, 2, sharded_weights=True, **options)


@pytest.mark.parametrize("options", [{"schedule": "gems"}, {"recompute": True}], ids=str)
def test_other_schedules(options):
    check_stages(task_of("shared"), [CHANNEL, CHANNEL], 2, sharded_weights=True, **options)


@pytest.mark.parametrize("meshes", MESHES.values(), ids=MESHES)
@pytest.mark.parametrize("name", NETWORKS)
def test_steps_clipping_and_state_are_those_of_one_device(name, meshes):
    task, clip = task_of(name), 0.05
    data = meshes[0].get("data", 1)

    def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), 0.01)

    whole = copy.deepcopy(task.model)
    optimizer, norms = optimizer_of(whole), []
    for _ in range(2):
        optimizer.zero_grad()
        in_sequence(task._replace(model=whole), 2, data=data, copies=False)
        norms.append(nn.utils.clip_grad_norm_(whole.parameters(), clip))
        optimizer.step()

    def body(stages: Stages) -> tuple[bool, Any, Any]:
        own = task._replace(model=copy.deepcopy(task.model))
        made = pipeline(own.model, stages, X, micro_batches=2, cuts=[CUTS[name]],
                        sharded_weights=True)  # fmt: skip
        optimizer = optimizer_of(own.model)
        count = len(X) // data
        rows = slice(stages.mesh.data_index * count, (stages.mesh.data_index + 1) * count)
        for norm in norms:
            optimizer.zero_grad()
            made.step(X[rows], TARGET[rows], F.mse_loss)
            assert error(made.clip_grad_norm_(clip).double(), norm) < 1e-6, "it is a float32"
            optimizer.step()
        for p in own.model.parameters():
            if is_sharded_weight(p):
                for value in optimizer.state.get(p, {}).values():
                    assert value.dim() == 0 or isinstance(value, ShardedTensor)
        made.gather()
        if stages.world.rank % 2:  # rank 0 alone has it whole in the first context
            assert any(map(is_sharded_weight, own.model.parameters())) == (
                "channel" in meshes[stages.index]
            )
        with state_on_rank_0():
            made.gather()
            saved, states = own.model.state_dict(), made.optimizer_state(optimizer)
        if stages.mesh.rank == 0:
            compare(saved, states)
        compare(own.model.state_dict(), made.optimizer_state(optimizer))
        return True, None, None

    def compare(model: dict[str, Tensor], states: dict[str, Any]) -> None:
        assert_equal(model, whole.state_dict(), dict.fromkeys(model, 1e-9))
        expected = optimizer.state_dict()["state"]
        assert states["state"].keys() == expected.keys()
        for key, values in expected.items():
            for each, value in values.items():
                assert error(states["state"][key][each], value) < 1e-9

    on_stages(meshes, body)


def test_a_rank_stores_its_slices_only():
    task = task_of("convolutions")
    counts = [p.numel() for p in task.model.parameters()]

    def body(stages: Stages) -> tuple[int, int]:
        made, loss = step_of(
            task._replace(model=copy.deepcopy(task.model)), stages, sharded_weights=True
        )
        results(made, loss)
        own = sum(own_slice(p).numel() for p in made.model.parameters())
        grads = sum(own_slice(p).grad is not None for p in made.model.parameters())
        return own, grads

    found = on_stages([CHANNEL, ONE], body)
    assert found[2][0] == sum(counts)
    assert max(found[0][0], found[1][0]) < 0.6 * sum(counts)
    assert found[0][1] + found[2][1] == len(counts)
