"""Tests of random numbers in steps of several passes: those of one pass over all samples."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pydist import ShardedTensor, parallelize
from pydist.layout import layout_for_sample
from support.equivalence import on_ranks, randn, shard

SAMPLES = randn(6, 1, 4, 3, 2)
TABLE = randn(6, 3, seed=1)


class Net(nn.Module):
    """Network of a volume and a plain table that drops out in both, and twice in one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), nn.Dropout3d(0.5))
        self.table = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5))
        self.drop = nn.Dropout(0.3)
        self.last = nn.Linear(8, 2)
        self.recomputes = False

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        x = checkpoint(self.first, x, use_reentrant=False) if self.recomputes else self.first(x)
        x = self.drop(self.drop(x)) if not self.recomputes else self.drop(x)
        return self.last(torch.cat([x.mean((2, 3, 4)), self.table(table)], 1))


torch.manual_seed(0)
WEIGHTS = Net().double()


def network(mesh, recomputes: bool = False) -> nn.Module:
    """Returns a network with the same weights each time, whatever threads draw meanwhile."""
    model = copy.deepcopy(WEIGHTS)
    model.recomputes = recomputes
    return parallelize(model, mesh)


def gradients(model: nn.Module) -> list[Tensor]:
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    return found


def backward(model: nn.Module, rows: list[int], of: int) -> None:
    """Adds this pass's part of the mean over a step of `of` samples in its group."""
    (model(SAMPLES[rows], TABLE[rows]).square().mean() * (len(rows) / of)).backward()


def whole(mesh, orders: list[list[int]], recomputes: bool = False) -> list[list[Tensor]]:
    """Returns the gradients of steps of one pass each."""
    model = network(mesh, recomputes)
    found = []
    for rows in orders:
        backward(model, rows, len(rows))
        found.append(gradients(model))
    return found


def same(found: list[list[Tensor]], expected: list[list[Tensor]]) -> bool:
    return all(
        torch.allclose(a, b, rtol=1e-11, atol=1e-13)
        for of_step in zip(found, expected, strict=True)
        for a, b in zip(*of_step, strict=True)
    )


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("spatial", [(1, 1, 1), (2, 1, 1)])
@pytest.mark.parametrize("passes", [[1, 2, 3], [2, 2, 2], [5, 1]], ids=str)
def test_passes_of_a_loop_with_no_sync(passes, spatial, recomputes):
    def accumulated(mesh):
        model = network(mesh, recomputes)
        found = []
        for _ in range(2):
            rows = list(range(6))
            for number, count in enumerate(passes):
                is_last = number == len(passes) - 1
                with contextlib.nullcontext() if is_last else model.no_sync():
                    backward(model, rows[:count], 6)
                rows = rows[count:]
            found.append(gradients(model))
        backward(model, [0, 1, 2], 3)
        found.append(gradients(model))
        return found

    steps = [list(range(6)), list(range(6)), [0, 1, 2]]
    (expected,) = on_ranks((1, 1, 1), lambda mesh: whole(mesh, steps, recomputes))
    assert not same(expected[:1], expected[1:2])  # each step draws anew
    for found in on_ranks(spatial, accumulated):
        assert same(found, expected)


def test_groups_share_each_pass():
    """The global batch is the first pass of all groups, then their second one."""
    shares = [([0], [1, 2]), ([3, 4], [5])]  # rows by pass and group

    def accumulated(mesh):
        model = network(mesh)
        for number, groups in enumerate(shares):
            rows = groups[mesh.data_index]
            weight = sum(len(each) for each in groups) / 6
            with model.no_sync() if number == 0 else contextlib.nullcontext():
                (model(SAMPLES[rows], TABLE[rows]).square().mean() * weight).backward()
        return [gradients(model)]

    (expected,) = on_ranks((1, 1, 1), lambda mesh: whole(mesh, [list(range(6))]))
    for found in on_ranks((2, 1, 1), accumulated, data=2):
        assert same(found, expected)


def test_other_passes_draw_anew():
    """Passes without no_sync are steps; so are those that another model's pass interrupts."""

    def masks(mesh):
        model, other = (network(mesh) for _ in range(2))
        seen: list[Tensor] = []
        model.first[1].register_forward_hook(lambda m, i, y: seen.append((y != 0).to_local()))

        def run(net: nn.Module) -> None:
            net(SAMPLES[:1].expand(3, -1, -1, -1, -1).clone(), TABLE[:3]).sum().backward()

        for _ in range(2):
            run(model)
        with model.no_sync():
            run(model)
            run(other)
            run(model)
            with torch.no_grad():
                model(SAMPLES[:3], TABLE[:3])
        run(model)
        run(model)
        model.eval()(SAMPLES[:3], TABLE[:3])
        return seen[:-1]

    for found in on_ranks((1, 1, 1), masks):
        drawn = [each.flatten(2)[:, :, 0].flatten().tolist() for each in found]
        assert len({tuple(each) for each in drawn}) == len(drawn) == 7


def test_reduced_without_a_backward():
    """`reduce` ends a step, too."""
    from pydist.entry_hook import entry_hook_of

    def accumulated(mesh):
        model = network(mesh)
        found = []
        for _ in range(2):
            with model.no_sync():
                backward(model, [0, 1], 6)
                backward(model, [2, 3, 4, 5], 6)
            entry_hook_of(model).reduce()
            found.append(gradients(model))
        return found

    (expected,) = on_ranks((1, 1, 1), lambda mesh: whole(mesh, [list(range(6))] * 2))
    for found in on_ranks((2, 1, 1), accumulated):
        assert same(found, expected)


