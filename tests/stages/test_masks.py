"""Tests of dropout on plain tensors in stages: masks are those of the whole batch."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pydist import Mesh, parallelize, run_local
from pydist.stages import pipeline
from support.equivalence import assert_equal, randn
from support.networks.small import initialized
from support.staged import DEEP, ONE, TWO_GROUPS, on_stages

X, TARGET = randn(8, 8, seed=1), randn(8, 8, seed=2)
BOUNDS = [0, 5, 8]
"""The samples of two groups begin, and end, here."""


def of_rows(layer: nn.Module) -> nn.Module:
    """Returns the layer, applied to samples that are reshaped to two rows each."""
    return nn.Sequential(nn.Unflatten(1, (2, 4)), nn.Flatten(0, 1), layer, nn.Unflatten(0, (-1, 2)),
                         nn.Flatten(1))  # fmt: skip


class Function(nn.Module):
    """Calls dropout twice."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(F.dropout(x, 0.3), 0.3)


LAYERS = {
    "dropout": lambda: nn.Dropout(0.5),
    "in place": lambda: nn.Sequential(nn.Identity(), nn.Dropout(0.5, inplace=True)),
    "alpha": lambda: nn.AlphaDropout(0.5),
    "rows": lambda: of_rows(nn.Dropout(0.5)),
    "channels": lambda: nn.Sequential(nn.Unflatten(1, (2, 2, 2)), nn.Dropout2d(0.5), nn.Flatten(1)),
}
MESHES = ([ONE], [DEEP, ONE], [TWO_GROUPS] * 2)


def network(layer: nn.Module) -> nn.Module:
    return initialized(nn.Sequential(nn.Linear(8, 8), layer, nn.Linear(8, 8)))


def steps(net, meshes, x=X, **options):
    """Returns, of each rank, the gradients of two steps that it has."""

    def rank(stages):
        own = copy.deepcopy(net)
        made = pipeline(own, stages, x[:2], cuts=["2"][: len(meshes) - 1], **options)
        rows = (
            slice(*BOUNDS[stages.mesh.data_index :][:2]) if stages.mesh.data_size > 1 else slice(8)
        )
        for _ in range(2):
            made.step(x[rows], TARGET[rows], F.mse_loss)
        return {n: p.grad for n, p in own.named_parameters() if p.grad is not None}

    return on_stages(meshes, rank)


