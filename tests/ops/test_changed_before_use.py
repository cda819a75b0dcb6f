"""Operands that change after a call and before its result is used: the result is torch's."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pydist import ShardedTensor, distribute_tensor, layout_for_sample, parallelize
from pydist.ops.norm import norm_common
from support.equivalence import assert_same, on_ranks, randn


@pytest.fixture(autouse=True)
def small_tensors_as_large_ones(monkeypatch):
    monkeypatch.setattr(norm_common, "_WORTH_A_PASS", 0)


def exchanged(t):
    other = torch.full_like(t, 0.2)
    torch.utils.swap_tensors(t, nn.Parameter(other) if isinstance(t, nn.Parameter) else other)


def through_data(t):
    t.data = torch.full_like(t, 0.2)


def stepped(t):
    before, t.grad = t.grad, torch.ones_like(t)
    torch.optim.SGD([t], 0.5).step()
    t.grad = before


ROADS = {
    "in place": lambda t: t.mul_(3),
    "data": lambda t: t.data.clamp_(-0.01, 0.01),
    "numpy": lambda t: t.detach().numpy().fill(0.3),
    "set_": lambda t: t.set_(torch.full_like(t, 0.2)),
    "foreach": lambda t: torch._foreach_mul_([t], 3.0),
    "a view": lambda t: t.view(-1)[:2].zero_(),
    "data assigned": through_data,
    "exchanged": exchanged,
    "optimizer": stepped,
}

MODELS = {
    "conv": [nn.Conv3d(2, 3, 3, padding=1)],
    "conv, ReLU": [nn.Conv3d(2, 3, 3, padding=1), nn.ReLU(inplace=True)],
    "conv, ReLU, pool": [
        nn.Conv3d(2, 3, 3, padding=1), nn.LeakyReLU(0.1, inplace=True), nn.AvgPool3d(3, 2, 1),
    ],
    "conv, norm": [nn.Conv3d(2, 3, 3, padding=1), nn.InstanceNorm3d(3, affine=True)],
    "conv, norm, ReLU": [
        nn.Conv3d(2, 3, 3, padding=1), nn.BatchNorm3d(3), nn.ReLU(inplace=True),
    ],
    "transposed": [nn.ConvTranspose3d(2, 3, 3, padding=1)],
    "transposed, ReLU": [
        nn.ConvTranspose3d(2, 3, 4, 2, 1), nn.LeakyReLU(0.1, inplace=True),
    ],
    "transposed, norm, PReLU": [
        nn.ConvTranspose3d(2, 3, 3, 2, 1), nn.GroupNorm(3, 3), nn.PReLU(),
    ],
    "evaluated": [nn.Conv3d(2, 3, 3, padding=1), nn.BatchNorm3d(3).eval(), nn.ReLU(inplace=True)],
}  # fmt: skip
SHAPE = (2, 2, 8, 6, 4)


def model_of(name):
    torch.manual_seed(3)
    return copy.deepcopy(nn.Sequential(*MODELS[name])).double()


@torch.no_grad()
def changed_after(model, x, change, last):
    """Returns the result after operands changed, before its use or before the last module ran."""
    y = x
    for module in model[: len(model) - last]:
        y = module(y)
    for t in (*model.parameters(), *(b for b in model.buffers() if b.is_floating_point())):
        change(t)
    # The last modules run with the changed operands, as torch's do.
    for module in model[len(model) - last :]:
        y = module(y)
    return y


@pytest.mark.parametrize("change", ROADS.values(), ids=ROADS)
@pytest.mark.parametrize("name", MODELS)
def test_weights_and_buffers(name, change):
    for last in range(min(2, len(MODELS[name]))):
        expected = changed_after(model_of(name), randn(*SHAPE), change, last)

        def rank(mesh, last=last):
            x = distribute_tensor(randn(*SHAPE), mesh)
            return changed_after(model_of(name), x, change, last).full_tensor()

        for found in on_ranks((2, 1, 1), rank):
            assert_same(found, expected)


def test_in_a_forward():
    """Forward itself moves an average of the weights, before each use."""

    class Moving(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv3d(2, 2, 3, padding=1)

        def forward(self, x):
            first = self.conv(x)
            self.conv.weight.data.lerp_(torch.ones_like(self.conv.weight), 0.3)
            second = self.conv(x)
            self.conv.bias.data.add_(1.0)
            return F.relu_(first) + second

    torch.manual_seed(3)
    model, x = Moving().double(), randn(*SHAPE)
    expected = copy.deepcopy(model)(x)

    def rank(mesh):
        return parallelize(copy.deepcopy(model), mesh)(distribute_tensor(x, mesh)).full_tensor()

    for found in on_ranks((2, 1, 1), rank):
        assert_same(found, expected)


def test_gradients_after_a_change_that_torch_does_not_see():
    def gradient(x, w, change):
        x.requires_grad_()
        y = F.conv3d(F.relu_(F.conv3d(x, w, padding=1)), w, padding=1)
        change(w)
        y.square().sum().backward()
        return x.grad

    weight = randn(2, 2, 3, 3, 3, seed=1)
    for change in (lambda t: t.data.mul_(0.5), lambda t: t.detach().numpy().fill(0.3)):
        expected = gradient(randn(*SHAPE), weight.clone().requires_grad_(), change)

        def rank(mesh, change=change):
            x = distribute_tensor(randn(*SHAPE), mesh).detach()
            return gradient(x, nn.Parameter(weight.clone()), change).full_tensor()

        for found in on_ranks((2, 1, 1), rank):
            assert_same(found, expected)


@pytest.mark.parametrize("slopes", [1, 2])
def test_prelu_after_a_norm_goes_back_through_the_slopes_as_they_are(slopes):
    """torch saves the slopes without a copy."""
    whole = randn(2, 2, 4, 3, 2)

    def gradients(x):
        slope = torch.full((slopes,), 0.3, dtype=whole.dtype, requires_grad=True)
        y = F.prelu(F.instance_norm(x.requires_grad_()), slope)
        slope.data.mul_(0.1)
        return torch.autograd.grad(y.sin().sum(), x)[0]

    def body(mesh):
        found = gradients(distribute_tensor(whole.clone(), mesh)).full_tensor()
        assert_same(found, gradients(whole.clone()))

    on_ranks((2, 1, 1), body)


@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("grid", [(1, 1, 1), (2, 1, 1)], ids=str)
def test_instance_norm_goes_back_through_the_weight_that_it_had(grid, samples):
    """torch copies the weight; one sample on one rank has a code path of its own."""
    whole = randn(samples, 2, 4, 3, 2)

    def gradient(x):
        weight = torch.tensor([0.7, 1.3], dtype=whole.dtype, requires_grad=True)
        y = F.instance_norm(x.requires_grad_(), weight=weight)
        weight.data.mul_(0.1)
        return torch.autograd.grad(y.sin().sum(), x)[0]

    def body(mesh):
        found = gradient(distribute_tensor(whole.clone(), mesh)).full_tensor()
        assert_same(found, gradient(whole.clone()))

    on_ranks(grid, body)


def test_gradients_after_a_change_that_torch_sees_are_refused_as_torch_refuses_them():
    def rank(mesh):
        w = nn.Parameter(randn(2, 2, 3, 3, 3))
        x = distribute_tensor(randn(*SHAPE), mesh).requires_grad_()
        y = F.relu_(F.conv3d(x, w, padding=1))
        with torch.no_grad():
            w.mul_(2.0)
        with pytest.raises(RuntimeError, match="modified"):
            y.sum().backward()

    on_ranks((2, 1, 1), rank)


CONVOLUTIONS = {
    "conv": lambda x, w, b: F.conv3d(x, w, b, padding=1),
    "local": lambda x, w, b: F.conv3d(x, w[:, :, :1, :1, :1], b),
    "transposed": lambda x, w, b: F.conv_transpose3d(x, w.transpose(0, 1), b, 2, 1),
}


@pytest.mark.parametrize("function", CONVOLUTIONS.values(), ids=CONVOLUTIONS)
def test_a_bias_may_change_before_backward_as_with_torch(function):
    def gradients(x, w, b):
        x.requires_grad_()
        y = function(x, w, b)
        with torch.no_grad():
            b.mul_(2.0)
        first = torch.autograd.grad(y.pow(3).sum(), (x, w, b), create_graph=True)
        first[0].square().sum().backward()
        return x.grad

    def operands():
        return nn.Parameter(randn(2, 2, 3, 3, 3, seed=1)), nn.Parameter(randn(2, seed=2))

    expected = gradients(randn(*SHAPE), *operands())

    def rank(mesh):
        x = distribute_tensor(randn(*SHAPE), mesh).detach()
        return gradients(x, *operands()).full_tensor()

    for found in on_ranks((2, 1, 1), rank):
        assert_same(found, expected)


def memory_of(x):
    """Returns the tensor itself, or its shard."""
    return x.to_local() if isinstance(x, ShardedTensor) else x


# Sources of a tensor h, and of another tensor that can change its memory.
ALIASES = {
    "itself": lambda x: (x * 1.0,) * 2,
    "its input": lambda x: (x.detach(), x),
    "data": lambda x: ((h := x * 1.0), h.data),
    "the memory": lambda x: ((h := x * 1.0), memory_of(h)),
    "the user's own": lambda x: (x, memory_of(x)),
    "a slice": lambda x: (x[:, :2], x),
    "a view": lambda x: ((h := x * 1.0), h.view_as(h)),
    "an activation": lambda x: ((h := F.conv3d(x, randn(2, 2, 3, 3, 3), padding=1)), F.relu_(h)),
}
NORMS = {
    "batch": lambda x: F.batch_norm(x, None, None, training=True),
    "instance": F.instance_norm,
    "evaluated": lambda x: F.batch_norm(x, *randn(2, x.shape[1]).abs()),
    "conv": lambda x: F.conv3d(x, randn(2, x.shape[1], 3, 3, 3), padding=1),
}  # fmt: skip
CHANGES = {
    "in place": lambda t: t.add_(5.0),
    "data": lambda t: t.data.add_(5.0),
    "numpy": lambda t: np_add(memory_of(t)),
}


def np_add(t):
    t.numpy()[...] += 5.0


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("alias", ALIASES.values(), ids=ALIASES)
@pytest.mark.parametrize("function", NORMS.values(), ids=NORMS)
def test_inputs(function, alias, change):
    @torch.no_grad()
    def changed(x, act):
        h, other = alias(x)
        y = function(h)
        change(other)
        return act(y)

    acts = [F.relu_, lambda y: F.prelu(y, torch.tensor([0.2]).double())]
    for act in acts:
        expected = changed(randn(1, 2, 8, 4, 4), act)

        def rank(mesh, act=act):
            x = randn(1, 2, 8, 4, 4)
            layout = layout_for_sample(mesh, x.shape)
            lo, hi = layout.box.lo[2], layout.box.hi[2]
            part = ShardedTensor.from_local(x[:, :, lo:hi].clone(), layout)
            return changed(part, act).full_tensor()

        for found in on_ranks((2, 1, 1), rank):
            assert_same(found, expected)
