"""Tests of checkpoints of a loop of the user's own: it resumes as if nothing had happened."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from pydist import Mesh, checkpoint, distribute_tensor, parallelize, pipeline, run_local
from pydist.comm import LocalTransport
from pydist.errors import CheckpointError, DoesNotFit, UsageError, exit_code_of
from pydist.optim import sharded
from pydist.stages import Stages
from pydist.train import checkpoint as files
from pydist.train.checkpoint import read
from support.equivalence import on_ranks
from support.training.accumulated import Samples, network

SAMPLES = Samples(7)
STEPS = 7
"""Number of steps, of 4 samples each; the second step of an epoch has the 3 that are left."""


class Noisy(Dataset[Any]):
    """Samples with noise from the random numbers of Python, NumPy and torch."""

    def __len__(self) -> int:
        return len(SAMPLES)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        noise = torch.randn(()) + random.random() + np.random.random()
        return SAMPLES.inputs[index] + noise, SAMPLES.values[index]


class Plain(Noisy):
    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return SAMPLES.inputs[index], SAMPLES.values[index]


def trained(
    mesh: Mesh,
    folder: Path,
    steps: int,
    loader: DataLoader[Any],
    *,
    partitioned: bool = False,
    scale: bool = False,
    noise: float = 0.0,
    **options: Any,
) -> tuple[list[float], dict[str, Any]]:
    """Trains to a number of steps, from the last checkpoint; returns all losses, and the state."""
    model = parallelize(network(labeled=False, **options), mesh)
    optimizer: Any = torch.optim.Adam(model.parameters(), 0.01)
    if partitioned:
        optimizer = sharded(optimizer, model, "always")
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5], 0.5)
    scaler = torch.amp.GradScaler("cpu", 8.0, growth_interval=3, enabled=scale)
    batches = checkpoint.Resumable(loader)
    states: Any = {
        "model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler,
        "loader": batches,
    }  # fmt: skip
    found = checkpoint.load(folder, **states)
    step, losses = (found.step, found.extra["losses"]) if found else (0, [])
    while step < steps:
        for x, y in batches:
            loss = F.mse_loss(model(x + noise * torch.rand(())), y)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            total = loss.detach() * len(x) / mesh.sample_size
            mesh.world.all_reduce(total)
            losses.append(float(total))
            step += 1
            checkpoint.save(folder, step, extra={"losses": losses}, **states)
            if step == steps:
                break
    state = {**model.state_dict(), "optimizer": optimizer.state_dict()["state"]}
    return losses, {**state, "scale": scaler.get_scale(), "rates": scheduler.get_last_lr()}


def assert_equal_bits(found: Any, expected: Any) -> None:
    assert found[0] == expected[0]
    torch.testing.assert_close(found[1], expected[1], rtol=0, atol=0)


@pytest.mark.parametrize("shuffled_by", ["torch", "a generator", "the epoch"])
def test_a_resumed_loop_has_the_same_bits(tmp_path, shuffled_by):
    """Ended within the first epoch, at its end, and within the third one; with dropout."""

    def run(folder: str, steps: int) -> Any:
        data = Noisy()
        options: Any = {"shuffle": True}
        if shuffled_by == "a generator":
            options["generator"] = torch.Generator().manual_seed(5)
        elif shuffled_by == "the epoch":
            options = {"sampler": DistributedSampler(data, 1, 0)}
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(1)
        loader = DataLoader(data, 4, **options)
        found = trained(
            Mesh(LocalTransport()), tmp_path / folder, steps, loader, dropout=0.3, norm=True,
            scale=True, noise=0.1,
        )  # fmt: skip
        if shuffled_by == "the epoch":
            assert options["sampler"].epoch == (steps - 1) // 2
        return found

    expected = run("through", STEPS)
    assert len(set(expected[0])) == STEPS
    for steps in (1, 2, 5, STEPS):
        found = run("ended", steps)
    assert_equal_bits(found, expected)


@pytest.mark.parametrize("new_model", [False, True])
def test_an_earlier_step_that_is_loaded_again_repeats_its_dropout(tmp_path, new_model):
    mesh = Mesh(LocalTransport())

    def made() -> dict[str, Any]:
        model = parallelize(network(labeled=False, dropout=0.5), mesh)
        return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), 0.01)}

    def losses(steps: int) -> list[float]:
        found = []
        for _ in range(steps):
            loss = state["model"](SAMPLES.inputs).square().mean()
            state["optimizer"].zero_grad()
            loss.backward()
            state["optimizer"].step()
            found.append(loss.item())
        return found

    state = made()
    losses(2)
    checkpoint.save(tmp_path, 2, **state)
    expected = losses(3)
    assert len(set(expected)) == 3
    for _ in range(2):
        state = made() if new_model else state
        checkpoint.load(tmp_path, **state)
        assert losses(3) == expected


def test_a_step_that_is_saved_again_replaces_its_checkpoint(tmp_path):
    model = parallelize(network(labeled=False), Mesh(LocalTransport()))
    state: Any = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), 0.1)}
    for bad in (False, True):
        if bad:  # a training that diverged is saved, too
            torch.nn.init.constant_(next(model.parameters()), torch.nan)
        for best in (0.1, 0.2, 0.2):
            checkpoint.save(tmp_path, 3 + bad, extra={"best": best}, **state)
            found = checkpoint.load(tmp_path, **state)
            assert found is not None
            assert (found.step, found.extra) == (3 + bad, {"best": best})
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"step-000003", "step-000004", "last"}


def test_a_damaged_checkpoint_is_written_again(tmp_path):
    parts = {"part": {"x": torch.full((3,), 1.0)}}
    path = files.write(tmp_path, 3, parts, keep=1)
    (path / "part.safetensors").write_bytes(b"damaged")
    files.write(tmp_path, 3, parts, keep=1)
    assert files.read(path)["part"]["x"][0] == 1
    assert {each.name for each in tmp_path.iterdir()} == {path.name, "last"}


def test_a_checkpoint_that_is_named_and_missing_is_no_new_start(tmp_path):
    model = parallelize(network(labeled=False), Mesh(LocalTransport()))
    state: Any = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), 0.1)}
    assert checkpoint.load(tmp_path / "ckpt", **state) is None
    saved = checkpoint.save(tmp_path / "ckpt", 3, **state)
    (saved / "manifest.json").unlink()
    for named in (saved, saved.with_name("last"), saved.with_name("step-000120")):
        with pytest.raises(CheckpointError, match=f"checkpoint {named} is missing or incomplete"):
            checkpoint.load(named, **state)
    shutil.rmtree(saved)
    with pytest.raises(CheckpointError, match="last is missing or incomplete"):
        checkpoint.load(saved.with_name("last"), **state)
    assert checkpoint.load(tmp_path / "ckpt", **state) is None


def test_a_folder_of_checkpoints_may_be_a_link(tmp_path):
    model = parallelize(network(labeled=False), Mesh(LocalTransport()))
    state: Any = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), 0.1)}
    (tmp_path / "scratch").mkdir()
    (tmp_path / "ckpt").symlink_to(tmp_path / "scratch")
    (tmp_path / "nowhere").symlink_to(tmp_path / "unmounted")
    assert checkpoint.load(tmp_path / "ckpt", **state) is None
    saved = checkpoint.save(tmp_path / "ckpt", 3, **state)
    assert checkpoint.load(tmp_path / "ckpt", **state) == checkpoint.Resumed(3, None)
    (saved / "manifest.json").unlink()
    (tmp_path / "best").symlink_to(saved)
    for named in (tmp_path / "nowhere", tmp_path / "best", saved.with_name("last")):
        with pytest.raises(CheckpointError, match=f"checkpoint {named} is missing or incomplete"):
            checkpoint.load(named, **state)


@pytest.mark.parametrize("partitioned", [False, True])
def test_a_loop_goes_on_on_other_ranks(tmp_path, partitioned):
    def run(mesh: Mesh, folder: str, steps: int) -> Any:
        sampler = DistributedSampler(Plain(), mesh.data_size, mesh.data_index, drop_last=True)
        loader = DataLoader(Plain(), 2 // mesh.data_size, sampler=sampler)
        divides = partitioned and mesh.size > 1
        return trained(mesh, tmp_path / folder, steps, loader, partitioned=divides)

    losses, state = run(Mesh(LocalTransport()), "whole", STEPS)
    for spatial, groups, steps in (((1, 1, 1), 2, 2), ((2, 1, 1), 1, 5), ((1, 2, 1), 2, STEPS)):
        *_, found = on_ranks(
            spatial, lambda mesh, steps=steps: run(mesh, "moved", steps), groups
        )  # fmt: skip
    assert found[0] == pytest.approx(losses, rel=1e-12)
    torch.testing.assert_close(found[1], state, rtol=1e-9, atol=1e-11)
    folder = tmp_path / "again"
    for steps in (3, STEPS):
        again = on_ranks((1, 1, 1), lambda mesh, steps=steps: run(mesh, folder.name, steps), 2)
    once = on_ranks((1, 1, 1), lambda mesh: run(mesh, "once", STEPS), 2)
    for one, other in zip(again, once, strict=True):
        assert_equal_bits(one, other)


def test_ranks_with_random_numbers_of_their_own_keep_them(tmp_path):
    """The saved ones by rank; rank threads share those of the process, so a loader stands here."""

    class Position:
        def __init__(self, value: int) -> None:
            self.value = value

        def state_dict(self) -> dict[str, Any]:
            return {"value": self.value, "noise": torch.full((3,), float(self.value))}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            assert torch.equal(state["noise"], torch.full((3,), float(state["value"])))
            self.value = state["value"]

    def body(mesh: Mesh, value: int, saves: bool) -> int:
        model = parallelize(network(labeled=False), mesh)
        loader = Position(value)
        if saves:
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            checkpoint.save(tmp_path, 3, model=model, optimizer=optimizer, loader=loader)
        else:
            checkpoint.load(tmp_path, model=model, loader=loader)
        return loader.value

    on_ranks((1, 1, 1), lambda mesh: body(mesh, mesh.rank // 2, True), 4)
    assert len(read(tmp_path / "last")["ranks"]["states"]) == 2
    assert on_ranks((1, 1, 1), lambda mesh: body(mesh, 9, False), 3) == [0, 0, 1]
    on_ranks((1, 1, 1), lambda mesh: body(mesh, mesh.rank, True), 2)
    assert on_ranks((2, 1, 1), lambda mesh: body(mesh, 9, False), 2) == [0, 0, 1, 1]
    on_ranks((2, 1, 1), lambda mesh: body(mesh, mesh.rank, True), 2)
    assert on_ranks((1, 1, 1), lambda mesh: body(mesh, 9, False), 3) == [0, 2, 0]
    assert on_ranks((3, 1, 1), lambda mesh: body(mesh, 9, False), 1) == [0, 1, 0]


def test_a_loop_in_stages_goes_on_alone(tmp_path):
    def step(model: Any, optimizer: Any, run: Any) -> None:
        optimizer.zero_grad()
        run()
        optimizer.step()

    def staged(world: Any) -> None:
        model, stages = network(labeled=False), Stages(world, [{}, {}])
        pipe = pipeline(model, stages, SAMPLES.inputs[:1], micro_batches=2)
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        step(model, optimizer, lambda: pipe.step(SAMPLES.inputs, SAMPLES.values, F.mse_loss))
        checkpoint.save(tmp_path, 1, model=model, optimizer=optimizer)

    run_local(staged, 2, timeout=60)

    def alone(model: Any, optimizer: Any) -> None:
        run = F.mse_loss(model(SAMPLES.inputs), SAMPLES.values).backward
        step(model, optimizer, run)

    whole, resumed = network(labeled=False), network(labeled=False)
    parallelize(resumed, Mesh(LocalTransport()))
    optimizers = [torch.optim.Adam(m.parameters(), 0.01) for m in (whole, resumed)]
    found = checkpoint.load(tmp_path, model=resumed, optimizer=optimizers[1])
    assert found == checkpoint.Resumed(1, None)
    alone(whole, optimizers[0])
    alone(whole, optimizers[0])
    alone(resumed, optimizers[1])
    torch.testing.assert_close(resumed.state_dict(), whole.state_dict(), rtol=1e-11, atol=1e-13)


def test_mistakes_are_one_line(tmp_path):
    model = network(labeled=False)
    optimizer: Any = torch.optim.SGD(model.parameters(), 0.1)
    states: Any = {"model": model, "optimizer": optimizer}
    with pytest.raises(UsageError, match="not parallelized"):
        checkpoint.save(tmp_path, 1, **states)
    parallelize(model, Mesh(LocalTransport()))
    assert checkpoint.latest(tmp_path / "nowhere") is None
    assert checkpoint.load(tmp_path / "nowhere", **states) is None
    with pytest.raises(UsageError, match="does not know its position"):
        checkpoint.save(tmp_path, 1, loader=DataLoader(Plain()), **states)
    with pytest.raises(CheckpointError, match=r"can't store a: a set is neither"):
        checkpoint.save(tmp_path, 1, extra={"a": {1}}, **states)
    for wrong in ({"step": -1}, {"step": 3.0}, {"step": None}, {"keep": 0}, {"keep": -1}):
        ((name, value),) = wrong.items()
        with pytest.raises(UsageError, match=f"{name} = {value}: a whole number of at least"):
            checkpoint.save(tmp_path, **{"step": 1, **states, **wrong})
    assert not list(tmp_path.iterdir())
    path = checkpoint.save(tmp_path, np.int64(3), **states)
    assert path == checkpoint.latest(tmp_path) == checkpoint.save(tmp_path, 3, **states)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    with pytest.raises(CheckpointError, match="step-000003 has no state of a scheduler"):
        checkpoint.load(tmp_path, scheduler=scheduler, **states)
    other = parallelize(network(labeled=True), Mesh(LocalTransport()))
    with pytest.raises(CheckpointError, match="does not match this model and optimizer"):
        checkpoint.load(path, model=other)
    with torch.no_grad():
        next(model.parameters()).add_(1)
    for step in (2, 3):
        with pytest.raises(UsageError, match=f"of step 3 of another run.*at step {step}: load"):
            checkpoint.save(tmp_path, step, **states)
    assert checkpoint.load(path, model=model).step == 3
    checkpoint.save(tmp_path, 4, **states)


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_state_of_another_kind_of_optimizer_is_refused(tmp_path, ranks):
    """Also where its settings have the same names; partitioned or not does not matter."""

    def job(mesh: Mesh) -> None:
        model = parallelize(network(labeled=False), mesh)
        adam: Any = sharded(torch.optim.Adam(model.parameters()), model, "always")
        model(SAMPLES.inputs[:1]).sum().backward()
        adam.step()
        checkpoint.save(tmp_path, 1, model=model, optimizer=adam)
        for kind in (torch.optim.RAdam, torch.optim.SGD, torch.optim.RMSprop):
            optimizer = kind(model.parameters(), 0.1)
            with pytest.raises(CheckpointError, match=f"optimizer Adam, and .* {kind.__name__}: "):
                checkpoint.load(tmp_path, model=model, optimizer=optimizer)
            assert not optimizer.state
        plain = torch.optim.Adam(model.parameters())
        assert checkpoint.load(tmp_path, model=model, optimizer=plain) is not None
        assert plain.state

    on_ranks((1, 1, 1), job, data=ranks)


class Counting(torch.optim.SGD):
    """Keeps a number, and a dict, of all parameters."""

    elementwise = True

    def step(self, closure: Any = None) -> Any:
        self.state["steps"] = self.state["run"]["steps"] = self.state["run"].get("steps", 0) + 1
        return super().step(closure)


@pytest.mark.parametrize("use", ["never", "always"])
def test_optimizer_state_of_no_parameter(tmp_path, use):
    def job(mesh: Mesh) -> None:
        model = parallelize(network(labeled=False), mesh)

        def made() -> Any:
            return sharded(Counting(model.parameters(), 0.1, momentum=0.9), model, use)

        optimizer = made()
        for step in (1, 2):
            model(SAMPLES.inputs[:1]).sum().backward()
            optimizer.step()
            checkpoint.save(tmp_path, step, model=model, optimizer=optimizer)
        optimizer = made()
        checkpoint.load(tmp_path, model=model, optimizer=optimizer)
        for _ in range(2):
            state = optimizer.state_dict()["state"]
            assert (state["steps"], state["run"]) == (2, {"steps": 2})

    on_ranks((1, 1, 1), job, data=2)


def test_a_load_without_enough_memory_is_no_error_of_the_checkpoint(tmp_path, monkeypatch):
    model = parallelize(network(labeled=False), Mesh(LocalTransport()))
    state: Any = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), 0.1)}
    checkpoint.save(tmp_path, 1, **state)

    def too_large(*_: Any) -> None:
        torch.empty(1 << 52, dtype=torch.float64)

    monkeypatch.setattr(torch.optim.SGD, "load_state_dict", too_large)
    with pytest.raises(RuntimeError, match="allocate") as caught:
        checkpoint.load(tmp_path, **state)
    assert exit_code_of(caught.value) == DoesNotFit.exit_code


@pytest.mark.parametrize("kind", ["sharded", "sparse", "no text", "a key", "deep", "complex"])
def test_what_can_not_be_stored_is_an_error_of_all_ranks(tmp_path, kind):
    def job(mesh: Mesh) -> None:
        model = parallelize(network(labeled=False), mesh)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        text = b"caf\xe9".decode("utf-8", "surrogateescape")
        deep: Any = ()
        for _ in range(40):
            deep = (deep,)
        extra: Any = {
            "sharded": distribute_tensor(torch.ones(1, 1, 4, 4, 4), mesh),
            "sparse": torch.eye(2).to_sparse(),
            "no text": text,
            "a key": {text: torch.ones(1)},
            "deep": deep,
            "complex": torch.ones(2, dtype=torch.complex128),
        }[kind]
        told = {"sharded": "0: a ShardedTensor is no", "sparse": "0: a torch.sparse_coo is no"}
        with pytest.raises(CheckpointError, match=f"can't store {told.get(kind, '')}"):
            checkpoint.save(tmp_path, 1, model=model, optimizer=optimizer, extra=[extra])
        assert not list(tmp_path.iterdir())

    on_ranks((2, 1, 1), job)
