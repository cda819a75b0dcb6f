"""Tests of computation on plain tensors or outside of models, over several sample groups."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize

from pydist import distribute_tensor, parallelize
from support.equivalence import on_ranks, randn

GROUPS = {"equal": (slice(0, 2), slice(2, 4)), "unequal": (slice(0, 3), slice(3, 4))}
groups = pytest.mark.parametrize("rows", GROUPS.values(), ids=GROUPS)


class Branches(nn.Module):
    """Network of a volume and a table, with table layers that mix samples."""

    def __init__(self, layer):
        super().__init__()
        self.volume = nn.Conv3d(1, 4, 3, padding=1)
        self.table = nn.Sequential(nn.Linear(3, 4), layer, nn.ReLU(inplace=True))
        self.head = nn.Linear(8, 1)

    def forward(self, x, table):
        pooled = self.volume(x).mean((2, 3, 4))
        return self.head(torch.cat([pooled, self.table(table)], 1))


class ByName(nn.Module):
    """Calls a layer with its input as a keyword."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(input=x)


called = pytest.mark.parametrize("called", [lambda layer: layer, ByName], ids=["plain", "by name"])


def check(model, loss, inputs, rows, parallel=True):
    """Compares gradients and buffers of two sample groups of two ranks with one device."""
    model = model.double()
    whole = copy.deepcopy(model)
    loss(whole, *inputs).backward()
    expected = [*(p.grad for p in whole.parameters()), *whole.buffers()]

    def body(mesh):
        own = copy.deepcopy(model)
        own = parallelize(own, mesh) if parallel else own
        loss(own, *(x[rows[mesh.data_index]] if len(x) > 1 else x for x in inputs)).backward()
        return [*(p.grad for p in own.parameters()), *own.buffers()]

    for found in on_ranks((2, 1, 1), body, data=2):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


def mean_square(model, *inputs):
    return model(*inputs).square().mean()


VOLUMES = randn(4, 1, 4, 3, 2)


@groups
@called
def test_batch_norm_of_a_table_spans_the_groups(called, rows):
    check(Branches(called(nn.BatchNorm1d(4))), mean_square, (VOLUMES, randn(4, 3, seed=1)), rows)


@pytest.mark.parametrize("data", [1, 2])
@called
def test_dropout_of_a_table_has_the_masks_of_the_whole_batch(called, data):
    def body(mesh, size):
        model = parallelize(Branches(called(nn.Dropout(0.5))).double(), mesh)
        rows = GROUPS["unequal"][mesh.data_index] if size > 1 else slice(None)
        seen = []
        model.table[1].register_forward_hook(lambda m, i, y: seen.append(y != 0))
        for _ in range(2):
            model(VOLUMES[rows], torch.ones(4, 3).double()[rows])
        return mesh.data_index, seen

    (_, expected), *_ = on_ranks((1, 1, 1), lambda mesh: body(mesh, 1))
    assert not torch.equal(*expected)
    for index, found in on_ranks((2, 1, 1), lambda mesh: body(mesh, data), data=data):
        rows = GROUPS["unequal"][index] if data > 1 else slice(None)
        assert all(torch.equal(a, b[rows]) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(("layer", "shape"), [
    (nn.Dropout(inplace=True), (60,)), (nn.Dropout1d(), (60, 3)), (nn.Dropout3d(), (60, 3, 2, 2)),
], ids=str)  # fmt: skip
def test_dropout_of_what_has_no_batch(layer, shape):
    def body(mesh):
        model = parallelize(nn.Sequential(copy.deepcopy(layer)), mesh)
        return model(torch.ones(shape))

    for found in on_ranks((2, 1, 1), body):
        assert type(found) is torch.Tensor
        assert found.shape == shape
        assert set(found.unique().tolist()) == {0.0, 2.0}
        assert all(len(channel.unique()) == 1 for channel in found)


@groups
def test_an_atlas_is_no_batch(rows):
    class Registered(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv3d(2, 2, 3, padding=1)

        def forward(self, atlas, x):
            return self.conv(torch.cat([atlas.expand(len(x), -1, -1, -1, -1), x], 1))

    check(Registered(), mean_square, (randn(1, 1, 4, 3, 2, seed=3), VOLUMES), rows)


@groups
def test_a_parametrized_kernel_is_no_batch(rows):
    class Doubled(nn.Module):
        def forward(self, weight):
            return weight * 2

    model = nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), nn.ReLU())
    parametrize.register_parametrization(model[0], "weight", Doubled())

    def loss(model, x):
        assert type(model[0].weight) is torch.Tensor
        return mean_square(model, x) + 0.1 * model[0].weight.square().sum()

    check(model, loss, (VOLUMES,), rows)


@groups
def test_functions_with_parameters_weigh_samples_alike(rows):
    """No model is called: the number of samples comes from the sharded tensor."""

    def loss(model, x):
        if len(x) < 4:
            x = distribute_tensor(x, model._pydist_entry.mesh)
        return F.conv3d(x, model.weight, model.bias, padding=1).relu().mean((2, 3, 4)).pow(2).mean()

    check(nn.Conv3d(1, 3, 3), loss, (VOLUMES,), rows)


@pytest.mark.parametrize("size", [(2, 1, 1), (1, 1, 1)], ids=str)
def test_one_batch_norm_on_a_pooled_tensor_and_on_the_map(size):
    """torch's autograd node saves the running statistics, which the second call updates."""
    layer = nn.BatchNorm3d(4).double()
    x = randn(3, 4, 32, 16, 16)

    def gradient(norm, x):
        gate = norm(x.mean((2, 3, 4), keepdim=True)).sigmoid()
        (norm(x) * gate).square().mean().backward()
        return norm.weight.grad, norm.running_mean

    expected = gradient(copy.deepcopy(layer), x)

    def body(mesh):
        norm = parallelize(copy.deepcopy(layer), mesh)
        return gradient(norm, distribute_tensor(x, mesh))

    for found in on_ranks(size, body):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-13)
