"""Tests of loaders that go on within an epoch, in the order and with the numbers of it."""

from __future__ import annotations

import itertools
import shutil
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from pydist import Mesh, checkpoint, parallelize
from pydist.comm import LocalTransport
from pydist.data import Loader
from support.training.accumulated import Samples, network


def test_a_loop_that_saves_between_epochs_goes_on_with_the_next_order(tmp_path):
    """The states of the loader's generators are those after the epoch, not at its beginning."""
    model = parallelize(network(labeled=False), Mesh(LocalTransport()))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def orders(epochs: int) -> list[list[int]]:
        indices = list(range(9))
        sampler = torch.utils.data.RandomSampler(
            indices, generator=torch.Generator().manual_seed(6)
        )
        loader = checkpoint.Resumable(DataLoader(indices, 2, sampler=sampler))
        state: Any = {"model": model, "optimizer": optimizer, "loader": loader}
        checkpoint.load(tmp_path, **state)
        found = []
        for _ in range(epochs):
            found.append(torch.cat(list(loader)).tolist())
            checkpoint.save(tmp_path, loader.epoch, **state)
        return found

    resumed = [*orders(1), *orders(2), *orders(1)]
    for folder in tmp_path.iterdir():
        folder.unlink() if folder.is_symlink() else shutil.rmtree(folder)
    assert resumed == orders(4)
    assert len(set(map(tuple, resumed))) == 4


class Drawn(torch.utils.data.Dataset):
    """Samples with random numbers that worker processes draw."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.stack([torch.tensor(float(index)), torch.rand(())])


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_goes_on_within_an_epoch_with_what_its_workers_draw(tmp_path, workers):
    model = parallelize(network(labeled=False), Mesh(LocalTransport()))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def batches(stop: int) -> list[list[list[float]]]:
        """Returns the batches up to one of them, from the latest checkpoint on."""
        torch.manual_seed(7)
        options = {"multiprocessing_context": "fork"} if workers else {}
        loader = checkpoint.Resumable(
            DataLoader(Drawn(), 2, shuffle=True, num_workers=workers, **options)
        )
        state: Any = {"model": model, "optimizer": optimizer, "loader": loader}
        before = checkpoint.load(tmp_path, **state)
        step, found = before.step if before else 0, []
        while step < stop:
            for batch in loader:
                found.append(batch.tolist())
                step += 1
                if step == stop:
                    checkpoint.save(tmp_path, step, **state)
                    break
        return found

    resumed = [*batches(2), *batches(9), *batches(15)]
    for folder in tmp_path.iterdir():
        folder.unlink() if folder.is_symlink() else shutil.rmtree(folder)
    assert resumed == batches(15)
    numbers = [number for batch in resumed for _, number in batch]
    assert len(set(numbers)) == len(numbers)


class Wrapped(torch.utils.data.Sampler[Any]):
    """Sampler that has another one."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __iter__(self) -> Any:
        return iter(self.inner)

    def __len__(self) -> int:
        return len(self.inner)


@pytest.mark.parametrize("kind", ["batch sampler", "wrapped sampler", "set_epoch within"])
def test_a_loader_goes_on_with_the_order_of_a_sampler_within_another(kind):
    data = torch.utils.data.TensorDataset(torch.arange(12))

    def made() -> checkpoint.Resumable:
        generator = torch.Generator().manual_seed(3)
        inner: Any = torch.utils.data.RandomSampler(data, generator=generator)
        if kind == "wrapped sampler":
            return checkpoint.Resumable(DataLoader(data, 3, sampler=Wrapped(inner)))
        if kind == "set_epoch within":
            inner = DistributedSampler(data, 1, 0, seed=5)
        batches = torch.utils.data.BatchSampler(inner, 3, False)
        return checkpoint.Resumable(DataLoader(data, batch_sampler=batches))

    through, orders, state = made(), [], {}
    for epoch in range(2):
        orders.append([])
        for (batch,) in through:
            orders[-1].append(batch.tolist())
            if epoch == 1 and through.batch == 2:
                state = through.state_dict()
    resumed = made()
    resumed.load_state_dict(state)
    assert [batch.tolist() for (batch,) in resumed] == orders[1][2:]
    assert orders[0] != orders[1]
    assert sorted(itertools.chain(*orders[1])) == list(range(12))


def test_a_loader_with_persistent_workers_goes_on_with_the_same_order():
    """New workers draw a random number before the order is drawn, which kept ones do not."""

    def made() -> checkpoint.Resumable:
        data = torch.utils.data.TensorDataset(torch.arange(12))
        options: Any = {"num_workers": 1, "multiprocessing_context": "fork"}
        return checkpoint.Resumable(
            DataLoader(data, 3, shuffle=True, persistent_workers=True, **options)
        )

    torch.manual_seed(0)
    through = made()
    orders = []
    for _ in range(3):
        orders.append([])
        for (batch,) in through:
            orders[-1].append(batch.tolist())
            if through.epoch in (0, 2) and through.batch == 2:
                state, drawn = through.state_dict(), torch.get_rng_state()
        if through.epoch in (1, 3):  # the epoch that has ended
            resumed = made()
            resumed.load_state_dict(state)
            kept = torch.get_rng_state()
            torch.set_rng_state(drawn)
            assert [batch.tolist() for (batch,) in resumed] == orders[-1][2:]
            torch.set_rng_state(kept)
    assert all(sorted(itertools.chain(*order)) == list(range(12)) for order in orders)
    assert orders[0] != orders[1] != orders[2]


@pytest.mark.parametrize("kind", ["Loader", "Resumable"])
def test_a_loop_that_stops_at_the_last_batch_of_an_epoch_goes_on_with_its_end(tmp_path, kind):
    mesh = Mesh(LocalTransport())
    model = parallelize(network(labeled=False), mesh)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def events(folder: str, stop: int) -> list[Any]:
        """Returns steps, and epochs that have ended, up to a step from the last checkpoint on."""
        loader: Any = Loader(Samples(5), mesh, 2)
        if kind == "Resumable":
            loader = checkpoint.Resumable(DataLoader(list(range(5)), 2))
        state: Any = {"model": model, "optimizer": optimizer, "loader": loader}
        before = checkpoint.load(tmp_path / folder, **state)
        step, found = before.step if before else 0, list[Any]()
        while loader.epoch < 3:
            for _ in loader:
                step += 1
                found.append(step)
                checkpoint.save(tmp_path / folder, step, **state)
                if step == stop:
                    return found
            found.append(f"epoch {loader.epoch} follows")
        return found

    expected = events("through", 99)
    assert expected[2:4] == [3, "epoch 1 follows"]
    assert events("ended", 3) + events("ended", 4) + events("ended", 99) == expected


def test_a_loop_that_breaks_at_the_last_batch_of_an_epoch_saves_the_next_one():
    mesh = Mesh(LocalTransport())
    with Loader(Samples(4), mesh, 2) as loader:
        for batch in loader:
            if batch.ends_epoch:
                inside = loader.state_dict()
                break
        after = loader.state_dict()
        assert [(each["epoch"], each["step"]) for each in (inside, after)] == [(0, 2), (1, 0)]
        assert [(batch.epoch, batch.step) for batch in loader] == [(1, 0), (1, 1)]
        for state, steps in ((inside, []), (after, [0, 1])):
            loader.load_state_dict(state)
            assert [batch.step for batch in loader] == steps
