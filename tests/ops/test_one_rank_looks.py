"""Tensors that are read on one rank alone: that rank fuses less, all ranks get equal numbers.

A read completes pending work on the tensor (a halo, a ReLU, a norm's result), so the next call has
nothing to fuse with. The exchanges must not depend on reads, in forward or in backward.
"""

from __future__ import annotations

import copy
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pydist import ShardedTensor, distribute_tensor, layout_for_sample, parallelize
from pydist.errors import NotSupported
from pydist.ops.conv import local_conv
from support.equivalence import assert_same, check_function, on_ranks, randn, shard, whole_of
from support.networks.small import initialized

LOOKS = {
    "repr": repr,
    "to_local": lambda x: x.to_local(),
    "hook": lambda x: x.register_hook(lambda g: None),
    "retain_grad": lambda x: x.retain_grad(),
    "data": lambda x: x.data,
    "grad_fn": lambda x: x.grad_fn,
}
UNEVEN = [[0, 3, 8, 11], None, None]
EMPTY = [[0, 4, 4, 11], None, None]
LAYOUTS = {"uneven": UNEVEN, "empty": EMPTY}
UNEVEN_2 = [[0, 2, 7], None, None]


class Looking:
    """Reader of the n-th tensor it is given, on one rank alone."""

    def __init__(self, look, rank, at):
        self._look, self._rank, self._at = look, rank, at
        self.has_looked = False

    def __call__(self, stage, x):
        looks = isinstance(x, ShardedTensor) and x.mesh.rank == self._rank
        if looks and stage == self._at and x.requires_grad:
            self._look(x)
            self.has_looked = True
        return x


def conv(x, w, **options):
    return F.conv3d(x, w[:3, :1].expand(-1, x.shape[1], -1, -1, -1), padding=1, **options)


def leaky_and_average(x, w, see):
    z = see(1, F.leaky_relu_(see(0, conv(x, w)), 0.3))
    return F.avg_pool3d(z, 3, 2, 1) + see(2, z).sum()


def relu_and_two_pools(x, w, see):
    z = see(1, F.relu_(see(0, conv(x, w, stride=(1, 2, 1)))))
    y = F.avg_pool3d(z, 3, 1, 1)
    return y + F.max_pool3d(see(2, z), 3, 1, 1)


def dilated(x, w, see):
    z = F.conv3d(x, w[:3, :2, :, :1, :1], padding=(2, 0, 0), dilation=(2, 1, 1))
    return F.avg_pool3d(see(1, F.leaky_relu_(see(0, z), 0.2)), (3, 1, 1), 1, (1, 0, 0))


def norm_and_relu(x, w, see):
    y = see(0, F.batch_norm(conv(x, w), None, None, w.sum((1, 2, 3, 4)), training=True))
    return conv(see(1, F.relu_(y)), w)


def norm_and_prelu(x, w, see):
    y = see(0, F.instance_norm(conv(x, w)))
    z = see(1, F.prelu(y, w[:, 0, 0, 0, 0].abs()))
    return conv(z, w) + see(2, y)


def norms_in_another_order(x, w, see):
    """Computes a network whose backward runs activations in one order and norms in another."""
    first = F.instance_norm(conv(x, w))
    second = F.batch_norm(conv(x, 2 * w), None, None, training=True)
    see(0, first)
    F.relu_(second)
    F.leaky_relu_(first, 0.3)
    third = F.instance_norm(conv(see(1, second), w))
    return F.relu_(see(2, third)) * first


STAGES = {
    leaky_and_average: 3, relu_and_two_pools: 3, dilated: 2, norm_and_relu: 2, norm_and_prelu: 3,
    norms_in_another_order: 3,
}  # fmt: skip


@pytest.mark.parametrize("points", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize(
    ("network", "stage"), [(each, stage) for each in STAGES for stage in range(STAGES[each])]
)
def test_all_ranks_agree_to_second_order(network, stage, points):
    see = Looking(repr, 1, stage)
    check_function(
        lambda x, w: network(x, w, see),
        randn(2, 2, 11, 6, 4), [randn(3, 2, 3, 3, 3, seed=1)], points, second_order=True,
    )  # fmt: skip
    assert see.has_looked


@pytest.mark.parametrize("act", ["relu", "leaky", "prelu"])
def test_what_depends_on_what_is_the_same_to_second_order(act):
    """After the last activation the gradient is constant.

    Whether the bias's gradient has a graph decides whether its mean is differentiated.
    """
    see = Looking(repr, 1, 0)

    def function(x, w, b):
        y = see(0, F.instance_norm(conv(x, w), None, None, b.square(), b))
        if act == "prelu":
            return F.prelu(y, torch.full((3,), 0.2).double())
        return F.relu_(y) if act == "relu" else F.leaky_relu_(y, 0.2)

    parameters = [randn(3, 2, 3, 3, 3, seed=1), randn(3, seed=2)]
    check_function(function, randn(2, 2, 7, 4, 4), parameters, UNEVEN_2, second_order=True)
    assert see.has_looked


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS)
@pytest.mark.parametrize("network", [leaky_and_average, norms_in_another_order])
def test_ways_to_look(network, look):
    for rank in (0, 1):
        see = Looking(look, rank, 0)
        check_function(
            lambda x, w, see=see: network(x, w, see),
            randn(1, 2, 8, 4, 4), [randn(3, 2, 3, 3, 3, seed=1)], [[0, 3, 8], None, None],
        )  # fmt: skip
        assert see.has_looked


