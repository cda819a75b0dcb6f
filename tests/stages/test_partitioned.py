"""Partitioned optimizers (ZeRO-1) in stages: each stage divides its step over its own ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adam

import pydist.gradients.buckets
from pydist.optim import LAMB, LARS, ShardedOptimizer, gather_gradients, sharded
from pydist.stages import Stages, pipeline
from support.equivalence import Task, assert_equal, randn
from support.networks.small import initialized
from support.staged import DEEP, ONE, TWO_GROUPS, in_sequence, on_stages

X, TARGET = randn(4, 2, 6, 4, 4, seed=1), randn(4, 3, seed=2)
STEPS = 3
SGD_BOUND, ADAM_BOUND = 1e-12, 1e-9
"""Adam divides by the root of its second moment, which enlarges rounding of small gradients."""
FOUR: Mapping[str, Any] = {"spatial": (2, 2, 1)}
CHANNEL: Mapping[str, Any] = {"channel": 2, "spatial": (2, 1, 1)}
MESHES: dict[str, list[Mapping[str, Any]]] = {
    "deep, one": [DEEP, ONE],
    "deep twice": [DEEP, DEEP],
    "one, four": [ONE, FOUR],
    "two groups": [TWO_GROUPS, TWO_GROUPS],
    "slices": [CHANNEL, DEEP],
}
OPTIMIZERS: dict[str, tuple[Callable[..., Any], float]] = {
    "momentum": (partial(SGD, lr=0.1, momentum=0.9), SGD_BOUND),
    "Adam": (partial(Adam, lr=0.01, weight_decay=0.1), ADAM_BOUND),
    "LARS": (partial(LARS, lr=0.1, weight_decay=0.1, trust_coefficient=1.0), SGD_BOUND),
    "LAMB": (partial(LAMB, lr=0.01), ADAM_BOUND),
}


class Tied(nn.Module):
    """Two layers with one weight, one of them on the last stage, and a frozen and an unused one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv3d(2, 4, 1), nn.Conv3d(4, 4, 3, padding=1)
        self.third = nn.Conv3d(4, 4, 3, padding=1)
        self.third.weight = self.second.weight
        self.frozen, self.unused = nn.Conv3d(4, 5, 1), nn.Linear(7, 9)
        self.frozen.weight.requires_grad_(False)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.second(torch.tanh(self.first(x))))
        return self.head(torch.tanh(self.frozen(self.third(x))).mean((2, 3, 4)))


@pytest.fixture(autouse=True)
def _buckets(monkeypatch):
    """Lets the tied weight have a bucket of its own, and others share one."""
    monkeypatch.setattr(pydist.gradients.buckets, "ALONE_BYTES", 2000)


def task() -> Task:
    return Task(initialized(Tied()), X, TARGET, F.mse_loss)


def rows_of(stages: Stages) -> slice:
    own = len(X) // stages.mesh.data_size
    return slice(stages.mesh.data_index * own, (stages.mesh.data_index + 1) * own)


def trained_alone(made: Task, make: Any, clip: float, data: int) -> tuple[dict[str, Any], Any]:
    """Returns the state of the network and its optimizer after steps on one device."""
    whole = copy.deepcopy(made.model)
    optimizer = make(whole.parameters())
    for step in range(STEPS):
        if step != 1:  # the second step accumulates
            optimizer.zero_grad()
        in_sequence(made._replace(model=whole), 2, data=data, copies=False)
        nn.utils.clip_grad_norm_(whole.parameters(), clip)
        optimizer.step()
    return whole.state_dict(), optimizer.state_dict()


def flat(model: Mapping[str, Tensor], optimizer: Mapping[str, Any]) -> dict[str, Tensor]:
    found = dict(model)
    for index, values in optimizer["state"].items():
        found |= {f"{index}.{n}": torch.as_tensor(v).double() for n, v in values.items()}
    return found


@pytest.mark.parametrize(
    ("make", "meshes", "schedule"),
    [
        *(("momentum", mesh, "1f1b") for mesh in MESHES),
        *(("momentum", mesh, "zero-bubble") for mesh in ("one, four", "slices")),
        *((make, "deep, one", "gpipe") for make in ("Adam", "LARS", "LAMB")),
        *((make, "slices", "1f1b") for make in ("LARS", "LAMB")),
        ("momentum", "deep twice", "gems"),
        ("Adam", "two groups", "gems"),
    ],
)
def test_steps_clipping_and_state_are_those_of_one_device(make, meshes, schedule):
    made, (maker, bound), clip = task(), OPTIMIZERS[make], 0.05
    data = MESHES[meshes][0].get("data", 1)
    expected = flat(*trained_alone(made, maker, clip, data))

    def body(stages: Stages) -> None:
        model = copy.deepcopy(made.model)
        pipe = pipeline(model, stages, X, micro_batches=2, cuts=["third"], schedule=schedule,
                        sharded_weights=meshes == "slices")  # fmt: skip
        optimizer = sharded(maker(model.parameters()), model, "always")
        assert isinstance(optimizer, ShardedOptimizer) == (stages.mesh.size > 1)
        for step in range(STEPS):
            if step != 1:
                optimizer.zero_grad()
            pipe.step(X[rows_of(stages)], TARGET[rows_of(stages)], F.mse_loss)
            pipe.clip_grad_norm_(clip)
            optimizer.step()
        pipe.gather()
        found = flat(model.state_dict(), pipe.optimizer_state(optimizer))
        assert_equal(found, expected, dict.fromkeys(expected, bound))

    on_stages(MESHES[meshes], body)


