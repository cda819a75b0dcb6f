"""Parameters used on plain shards, between `to_local` and `from_local`: their true gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from pydist import ShardedTensor, distribute_tensor, parallelize
from pydist.errors import NotSupported
from support.equivalence import (
    even_points,
    group_slice,
    layout_at,
    on_ranks,
    randn,
    shard,
    whole_of,
)
from support.networks.small import check_use, initialized

BATCH = 2
SHAPE = (BATCH, 1, 6, 5, 4)


class Times(torch.autograd.Function):
    """User-defined autograd function, which a sharded tensor refuses."""

    @staticmethod
    def forward(ctx, x, k):
        ctx.save_for_backward(x, k)
        return x * k

    @staticmethod
    def backward(ctx, grad):
        x, k = ctx.saved_tensors
        return grad * k, (grad * x).sum()


class Net(nn.Module):
    """Network with local computation between two convolutions."""

    def __init__(self, middle):
        super().__init__()
        self.middle = middle
        self.first = nn.Conv3d(1, 2, 3, padding=1)
        self.k = nn.Parameter(torch.ones(()))
        self.mix = nn.Conv3d(2, 2, 1)
        self.last = nn.Conv3d(2, 1, 3, padding=1)
        initialized(self)

    def forward(self, x):
        return self.last(self.middle(self, x, self.first(x)))


def local(y):
    return y.to_local() if isinstance(y, ShardedTensor) else y


def back(shard, y):
    return ShardedTensor.from_local(shard, y.layout) if isinstance(y, ShardedTensor) else shard


def shared(net, x, y):
    """Uses one local result in two sharded tensors."""
    scaled = local(y) * net.k
    return back(scaled * 2, y) + back(scaled.sin(), y)


def computed(net, x, y):
    """Uses a computed weight on shards and on the sharded tensor."""
    weight = net.k.sin() * 2
    return back(local(y) * weight, y) * weight


def nested(net, x, y):
    y = net.mix(back(local(y) * net.k, y))
    return back(local(y) * net.k, y)


def with_whole(net, x, y):
    """Uses a plain full tensor that comes from a sharded one."""
    return back(local(y) * whole_of(y).sin().sum((2, 3, 4), keepdim=True) * net.k, y)


def own_part(net, x, y):
    """Lets each rank slice its own part from a full tensor."""
    if not isinstance(y, ShardedTensor):
        return y * net.k
    box = y.layout.box
    part = box.slices
    return back((y.full_tensor() * net.k)[part], y)


def product(y):
    return torch.einsum("ncdhw,ncdhw->", y, y).sqrt()


def mixed(net, y):
    """Runs part of the network on a plain tensor, which backward calls again."""
    return back(net.mix(local(y) * net.k), y)


MIDDLES = {
    "function": lambda net, x, y: back(Times.apply(local(y), net.k), y),
    "layer": lambda net, x, y: back(net.mix(local(y)), y),
    "constant shard": lambda net, x, y: y + back(local(x) * net.k, x),
    "added": lambda net, x, y: back(local(y) + net.mix.weight.sum() * local(y).detach().cos(), y),
    "shared": shared,
    "computed": computed,
    "nested": nested,
    "whole": with_whole,
    "own part": own_part,
    "product": lambda net, x, y: back(local(y) * product(y), y),
    "checkpointed": lambda net, x, y: checkpoint(mixed, net, y, use_reentrant=False),
}


def step(net, mesh, penalty):
    x = randn(*SHAPE)
    if mesh is not None:
        x = distribute_tensor(x[group_slice(mesh, BATCH)], mesh)
    loss = net(x).square().mean()
    if penalty:
        grads = torch.autograd.grad(
            loss, list(net.parameters()), create_graph=True, allow_unused=True
        )
        loss = loss + sum(g.square().sum() for g in grads if g is not None)
    loss.backward()
    return [p.grad for p in net.parameters()]


@pytest.mark.parametrize("spatial", [(2, 1, 1), (1, 3, 2)], ids=str)
@pytest.mark.parametrize("middle", MIDDLES)
def test_parameters_on_local_shards(middle, spatial):
    check_use(lambda: Net(MIDDLES[middle]), lambda net, mesh: step(net, mesh, False), 1, spatial)


# torch allows one backward pass through a checkpointed region.
@pytest.mark.parametrize("middle", [m for m in MIDDLES if m != "checkpointed"])
def test_second_order(middle):
    check_use(lambda: Net(MIDDLES[middle]), lambda net, mesh: step(net, mesh, True), 1, (2, 1, 1))


# The others compute with numbers of one group.
@pytest.mark.parametrize("middle", [m for m in MIDDLES if m not in ("whole", "product")])
def test_two_groups(middle):
    check_use(lambda: Net(MIDDLES[middle]), lambda net, mesh: step(net, mesh, False), 2, (2, 1, 1))


def test_a_shard_of_a_replicated_tensor_is_not_scaled():
    def use(mesh):
        k = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
        x = distribute_tensor(randn(*SHAPE), mesh, {})
        loss = ShardedTensor.from_local(x.to_local() * k, x.layout).sum()
        loss.backward()
        return k.grad

    for found in on_ranks((2, 1, 1), use):
        torch.testing.assert_close(found, randn(*SHAPE).sum())


def test_one_graph_for_layouts_with_other_copies_is_refused():
    def use(mesh):
        k = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
        # 2 x 2 ranks: split in depth (two copies), and in depth and height.
        thin = layout_at(mesh, SHAPE, (even_points(6, 2), None, None))
        x = shard(randn(*SHAPE), thin).requires_grad_()
        scaled = x.to_local() * k
        ShardedTensor.from_local(scaled, thin)
        fine = layout_at(mesh, SHAPE, (even_points(6, 2), even_points(5, 2), None))
        box = fine.box
        with pytest.raises(NotSupported, match="compute the part once for each"):
            ShardedTensor.from_local(scaled[..., box.lo[3] : box.hi[3], :], fine)

    on_ranks((2, 2, 1), use)


def test_a_shard_of_another_tensor_with_copies_is_refused():
    """In hand-written channel attention, for example, every rank holds the full pooled tensor."""

    def use(mesh):
        y = distribute_tensor(randn(*SHAPE), mesh).requires_grad_()
        pooled = y.mean((2, 3, 4), keepdim=True)
        with pytest.raises(NotSupported, match=r"take full_tensor\(\) of that"):
            ShardedTensor.from_local(y.to_local() * pooled.to_local(), y.layout)
        ShardedTensor.from_local(y.to_local() * pooled.full_tensor(), y.layout).sum().backward()

    on_ranks((2, 1, 1), use)


@pytest.mark.parametrize("penalized", [False, True])
@pytest.mark.parametrize("detached", [False, True])
def test_a_gradient_of_a_shard_goes_back(penalized, detached):
    """The loss has a penalty on the gradient of a leaf shard, whose graph has sharded calls."""

    def use(model, mesh):
        x = randn(*SHAPE)
        if mesh is not None:
            x = distribute_tensor(x, mesh)
        shard = local(x).detach().requires_grad_()
        loss = model(back(shard, x)).sin().mean()
        (grad,) = torch.autograd.grad(loss, shard, create_graph=True)
        wrapped = back(grad.detach() if detached else grad, x)
        if penalized:
            loss = loss + wrapped.square().sum()
        loss.backward()
        return [p.grad for p in model.parameters()]

    check_use(lambda: Net(lambda net, x, y: mixed(net, y)), use)


def test_the_gradient_of_a_parameter_on_a_shard():
    def use(model, mesh):
        x = randn(*SHAPE)
        if mesh is not None:
            x = distribute_tensor(x, mesh)
        y = model.first(x)
        (grad,) = torch.autograd.grad(model(x).sin().mean(), model.k, create_graph=True)
        (back(local(y) * grad, y)).square().mean().backward()
        return [p.grad for p in model.parameters()]

    check_use(lambda: Net(lambda net, x, y: mixed(net, y)), use)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("copies", [False, True])
def test_fast_weights_on_shards(copies, groups):
    def use(model, mesh):
        x = randn(*SHAPE)
        if mesh is not None:
            x = distribute_tensor(x[group_slice(mesh, BATCH)], mesh)
        weights = dict(model.named_parameters())
        if copies:
            weights = {n: p.detach().clone().requires_grad_() for n, p in weights.items()}
        found = []
        for _ in range(3):
            loss = torch.func.functional_call(model, weights, (x,)).square().mean()
            grads = torch.autograd.grad(loss, list(weights.values()), create_graph=not copies)
            weights = {n: w - 0.01 * g for (n, w), g in zip(weights.items(), grads, strict=True)}
            if copies:
                weights = {n: w.detach().requires_grad_() for n, w in weights.items()}
            found += grads
        return [*found, *weights.values()]

    check_use(lambda: Net(lambda net, x, y: mixed(net, y)), use, groups)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("of_input", [False, True])
def test_a_shard_that_changes_in_place(of_input, groups):
    """The shard changes after `to_local`; then the sharded tensor itself is used."""

    def use(model, mesh):
        x = randn(*SHAPE)
        if mesh is not None:
            x = distribute_tensor(x[group_slice(mesh, BATCH)], mesh)
        y = x * 1 if of_input else model.first(x)
        local(y).mul_(model.k)
        (y if of_input else model.last(y * model.k)).sin().mean().backward()
        return [p.grad for p in model.parameters()]

    check_use(lambda: Net(MIDDLES["layer"]), use, groups)


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("channel", [1, 2])
def test_a_call_in_place_after_to_local(channel, again):
    """As hooks that look at results see them before `x += identity` of a residual block."""

    def step(model, x):
        x.requires_grad_()
        y, identity = model.first(x), torch.cat([x, x], 1).relu()
        seen = local(y)
        local(identity)
        y += identity
        if again:
            seen.mul_(model.k)
        y.sin().mean().backward()
        return [p.grad for p in model.parameters()]

    expected = step(Net(MIDDLES["layer"]), randn(*SHAPE))

    def use(mesh):
        model = Net(MIDDLES["layer"])
        return step(parallelize(model, mesh), distribute_tensor(randn(*SHAPE), mesh))

    for found in on_ranks((2, 1, 1), use, axes={"channel": channel}):
        for grad, true in zip(found, expected, strict=True):
            torch.testing.assert_close(grad, true, rtol=0, atol=1e-12)


def _view_after_the_look(model, y, branch):
    seen = local(y)
    y[:, :1] += branch[:, :1]
    return seen, y


def _view_before_the_look(model, y, branch):
    part = y[:, :1]
    seen = local(y)
    part += branch[:, :1]
    return seen, y


def _look_at_the_view(model, y, branch):
    part = y[:, :1]
    seen = local(part)
    y += branch
    return seen, part + y


def _view_after_a_change_of_the_program(model, y, branch):
    part = y[:, :1]
    seen = local(y)
    seen.mul_(model.k)
    part.mul_(2)
    return local(branch), y


def _look_at_a_view_without_gradients(model, y, branch):
    with torch.no_grad():
        part = y[:, :1]
    seen = local(y)
    local(part)
    y += branch
    return seen, y


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize(
    "change",
    [
        _look_at_a_view_without_gradients,
        _view_after_the_look,
        _view_before_the_look,
        _look_at_the_view,
        _view_after_a_change_of_the_program,
    ],
)
def test_a_change_of_a_view_after_to_local(change, again):
    """The change is a sharded call's own, and the branch of whole tensors keeps its gradients."""

    def step(model, x):
        y = model.first(x)
        if isinstance(x, ShardedTensor):
            x = x.redistribute(x.layout.whole())
        seen, y = change(model, y, torch.cat([model.last(torch.cat([x, x], 1)), x], 1))
        if again:
            seen.mul_(model.k)
        y.sin().mean().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    expected = step(Net(MIDDLES["layer"]), randn(*SHAPE))

    def use(mesh):
        model = Net(MIDDLES["layer"])
        return step(parallelize(model, mesh), distribute_tensor(randn(*SHAPE), mesh))

    for found in on_ranks((2, 1, 1), use, keep_thin_blocks=True):
        for grad, true in zip(found, expected, strict=True):
            torch.testing.assert_close(grad, true, rtol=0, atol=1e-12)