def test_hooks_on_saved_tensors_on_one_rank():
    """The hooks keep the pool of that rank from fusing."""
    x, w = randn(1, 2, 8, 4, 4), randn(3, 2, 3, 3, 3, seed=1)

    def gradient(x, own):
        if own:
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
                y = leaky_and_average(x, w, lambda _, z: z)
        else:
            y = leaky_and_average(x, w, lambda _, z: z)
        y.square().sum().backward()
        return x.grad

    def rank(mesh):
        part = shard(x, layout_for_sample(mesh, x.shape))
        return gradient(part, mesh.rank == 0).full_tensor()

    expected = gradient(x.clone().requires_grad_(), False)
    for found in on_ranks((2, 1, 1), rank):
        assert_same([found], [expected])


def test_forward_exchanges_the_same_without_grad_on_one_rank():
    x = randn(1, 2, 8, 4, 4)
    w = randn(3, 2, 3, 3, 3, seed=1)

    def values(x):
        largest, mean = x.max(), x.mean()
        along = x.amax(2) + x.min(2).values + x.logsumexp(2)
        z = norm_and_prelu(x, w, lambda _, t: t)
        return [largest, mean, along, z, F.max_pool3d(F.relu_(conv(z, w)), 3, 2, 1)]

    def rank(mesh):
        part = shard(x, layout_for_sample(mesh, x.shape))
        with torch.set_grad_enabled(mesh.rank == 0):
            return [whole_of(t).detach() for t in values(part)]

    expected = values(x)
    for found in on_ranks((2, 1, 1), rank):
        assert_same(found, expected)


def test_a_processor_without_bf16_decides_for_all_ranks(monkeypatch):
    """The memory format of halos depends on the dtypes that oneDNN supports."""
    here = threading.local()
    monkeypatch.setattr(local_conv, "onednn_has", lambda dtype: here.rank != 1)
    x, w = randn(1, 4, 8, 6, 6).bfloat16(), randn(4, 4, 3, 3, 3, seed=1).bfloat16()

    def rank(mesh):
        here.rank = mesh.rank
        part = shard(x, layout_for_sample(mesh, x.shape))
        y = F.conv3d(part, w, padding=1)
        return y.to_local().stride(), y.full_tensor().detach().double()

    expected = F.conv3d(x.double(), w.double(), padding=1)
    for strides, found in on_ranks((2, 1, 1), rank):
        assert strides == torch.empty(1, 4, 4, 6, 6).stride()
        assert (found - expected).abs().max() <= expected.abs().max() / 64


@pytest.mark.parametrize("look", [0, 1])
@pytest.mark.parametrize(("data", "parts"), [(2, 1), (1, 2), (2, 2)])
def test_a_look_before_a_backward_that_raises_and_trains_nothing(data, parts, look):
    """No gradient was to be reduced, so no rank cleans up in the next pass."""

    def interrupt(_grad):
        raise ArithmeticError

    batch, whole = randn(1, 2, 4, 2, 1), initialized(nn.Conv3d(2, 2, 1))
    whole(batch).square().mean().backward()

    def body(mesh):
        frozen = parallelize(initialized(nn.Conv3d(2, 2, 1)).requires_grad_(False), mesh)
        model = parallelize(initialized(nn.Conv3d(2, 2, 1)), mesh)
        x = distribute_tensor(batch, mesh).requires_grad_()
        y = frozen(x)
        if mesh.rank == look:
            y.to_local()
        y.register_hook(interrupt)
        with pytest.raises(ArithmeticError):
            y.square().mean().backward()
        frozen(x).mean().backward()
        model(x).square().mean().backward()
        return model.weight.grad

    for found in on_ranks((parts, 1, 1), body, data=data):
        assert_same([found], [whole.weight.grad])


def test_a_backward_hook_on_one_rank_hides_no_change_in_place():
    """`v` is a copy of `x`: changing `v` makes `x` stale on all ranks."""

    def body(mesh):
        x = distribute_tensor(randn(3, 3, 1, 2, 1), mesh).requires_grad_() * 1
        model = nn.ReLU(inplace=True)
        if mesh.rank == 0:
            model.register_full_backward_hook(lambda m, i, o: None)
        v = x.flatten(0, 1).unflatten(0, (3, 3))
        with torch.no_grad():  # else torch refuses the change
            model(v)
        with pytest.raises(NotSupported, match="after a change in place of another"):
            x.sum()

    on_ranks((1, 2, 1), body)


@pytest.mark.parametrize("looking", [0, 1])
def test_a_hook_on_a_parametrization_of_one_rank_changes_no_order(looking):
    """On that rank the parametrization's gradients arrive in another order."""
    whole = nn.utils.parametrizations.weight_norm(nn.Conv3d(2, 3, 3, padding=1).double())
    x = randn(1, 2, 5, 4, 3)

    def gradients(model, x):
        return torch.autograd.grad(model(x).square().mean(), list(model.parameters()))

    def body(mesh):
        model = parallelize(copy.deepcopy(whole), mesh)
        if mesh.rank == looking:
            model.parametrizations.weight[0].register_full_backward_hook(lambda m, i, o: None)
        return gradients(model, distribute_tensor(x, mesh))

    expected = gradients(whole, x)
    for found in on_ranks((2, 1, 1), body):
        assert_same(found, expected)