def in_groups(net, x, target, bounds, backwards=1):
    """Returns the gradients of each rank of `parallelize`, whose groups begin at `bounds`."""

    def rank(world):
        mesh = Mesh(world, world.size)
        model = parallelize(copy.deepcopy(net), mesh)
        rows = slice(*bounds[mesh.data_index :][:2])
        for _ in range(backwards):
            F.mse_loss(model(x[rows]), target[rows]).backward()
        return {n: p.grad for n, p in model.named_parameters()}

    return run_local(rank, len(bounds) - 1)


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("meshes", MESHES, ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_masks_are_those_of_one_rank(name, meshes, micro_batches):
    """Of the same seed, for any micro-batches and groups, with layers of `parallelize`."""
    net = network(LAYERS[name]())
    (expected,) = in_groups(net, X, TARGET, [0, 8], backwards=2)
    for found in steps(net, meshes, micro_batches=micro_batches):
        assert_equal(found, {n: expected[n] for n in found})


VOLUMES = randn(8, 1, 4, 4, 4, seed=3)


@pytest.mark.parametrize("name", ["rows", "channels"])
def test_masks_of_reshaped_volumes_are_those_of_one_rank(name):
    """Rows of a sharded tensor are several for each sample."""
    net = initialized(nn.Sequential(
        nn.Conv3d(1, 8, 1), nn.AdaptiveAvgPool3d(1), nn.Flatten(), LAYERS[name](), nn.Linear(8, 8)
    ))  # fmt: skip
    (expected,) = in_groups(net, VOLUMES, TARGET, [0, 8], backwards=2)
    for found in in_groups(net, VOLUMES, TARGET, BOUNDS, backwards=2):
        assert_equal(found, expected)
    for meshes in MESHES:
        for found in steps(net, meshes, VOLUMES, micro_batches=3):
            assert_equal(found, {n: expected[n] for n in found})


@pytest.mark.parametrize("options", [{"batch_norm": "rank"}, {"recompute": True}], ids=str)
@pytest.mark.parametrize("meshes", MESHES, ids=str)
def test_masks_of_functions(meshes, options):
    """Without stages torch's generator draws them; in stages micro-batches are one batch."""
    net = network(Function())
    (expected,) = steps(net, [ONE])
    for found in steps(net, meshes, micro_batches=3, **options):
        assert_equal(found, {n: expected[n] for n in found})


class OfPositions(nn.Module):
    """Drops rows that belong to no sample, whose number is that of the samples of one group."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.ones(3, 8, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.rows + 0 * x.sum(), 0.5).sum(0)


def test_rows_of_no_sample_are_dropped_in_groups_of_any_size():
    for found in steps(network(OfPositions()), [TWO_GROUPS] * 2):
        assert all(grad.isfinite().all() for grad in found.values())


class ManyDraws(nn.Module):
    """Calls that draw, and others that could, in one module."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(F.dropout(x, 0.0), 0.5, training=False)
        x = F.alpha_dropout(F.rrelu(x), 0.5)
        x = x * torch.randn_like(x) + torch.randn_like(x)
        return F.dropout(F.rrelu(x, training=True), 0.3)


@pytest.mark.parametrize("meshes", MESHES, ids=str)
def test_a_module_that_draws_several_times_has_the_numbers_of_one_rank(meshes):
    x, target = randn(8, 1, 4, 4, 4), randn(8, 2, 4, 4, 4, seed=1)
    net = initialized(nn.Sequential(nn.Conv3d(1, 2, 1), ManyDraws(), nn.Conv3d(2, 2, 1)))

    def rank(stages):
        own = copy.deepcopy(net)
        made = pipeline(own, stages, x[:2], cuts=["2"][: len(meshes) - 1], micro_batches=2)
        half = 8 // stages.mesh.data_size
        rows = slice(stages.mesh.data_index * half, (stages.mesh.data_index + 1) * half)
        made.step(x[rows], target[rows], F.mse_loss)
        return {n: p.grad for n, p in own.named_parameters() if p.grad is not None}

    (expected,) = in_groups(net, x, target, [0, 8])
    for found in on_stages(meshes, rank):
        assert_equal(found, {n: expected[n] for n in found})


def test_dropout_in_place_changes_views():
    class Viewed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x + 0
            view = y.flatten()
            F.dropout(y, 0.5, inplace=True)
            assert torch.is_tensor(view)
            return view.view(-1, 8) + y

    class Twice(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * F.dropout(x + 0, 0.5)

    (found,) = steps(network(Viewed()), [ONE])
    (expected,) = steps(network(Twice()), [ONE])
    assert_equal(found, expected)


def evaluated(net, meshes, **options):
    """Returns, of each rank, the losses of steps in evaluation with dropout, and its outputs."""
    target = randn(8, 512, seed=4)

    def rank(stages):
        own = copy.deepcopy(net)
        made = pipeline(own, stages, VOLUMES[:2], cuts=["1"][: len(meshes) - 1], **options)
        own.eval()
        own[1].train()
        losses = [float(made.step(VOLUMES, target, F.mse_loss)) for _ in range(2)]
        outputs = [made(VOLUMES) for _ in range(3)]
        whole = [getattr(y, "full_tensor", lambda y=y: y)() for y in outputs if y is not None]
        return [torch.tensor(losses), *whole], {
            n: p.grad for n, p in own.named_parameters() if p.grad is not None
        }

    return on_stages(meshes, rank)


@pytest.mark.parametrize("cut", [False, True])
def test_masks_in_evaluation_are_those_of_the_batch(cut):
    """As of Monte Carlo dropout: other ones for each batch, the same in all passes over it."""
    layers = [nn.Dropout(0.5), nn.Flatten()]
    layers = layers if cut else [nn.Sequential(*layers[::-1]), nn.Identity()]
    net = initialized(nn.Sequential(nn.Conv3d(1, 8, 1), *layers))
    (((losses, *outputs), grads),) = evaluated(net, [ONE])
    assert losses[0] != losses[1]
    assert len({float(y.sum()) for y in outputs}) == 3
    again = {"recompute": True, "micro_batches": 2}
    for meshes, options in (([ONE] * 2, again), ([DEEP, ONE], {})):
        for (found, *shown), own in evaluated(net, meshes, **options):
            torch.testing.assert_close(found, losses)
            torch.testing.assert_close(shown, outputs[: len(shown)])
            assert_equal(own, {n: grads[n] for n in own})
