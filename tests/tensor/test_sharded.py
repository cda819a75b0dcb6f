"""ShardedTensor: its attributes, its behavior in autograd, and its refusals."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from pydist import (
    Layout,
    Mesh,
    ShardedTensor,
    distribute_tensor,
    layout_for_sample,
    parallelize,
    run_local,
)
from pydist.errors import UsageError
from support.equivalence import layout_at, on_ranks, on_shards, randn, shard, whole_of
from support.jobs.children import child_environment
from support.networks.small import initialized

SHAPE = (2, 3, 5, 4, 3)
GRID = (2, 1, 1)


# -- attributes and values ------------------------------------------------------------------


def test_it_is_a_tensor_of_the_global_shape():
    def body(x, mesh):
        assert isinstance(x, torch.Tensor)
        assert torch.is_tensor(x)
        assert isinstance(x * 2, ShardedTensor)
        assert (x.shape, x.size(), x.size(2), x.size(-1)) == (SHAPE, SHAPE, 5, 3)
        assert (x.dim(), x.ndim, len(x), x.numel(), x.nelement()) == (5, 5, 2, 360, 360)
        assert (x.dtype, x.device, x.element_size()) == (torch.float64, torch.device("cpu"), 8)
        assert x.is_floating_point()
        assert torch.is_floating_point(x)
        assert not x.is_cuda
        assert x.is_leaf
        assert x.requires_grad
        assert x.mesh is mesh
        assert x.layout == layout_for_sample(mesh, SHAPE)
        assert x.to_local().shape == x.layout.local_shape
        assert hash(x) == hash(x)
        assert {x: 1}[x] == 1
        assert "ShardedTensor(shape=(2, 3, 5, 4, 3)" in repr(x)
        assert "depth" in f"{x}"

    on_shards(body)


@pytest.mark.parametrize("channels_last", [False, True])
def test_memory_format(channels_last):
    """A network may choose a memory format; sharded tensors keep it."""

    def body(x, mesh):
        if channels_last:
            x = x.to(memory_format=torch.channels_last_3d)
        assert x.is_contiguous()
        assert x.is_contiguous(memory_format=torch.channels_last_3d) is channels_last
        y = x.contiguous(memory_format=torch.channels_last_3d)
        assert y.to_local().is_contiguous(memory_format=torch.channels_last_3d)
        assert torch.equal(y.full_tensor(), randn(*SHAPE))

    on_shards(body)


def test_values_of_one_element():
    def body(x, mesh):
        one = x.detach().sum((0, 1, 2, 3, 4), keepdim=True)
        assert isinstance(one, ShardedTensor)
        expected = pytest.approx(float(randn(*SHAPE).sum()), rel=1e-12)
        assert one.item() == expected
        assert float(one) == expected
        assert int(one) == int(randn(*SHAPE).sum())
        assert bool(one)
        assert f"{one:.3f}" == f"{float(randn(*SHAPE).sum()):.3f}"
        assert x.detach().tolist() == randn(*SHAPE).tolist()

    on_shards(body)


def test_distribute_and_back():
    def body(mesh):
        whole = randn(*SHAPE)
        for dims in (None, {2: "depth"}, {1: "width", 4: "depth"}, {}):
            assert torch.equal(distribute_tensor(whole, mesh, dims).full_tensor(), whole)

    on_ranks((2, 2, 2), body)


def test_gradient_of_a_distributed_plain_tensor():
    """Every rank gets the full gradient, as it holds the full tensor."""

    def body(mesh):
        whole = randn(*SHAPE).requires_grad_()
        (distribute_tensor(whole, mesh) ** 2).sum().backward()
        torch.testing.assert_close(whole.grad, 2 * randn(*SHAPE), rtol=1e-12, atol=0)

    on_ranks((2, 2, 1), body)


def test_a_plain_loss_after_full_tensor():
    def body(x, mesh):
        x.full_tensor().square().sum().backward()
        torch.testing.assert_close(x.grad.full_tensor(), 2 * randn(*SHAPE), rtol=1e-12, atol=0)

    on_shards(body, (2, 2, 1))


def test_a_loss_made_of_shards_and_of_the_full_tensor():
    def body(x, mesh):
        (x.square().sum() + x.full_tensor().exp().sum() + (x * x.full_tensor()).sum()).backward()
        expected = 4 * randn(*SHAPE) + randn(*SHAPE).exp()
        torch.testing.assert_close(x.grad.full_tensor(), expected, rtol=1e-12, atol=1e-12)

    on_shards(body, (2, 2, 1))


def test_from_local_refuses_a_shard_of_another_shape():
    def body(mesh):
        with pytest.raises(
            UsageError, match=r"\(2, 3, 5, 4, 3\) was given, but rank 0 holds \(2, 3, 3"
        ):
            ShardedTensor.from_local(randn(*SHAPE), layout_for_sample(mesh, SHAPE))

    on_ranks(GRID, lambda mesh: body(mesh) if mesh.rank == 0 else None)


@pytest.mark.parametrize(
    ("args", "named"), [((), {}), (("mesh", [0]), {}), (([0],), {}), ((), {"placements": [0]})]
)
def test_redistribute_as_dtensor_has_it_is_refused_in_one_line(args, named):
    def body(mesh):
        x = shard(randn(1, 2, 4, 4, 4), layout_at(mesh, (1, 2, 4, 4, 4), [[0, 2, 4], None, None]))
        with pytest.raises(UsageError, match="takes one pydist") as caught:
            x.redistribute(*args, **named)
        assert "\n" not in str(caught.value)

    on_ranks((2, 1, 1), body)


def test_redistribute_to_another_shape_is_refused():
    def body(x, mesh):
        with pytest.raises(UsageError, match="another shape or mesh"):
            x.redistribute(Layout(mesh, (4,), [None]))

    on_shards(body)


def test_deepcopy_is_independent():
    def body(x, mesh):
        y = copy.deepcopy(x)
        y.detach().mul_(0)
        assert torch.equal(x.full_tensor(), randn(*SHAPE))
        assert y.requires_grad

    on_shards(body)


# -- autograd -------------------------------------------------------------------------------


def test_detach_clone_requires_grad():
    def body(x, mesh):
        assert not x.detach().requires_grad
        assert x.clone().requires_grad
        assert not x.clone().is_leaf
        assert x.grad_fn is None
        assert (x * 2).grad_fn is not None
        y = x.detach().requires_grad_()
        assert y.is_leaf
        y.square().sum().backward()
        assert isinstance(y.grad, ShardedTensor)
        assert x.grad is None
        y.grad = None
        assert y.grad is None
        y.requires_grad = False
        assert not (y * 2).requires_grad
        assert not x.data.requires_grad

    on_shards(body)


def test_no_grad_and_inference_mode():
    def body(x, mesh):
        with torch.no_grad():
            assert not (x * 2).requires_grad
            assert not F.avg_pool3d(x, 3, 1, 1).requires_grad
        with torch.inference_mode():
            y = F.conv3d(x, randn(2, 3, 3, 3, 3), padding=1)
            assert y.is_inference()
            y.full_tensor()

    on_shards(body)


def test_gradients_accumulate_over_two_backwards():
    def body(x, mesh):
        for _ in range(2):
            x.square().sum().backward()
        torch.testing.assert_close(x.grad.full_tensor(), 4 * randn(*SHAPE), rtol=1e-12, atol=0)

    on_shards(body)


def test_retain_graph_and_retain_grad():
    def body(x, mesh):
        y = x * 3
        y.retain_grad()
        loss = y.square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        torch.testing.assert_close(y.grad.full_tensor(), 12 * randn(*SHAPE), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(x.grad.full_tensor(), 36 * randn(*SHAPE), rtol=1e-12, atol=1e-12)

    on_shards(body)


def test_backward_with_a_given_gradient():
    def body(x, mesh):
        (x * x).backward(distribute_tensor(randn(*SHAPE, seed=1), mesh))
        expected = 2 * randn(*SHAPE) * randn(*SHAPE, seed=1)
        torch.testing.assert_close(x.grad.full_tensor(), expected, rtol=1e-12, atol=1e-12)

    on_shards(body)


def test_backward_of_a_non_scalar_needs_a_gradient():
    def body(x, mesh):
        with pytest.raises(RuntimeError, match="not a scalar"):
            (x * 2).backward()
        with pytest.raises(RuntimeError, match="not a scalar"):
            torch.autograd.grad(x * 2, x)

    on_shards(body)


@pytest.mark.parametrize("given", [None, [None]], ids=str)
@pytest.mark.parametrize("extent", [1, 2])
def test_a_scalar_is_judged_by_the_global_shape(extent, given):
    """A kernel that covers the volume leaves one voxel on one rank; or two, one on each."""
    x, weight = randn(1, 2, 8, 4, 4), randn(1, 2, 8 // extent, 4, 4, seed=1)

    def body(transport):
        mesh = Mesh(transport, 1, (2, 1, 1), keep_thin_blocks=True)
        for way in ("backward", "grad"):
            part = distribute_tensor(x, mesh).detach().requires_grad_()
            y = F.conv3d(part, weight, stride=(8 // extent, 1, 1))
            run = torch.autograd.backward if way == "backward" else torch.autograd.grad
            arguments = (y, given) if way == "backward" else (y, part, given)
            if extent == 2:
                with pytest.raises(RuntimeError, match="not a scalar"):
                    run(*arguments)
                continue
            found = run(*arguments)
            grad = part.grad if way == "backward" else found[0]
            assert torch.allclose(grad.full_tensor(), weight, rtol=0, atol=1e-12)

    run_local(body, 2)


def test_a_complex_scalar_needs_a_gradient():
    def body(x, mesh):
        total = torch.complex(x, x).sum(dim=[*range(x.dim())], keepdim=True)
        with pytest.raises(RuntimeError, match="only for real scalar outputs"):
            total.backward()

    on_shards(body)


def test_autograd_grad_of_sharded_and_plain_inputs():
    def body(x, mesh):
        weight = randn(3, 1, 1, 1, seed=1).requires_grad_()
        unused = randn(2).requires_grad_()
        gx, gw, none = torch.autograd.grad(
            (x * weight).square().sum(), [x, weight, unused], allow_unused=True
        )
        assert isinstance(gx, ShardedTensor)
        assert none is None
        expected = 2 * randn(*SHAPE) * weight.detach() ** 2
        torch.testing.assert_close(gx.full_tensor(), expected, rtol=1e-12, atol=1e-12)
        assert gw.shape == weight.shape

    on_shards(body)


def test_tensor_hooks_see_and_change_the_sharded_gradient():
    def body(x, mesh):
        seen = []
        y = x * 1
        y.register_hook(lambda g: seen.append(g) or g * 10)
        y.square().sum().backward()
        assert isinstance(seen[0], ShardedTensor)
        torch.testing.assert_close(seen[0].full_tensor(), 2 * randn(*SHAPE), rtol=1e-12, atol=0)
        torch.testing.assert_close(x.grad.full_tensor(), 20 * randn(*SHAPE), rtol=1e-12, atol=0)

    on_shards(body)


def test_whole_gradients_of_one_number():
    def body(x, mesh):
        y = x[1, 0, 3, 0, 0]
        y.register_hook(lambda g: g.full_tensor() * 2)
        (grad,) = torch.autograd.grad(y, x, torch.tensor(3.0).double())
        assert grad.full_tensor().sum() == 6

    on_shards(body)


def test_a_removed_hook_is_silent():
    def body(x, mesh):
        handle = x.register_hook(lambda g: pytest.fail("called"))
        handle.remove()
        x.sum().backward()

    on_shards(body)


@pytest.mark.parametrize("leaf", [lambda x: x.detach().requires_grad_(), nn.Parameter])
@pytest.mark.parametrize("spatial", [(2, 1, 1), (2, 2, 2)])
def test_gradients_of_replicated_leaves_are_the_true_ones(spatial, leaf):
    """Split over the depth alone, each block is on several ranks; all show equal gradients."""

    def body(mesh):
        sliced = distribute_tensor(randn(*SHAPE), mesh, dims={2: "depth"})
        x = leaf(sliced)
        other = shard(randn(*SHAPE, seed=1), layout_for_sample(mesh, SHAPE))
        loss = (x * other).square().sum()
        (asked,) = torch.autograd.grad(loss, x, retain_graph=True)
        shown = []
        x.register_hook(shown.append)
        loss.backward()
        expected = 2 * randn(*SHAPE) * randn(*SHAPE, seed=1) ** 2
        for grad in (asked, shown[0], x.grad):
            torch.testing.assert_close(grad.full_tensor(), expected, rtol=1e-12, atol=1e-12)
            local = shard(expected, grad.layout).to_local().detach()
            torch.testing.assert_close(grad.to_local(), local, rtol=1e-12, atol=1e-12)

    on_ranks(spatial, body)


@pytest.mark.parametrize("spatial", [(2, 1, 1), (2, 2, 2)])
def test_hooks_on_replicated_results_see_the_true_gradient(spatial):
    def body(mesh):
        x = distribute_tensor(randn(*SHAPE), mesh, dims={2: "depth"}).detach().requires_grad_()
        other = shard(randn(*SHAPE, seed=1), layout_for_sample(mesh, SHAPE))
        hooked = x * 3
        shown = []
        hooked.register_hook(shown.append)
        retained = x * 3
        retained.retain_grad()
        sum((y * other).square().sum() for y in (hooked, retained)).backward()
        expected = 6 * randn(*SHAPE) * randn(*SHAPE, seed=1) ** 2
        for grad in (shown[0], retained.grad):
            local = shard(expected, grad.layout).to_local().detach()
            torch.testing.assert_close(grad.to_local(), local, rtol=1e-12, atol=1e-12)

    on_ranks(spatial, body)


class Hooked(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv3d(3, 2, 3, padding=1)

    def forward(self, x):
        return self.conv(x).tanh()


HOOKS = ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook",
         "register_full_backward_pre_hook"]  # fmt: skip


@pytest.mark.parametrize("spatial", [(2, 1, 1), (2, 2, 2), (8, 1, 1)])
@pytest.mark.parametrize("hook", HOOKS)
def test_module_hooks_are_shown_sharded_tensors(hook, spatial):
    def run(model, x):
        seen = []
        getattr(model.conv, hook)(lambda module, *tensors: seen.extend(tensors) or None)
        model(x).square().sum().backward()
        flat = [t for each in seen for t in (each if isinstance(each, tuple) else (each,))]
        return [t.full_tensor().detach() if isinstance(t, ShardedTensor) else t for t in flat]

    model = initialized(Hooked())
    expected = run(copy.deepcopy(model), randn(*SHAPE).requires_grad_())

    def body(x, mesh):
        return run(parallelize(copy.deepcopy(model), mesh), x)

    for found in on_shards(body, spatial):
        assert len(found) == len(expected) > 0
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b.detach(), rtol=1e-10, atol=1e-12)


RETURNED = {
    "as given": lambda g: g,
    "whole": whole_of,
    "in another layout": lambda g: (
        g.redistribute(g.layout.whole()) if isinstance(g, ShardedTensor) else g
    ),
}


@pytest.mark.parametrize("returned", RETURNED.values(), ids=RETURNED)
@pytest.mark.parametrize("hook", ["register_full_backward_hook", "register_full_backward_pre_hook"])
def test_module_backward_hooks_may_change_the_gradient(hook, returned):
    def double(module, grads, *_):
        return tuple(2 * returned(g) for g in grads)

    def gradient(model, x):
        getattr(model.conv, hook)(double)
        model(x).square().sum().backward()
        return x.grad

    model = initialized(Hooked())
    expected = gradient(copy.deepcopy(model), randn(*SHAPE).requires_grad_())

    def body(x, mesh):
        grad = gradient(parallelize(copy.deepcopy(model), mesh), x).full_tensor()
        torch.testing.assert_close(grad, expected, rtol=1e-10, atol=1e-12)

    on_shards(body)


@pytest.mark.parametrize("spatial", [(2, 1, 1), (8, 1, 1), (2, 2, 2)])
def test_checkpointing_with_empty_shards(spatial):
    def gradient(x, weight, recompute):
        def block(v):
            v = F.avg_pool3d(F.conv3d(v, weight, padding=1), 2, 1, 1)
            return F.leaky_relu(F.conv3d(v, weight, padding=1, stride=2))

        y = checkpoint(block, x, use_reentrant=False) if recompute else block(x)
        y = checkpoint(block, y, use_reentrant=False) if recompute else block(y)
        y.square().sum().backward()
        return x.grad

    weight = randn(3, 3, 3, 3, 3, seed=1)
    expected = gradient(randn(*SHAPE).requires_grad_(), weight.clone().requires_grad_(), False)

    def body(x, mesh):
        grad = gradient(x, weight.clone().requires_grad_(), True).full_tensor()
        torch.testing.assert_close(grad, expected, rtol=1e-10, atol=1e-12)

    on_shards(body, spatial)
    on_shards(body, spatial, keep_thin_blocks=True)


def test_handlers_are_there_for_every_rank_thread():
    """The first call imports the handlers; other threads must not find them half registered."""
    code = """
import torch, torch.nn.functional as F
from pydist.comm import run_local
from pydist.layout import layout_for_sample
from pydist.mesh import Mesh
from pydist.tensor import ShardedTensor

def rank(world):
    layout = layout_for_sample(Mesh(world, 1, (8, 1, 1)), (1, 1, 8, 3, 3))
    x = ShardedTensor.from_local(torch.ones(layout.local_shape), layout)
    return F.conv3d(x, torch.ones(1, 1, 3, 3, 3)).shape

print(run_local(rank, 8)[0])
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parent,  # not the checkout's folder, where sources hide the package
        env=child_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert "[1, 1, 6, 1, 1]" in done.stdout, done.stderr
