"""Partitioned optimizers (ZeRO-1) of sharded weights: ranks with the same slice divide its step."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam

import pydist
import pydist.gradients.buckets
from pydist import Mesh, ShardedTensor
from pydist.gradients.partitioned import PartitionedGradient
from pydist.optim import LAMB, LARS, ShardedOptimizer, gather_gradients, sharded
from pydist.slices import state_on_rank_0
from support.equivalence import assert_same, on_ranks, randn, whole_of

MESHES: dict[str, dict[str, Any]] = {
    "channel 2": {"axes": {"channel": 2}},
    "channel 2, depth 2": {"spatial": (2, 1, 1), "axes": {"channel": 2}},
    "channel 2:1, data 2": {"data": 2, "axes": {"channel": 2}, "shares": {"channel": (2, 1)}},
    "channel 3, width 2": {"spatial": (1, 1, 2), "axes": {"channel": 3}},
}
OPTIMIZERS: dict[str, Any] = {
    "Adam": partial(Adam, weight_decay=0.1),
    "fused": partial(Adam, fused=True),
    "momentum": partial(SGD, momentum=0.9),
    "LARS": partial(LARS, weight_decay=0.1, trust_coefficient=1.0),
    "LAMB": LAMB,
}

UNEVEN = "channel 2:1, data 2"
SIZES = {"alone": 1, "the larger slice": 4000, "together": 1 << 18}
"""Bytes from which a parameter has a bucket of its own."""

each_mesh = pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)


class Network(nn.Module):
    """Convolutions, with a tied, a frozen and an unused weight among them, and a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv3d(6, 6, 3, padding=1), nn.Conv3d(6, 6, 3, padding=1)
        self.second.weight = self.first.weight
        self.frozen, self.unused = nn.Conv3d(6, 5, 1), nn.Linear(7, 9)
        self.frozen.weight.requires_grad_(False)
        self.head = nn.Linear(5, 7)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.second(torch.tanh(self.first(x))))
        return self.head(torch.tanh(self.frozen(x)).mean((2, 3, 4)))


def network() -> nn.Module:
    torch.manual_seed(0)
    return Network().double()


NETWORK = network().state_dict()
X = randn(2, 6, 4, 3, 4)


def made(mesh: Mesh | None, make: Any = Adam) -> tuple[Any, Any]:
    """Returns a network and its optimizer, partitioned on a mesh."""
    model = Network().double()
    model.load_state_dict(NETWORK)
    if mesh is None:
        return model, make(model.parameters(), 0.01)
    pydist.parallelize(model, mesh, sharded_weights=True)
    optimizer = sharded(make(model.parameters(), 0.01), model, "always")
    assert isinstance(optimizer, ShardedOptimizer)
    return model, optimizer


def loss_of(model: nn.Module, mesh: Mesh | None, step: int = 0) -> Tensor:
    x = X + step
    if mesh is not None:
        x = pydist.distribute_tensor(x.chunk(mesh.data_size)[mesh.data_index], mesh)
    return model(x).sin().square().mean()


def state_of(model: nn.Module, optimizer: Any) -> list[Tensor]:
    """Returns parameters and the optimizer's state, both of the whole network."""
    values = optimizer.state_dict()["state"].values()
    tensors = (v for each in values for v in each.values() if isinstance(v, Tensor))
    return [t.clone() for t in (*model.state_dict().values(), *tensors)]


def compare(run: Any, mesh: dict[str, Any]) -> None:
    """Compares the results of `run(mesh)` on all ranks with those of `run(None)`."""
    expected = run(None)
    options = {key: value for key, value in mesh.items() if key != "spatial"}
    for found in on_ranks(mesh.get("spatial", (1, 1, 1)), run, **options):
        assert_same(found, expected)


@pytest.mark.parametrize(
    ("make", "mesh", "size"),
    [
        *(("Adam", mesh, size) for mesh in MESHES for size in SIZES),
        *((make, UNEVEN, "the larger slice") for make in OPTIMIZERS if make != "Adam"),
        *((make, "channel 2", "alone") for make in ("LARS", "LAMB")),
    ],
)
def test_steps_are_those_of_one_device(make, mesh, size, monkeypatch):
    monkeypatch.setattr(pydist.gradients.buckets, "ALONE_BYTES", SIZES[size])

    def run(mesh):
        model, optimizer = made(mesh, OPTIMIZERS[make])
        norms = []
        for step in range(3):
            loss_of(model, mesh, step).backward()
            nn.utils.clip_grad_value_(model.parameters(), 0.01)
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.02, foreach=step == 1))
            optimizer.step()
            optimizer.zero_grad(set_to_none=step == 1)
        return [*norms, *state_of(model, optimizer)]

    compare(run, MESHES[mesh])