def test_a_run_goes_on_with_other_stages_partitioned_or_not():
    made, make, seen = task(), OPTIMIZERS["Adam"][0], {}
    whole = copy.deepcopy(made.model)
    alone = make(whole.parameters())

    def train(model: nn.Module, optimizer: Any, step: Callable[[], Any]) -> None:
        optimizer.zero_grad()
        step()
        optimizer.step()

    def body(stages: Stages, use: Any) -> None:
        model = copy.deepcopy(made.model)
        pipe = pipeline(
            model, stages, X, micro_batches=2, cuts=["third", "head"][: stages.count - 1]
        )
        optimizer = sharded(make(model.parameters()), model, use)
        if seen:
            model.load_state_dict(seen["model"])
            optimizer.load_state_dict(copy.deepcopy(seen["optimizer"]))
        batch = X[rows_of(stages)], TARGET[rows_of(stages)]
        train(model, optimizer, lambda: pipe.step(*batch, F.mse_loss))
        pipe.gather()
        states = pipe.optimizer_state(optimizer)
        found, expected = flat(model.state_dict(), states), flat(*expected_state)
        assert_equal(found, expected, dict.fromkeys(expected, ADAM_BOUND))
        if stages.world.rank == stages.world.size - 1:
            saved.update(model=model.state_dict(), optimizer=states)

    for meshes, use in (
        ([DEEP, ONE], "always"), ([ONE, ONE, DEEP], "never"), ([FOUR], "always"),
        ([TWO_GROUPS, TWO_GROUPS], "always"),
    ):  # fmt: skip
        data = meshes[0].get("data", 1)
        for_all = made._replace(model=whole)
        train(whole, alone, lambda d=data, t=for_all: in_sequence(t, 2, data=d, copies=False))
        expected_state, saved = (whole.state_dict(), alone.state_dict()), dict[str, Any]()
        on_stages(meshes, partial(body, use=use))
        seen = saved


def test_an_overflow_in_a_part_counts_on_all_stages():
    made = task()

    def body(stages: Stages) -> None:
        model = copy.deepcopy(made.model)
        pipe = pipeline(model, stages, X, cuts=["third"])
        optimizer = sharded(SGD(model.parameters(), 0.1), model, "always")
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        before = [p.detach().clone() for p in model.parameters()]
        for overflows in (True, False):
            optimizer.zero_grad()
            pipe.step(X, TARGET, lambda y, t: scaler.scale(F.mse_loss(y, t)))
            grad: Any = model.first.weight.grad
            if overflows and stages.world.rank == 1:
                grad.piece[-1] = torch.inf
            pipe.unscale_(scaler, optimizer)
            scaler.step(optimizer)
            scaler.update()
            assert scaler.get_scale() == 4.0
            same = [torch.equal(*each) for each in zip(model.parameters(), before, strict=True)]
            trained = [p.grad is not None for p in model.parameters()]
            assert [not each for each in same] == [not overflows and each for each in trained]

    on_stages([DEEP, ONE], body)


def test_gradients_are_gathered_on_each_stage():
    made = task()
    expected = in_sequence(made, 1)

    def body(stages: Stages) -> None:
        model = copy.deepcopy(made.model)
        pipe = pipeline(model, stages, X, cuts=["third"])
        sharded(SGD(model.parameters(), 0.1), model, "always")
        pipe.step(X, TARGET, F.mse_loss)
        gather_gradients(model)
        found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        assert found.keys() >= {"second.weight"}, "on both stages"
        assert_equal(found, {name: expected[name] for name in found})

    on_stages([DEEP, DEEP], body)


def test_a_stage_of_one_rank_or_few_parameters_steps_as_ever():
    def kinds(stages: Stages) -> list[bool]:
        model = nn.Sequential(nn.Conv3d(2, 2, 1), nn.Flatten(), nn.Linear(2 * 64, 1 << 14)).double()
        pipeline(model, stages, torch.ones(1, 2, 4, 4, 4).double(), cuts=["2"])
        made = [sharded(SGD(model.parameters(), 0.1), model, use) for use in ("auto", "always")]
        return [isinstance(each, ShardedOptimizer) for each in made]

    first, last = [False, True], [True, True]
    assert on_stages([DEEP, DEEP], kinds) == [first, first, last, last]
    assert on_stages([ONE, DEEP], kinds) == [[False, False], last, last]