class Rows(nn.Module):
    """Network of a table with two rows a sample, beside rows of another number."""

    def __init__(self) -> None:
        super().__init__()
        self.volume = nn.Conv3d(1, 4, 3, padding=1)
        self.table = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5))
        self.columns = nn.Dropout(0.5)

    def forward(self, x: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
        rows = self.table(table.reshape(-1, 3))
        return self.volume(x).mean((2, 3, 4)) + rows.view(-1, 2, 4).sum(1), self.columns(table.t())


def test_rows_that_are_not_samples():
    """Several rows a sample have the masks of one pass; others have new ones in each pass."""
    weights, table = Rows().double(), randn(6, 6, seed=2)

    def run(mesh, passes):
        model = parallelize(copy.deepcopy(weights), mesh)
        columns = []
        for number, (first, last) in enumerate(passes):
            with contextlib.nullcontext() if number == len(passes) - 1 else model.no_sync():
                y, found = model(SAMPLES[first:last], table[first:last])
                (y.square().mean() * ((last - first) / 6)).backward()
            columns.append(found == 0)
        return gradients(model), columns

    ((expected, _),) = on_ranks((1, 1, 1), lambda mesh: run(mesh, [(0, 6)]))
    for found, columns in on_ranks((2, 1, 1), lambda mesh: run(mesh, [(0, 2), (2, 4), (4, 6)])):
        assert same([found], [expected])
        assert len({tuple(each.flatten().tolist()) for each in columns}) == 3


@pytest.mark.parametrize("data", [1, 2])
def test_batches_of_a_loader_without_passes(data):
    """Each begins at index 0 of its own: in a step they come after each other."""

    def masks(mesh):
        model = network(mesh)
        seen: list[Tensor] = []
        model.first[1].register_forward_hook(lambda m, i, y: seen.append(y != 0))
        layout = layout_for_sample(mesh, (2, 1, 4, 3, 2))
        x = ShardedTensor.from_local(
            shard(SAMPLES[:2], layout).to_local(), layout, 2 * mesh.data_index
        )
        with model.no_sync():
            for _ in range(2):  # such as of the same batch twice, for a consistency loss
                model(x, TABLE[:2]).sum().backward()
        model(x, TABLE[:2]).sum().backward()
        return [each.full_tensor()[:, :, 0, 0, 0].flatten().tolist() for each in seen]

    found = on_ranks((2, 1, 1), masks, data=data)
    drawn = [tuple(each) for mine in found[::2] for each in mine]
    assert len(set(drawn)) == 3 * data

    def whole_masks(mesh):
        model = network(mesh)
        seen: list[Tensor] = []
        model.first[1].register_forward_hook(lambda m, i, y: seen.append(y != 0))
        rows = [0] * (6 * data)
        model(SAMPLES[rows], TABLE[rows])
        return seen[0].full_tensor()[:, :, 0, 0, 0]

    (expected,) = on_ranks((1, 1, 1), whole_masks)
    order = [each for number in range(3) for each in (mine[number] for mine in found[::2])]
    assert torch.tensor(order).flatten().tolist() == expected.flatten().tolist()


@pytest.mark.parametrize("sizes", [(2, 3), (1, 0)], ids=str)
def test_groups_that_have_as_many_rows_as_samples_by_chance(sizes):
    """One group must not take for its batch what another exchanges the size of."""

    class Supported(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv3d(1, 2, 3, padding=1), nn.BatchNorm3d(2)
            self.drop, self.flat = nn.Dropout(0.5), nn.Dropout(0.5)

        def forward(self, x: Tensor, support: Tensor, table: Tensor) -> Tensor:
            y = self.drop(self.norm(self.conv(support))).mean()
            return self.conv(x).mean((1, 2, 3, 4)) * y + self.flat(table).mean()

    weights = Supported().double()

    def body(mesh):
        model = parallelize(copy.deepcopy(weights), mesh)
        rows = slice(0, sizes[mesh.data_index])
        model(SAMPLES[rows], SAMPLES[:3], TABLE[:2]).mean().backward()
        return [p.grad for p in model.parameters()]

    first, *others = on_ranks((2, 1, 1), body, data=2)
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


def test_an_abandoned_step_and_late_recomputation():
    """An error that one rank alone catches changes no masks; passes may call other layers."""

    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = nn.Sequential(nn.Conv3d(1, 2, 1), nn.Dropout(0.5))

        def forward(self, x: Tensor) -> Tensor:
            if len(x) == 1:
                return self.part[0](x).mean()
            return checkpoint(self.part, x, use_reentrant=False).mean()

    weights = Sometimes().double()

    def body(mesh):
        model = parallelize(copy.deepcopy(weights), mesh)
        with contextlib.suppress(KeyError), model.no_sync():
            model(SAMPLES[:2]).backward()
            if mesh.rank == 0:
                raise KeyError
        before = mesh.session.forwards
        with model.no_sync():
            late = model(SAMPLES[:2])
            (late + model(SAMPLES[2:3])).backward()
        model(SAMPLES[3:]).backward()
        return mesh.session.forwards - before, mesh.session.part

    assert on_ranks((2, 1, 1), body) == [(0, 5)] * 2