def test_each_rank_keeps_state_of_its_part_of_its_slice():
    def body(mesh):
        model, optimizer = made(mesh)
        loss_of(model, mesh).backward()
        grad = model.head.weight.grad
        assert isinstance(grad, PartitionedGradient)
        optimizer.step()
        held = sum(values["exp_avg"].numel() for values in optimizer.state.values())
        trained = [p for p in model.parameters() if p.grad is not None]
        return held, sum(p.numel() for p in trained), [p.to_local().numel() for p in trained
                                                       if isinstance(p, ShardedTensor)]  # fmt: skip

    found = on_ranks((2, 1, 1), body, axes={"channel": 2})
    assert sum(held for held, _, _ in found) == found[0][1]
    assert all(sum(own) < found[0][1] for _, _, own in found)


@each_mesh
def test_accumulation_closures_and_gradients_that_are_read(mesh):
    def run(mesh):
        model, optimizer = made(mesh)
        paused = torch.enable_grad if mesh is None else model.no_sync
        with paused():
            (loss_of(model, mesh, 1) / 2).backward()
        (loss_of(model, mesh, 2) / 2).backward()
        if mesh is not None:
            gather_gradients(model)
        found = [p.grad for p in model.parameters() if p.grad is not None]
        found = [whole_of(g).clone() for g in found]
        optimizer.step()

        def closure():
            optimizer.zero_grad()
            loss = loss_of(model, mesh)
            loss.backward()
            return loss.detach()

        optimizer.step(closure)
        return [*found, *state_of(model, optimizer)]

    compare(run, mesh)


@each_mesh
@pytest.mark.parametrize("overflows", [(), (0,)], ids=str)
def test_grad_scaler(overflows, mesh):
    """An overflow of one slice skips the step on all ranks."""

    def run(mesh):
        model, optimizer = made(mesh)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for step in range(2):
            scaler.scale(loss_of(model, mesh, step)).backward()
            if step in overflows and mesh is None:
                model.head.weight.grad.fill_(torch.inf)
            elif step in overflows and mesh.coords["channel"] == 1:
                grad = model.head.weight.to_local().grad
                (grad.piece if isinstance(grad, PartitionedGradient) else grad).fill_(torch.inf)
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return [torch.tensor(scaler.get_scale()), *state_of(model, optimizer)]

    compare(run, mesh)


class Interrupted(Exception):
    """Raised by the tests."""


@each_mesh
def test_a_backward_and_a_step_that_raised(mesh):
    def run(mesh):
        model, optimizer = made(mesh)

        def fails(grad):
            raise Interrupted

        loss = loss_of(model, mesh)
        loss.register_hook(fails)
        with pytest.raises(Interrupted):
            loss.backward()
        optimizer.zero_grad()
        loss_of(model, mesh).backward()
        optimizer.param_groups[0]["betas"] = None
        with pytest.raises(TypeError):
            optimizer.step()
        optimizer.param_groups[0]["betas"] = (0.9, 0.99)
        optimizer.step()
        return state_of(model, optimizer)[: len(NETWORK)]

    compare(run, mesh)


@pytest.mark.parametrize(
    ("before", "after"),
    [(None, UNEVEN), (UNEVEN, None), ("channel 2, depth 2", UNEVEN),
     ("channel 2", "channel 2, depth 2"), (UNEVEN, "channel 3, width 2"),
     ("channel 3, width 2", "channel 2")],
)  # fmt: skip
def test_state_loads_on_any_other_mesh(before, after):
    def train(mesh, saved=None):
        model, optimizer = made(mesh, LAMB)
        if saved is not None:
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
        for step in range(2):
            loss_of(model, mesh, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        state = state_of(model, optimizer)
        with state_on_rank_0():
            return state, (model.state_dict(), optimizer.state_dict())

    def on(name, *args):
        if name is None:
            return train(None, *args)
        mesh = dict(MESHES[name])
        spatial = mesh.pop("spatial", (1, 1, 1))
        return on_ranks(spatial, lambda mesh: train(mesh, *args), **mesh)[0]

    expected, _ = train(None, train(None)[1])
    found, _ = on(after, on(before)[1])
    assert_same(found, expected)


def test_parameters_that_are_added():
    def run(mesh):
        model, optimizer = made(mesh, lambda p, lr: SGD([next(iter(p))], lr, momentum=0.9))
        optimizer.add_param_group({"params": [model.head.weight], "lr": 0.1})
        for step in range(2):
            loss_of(model, mesh, step).backward()
            optimizer.step()
            model.zero_grad()
        return state_of(model, optimizer)

    compare(run, MESHES["channel 2, depth 2"])


def test_auto_counts_what_ranks_can_divide(monkeypatch):
    monkeypatch.setattr(pydist.optim.partitioned, "WORTHWHILE", 300)

    def body(mesh):
        model = pydist.parallelize(network(), mesh, sharded_weights=True)
        return isinstance(sharded(Adam(model.parameters()), model), ShardedOptimizer)

    assert on_ranks((1, 1, 1), body, axes={"channel": 2}) == [False] * 2
    assert on_ranks((2, 1, 1), body, axes={"channel": 2}) == [True] * 4
