"""The gradient reducer: the mean over all ranks, whatever was used, by whom, and how often."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.nn.functional as F
from equivalence import group_slice, on_ranks, randn
from networks import BATCH, SHAPE, initialised, small
from torch import nn

import pydist.comm.reducer
from pydist import ShardedTensor, parallelize

GRIDS = [(1, (2, 1, 1)), (2, (2, 1, 1)), (2, (1, 2, 2)), (1, (8, 1, 1))]


def rows(mesh=None):
    return slice(None) if mesh is None else group_slice(mesh, BATCH)


def loss_of(model, mesh=None, seed=0):
    """The loss on this rank's samples of a batch."""
    x, target = randn(*SHAPE, seed=seed), randn(BATCH, 3, seed=seed + 100)
    return F.mse_loss(model(x[rows(mesh)]), target[rows(mesh)])


def check(make, use, data=1, spatial=(2, 1, 1), *, rtol=1e-10):
    """use(model, mesh or None) -> tensors, on one device with the whole batch and on a mesh."""
    expected = use(make(), None)
    for found in on_ranks(spatial, lambda mesh: use(parallelize(make(), mesh), mesh), data):
        assert len(found) == len(expected)
        for i, (a, b) in enumerate(zip(found, expected, strict=True)):
            assert (a is None) == (b is None), i
            if b is not None:
                torch.testing.assert_close(
                    a.detach(), b.detach(), rtol=rtol, atol=1e-12, msg=lambda m, i=i: f"{i}: {m}"
                )


def gradients(model):
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize(("data", "spatial"), GRIDS)
def test_two_backwards_accumulate(data, spatial):
    def use(model, mesh):
        for seed in (0, 1):
            loss_of(model, mesh, seed).backward()
        return gradients(model)

    check(small, use, data, spatial)


@pytest.mark.parametrize(("data", "spatial"), GRIDS)
def test_no_sync_then_a_backward_that_reduces(data, spatial):
    def use(model, mesh):
        if mesh is None:
            loss_of(model, mesh, 0).backward()
        else:
            with model.no_sync():
                loss_of(model, mesh, 0).backward()
        loss_of(model, mesh, 1).backward()
        return gradients(model)

    check(small, use, data, spatial)


def test_no_sync_sends_nothing_and_restores():
    def body(mesh):
        model = parallelize(small(), mesh)
        with model.no_sync():
            loss_of(model, mesh).backward()
            assert "gradients" not in mesh.timers.snapshot()
        partial = model[0].weight.grad.clone()
        loss_of(model, mesh).backward()
        assert "gradients" in mesh.timers.snapshot()
        return partial

    first, second = on_ranks((2, 1, 1), body)
    assert not torch.equal(first, second)


def test_retained_graph_twice():
    def use(model, mesh):
        loss = loss_of(model, mesh)
        loss.backward(retain_graph=True)
        loss.backward()
        return gradients(model)

    check(small, use, data=2)


def test_zeroed_in_place_and_set_to_none():
    def use(model, mesh):
        for set_to_none in (True, False):
            loss_of(model, mesh, 1).backward()
            model.zero_grad(set_to_none=set_to_none)
        loss_of(model, mesh).backward()
        return gradients(model)

    check(small, use, data=2)


def test_unmodified_clip_grad_norm():
    def use(model, mesh):
        loss_of(model, mesh).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        return [norm, *gradients(model)]

    check(small, use, data=2)


def test_frozen_parameters_have_no_gradient():
    def make():
        model = small()
        model[0].weight.requires_grad_(False)
        model[9].bias.requires_grad_(False)
        return model

    def use(model, mesh):
        loss_of(model, mesh).backward()
        return gradients(model)

    check(make, use, data=2)


def test_parameters_unfrozen_later_are_reduced():
    def use(model, mesh):
        model[0].requires_grad_(False)
        loss_of(model, mesh).backward()
        model[0].requires_grad_(True)
        model.zero_grad()
        loss_of(model, mesh).backward()
        return gradients(model)

    check(small, use, data=2)


class Branches(nn.Module):
    """Parameters that some forwards leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = small()
        self.sometimes = nn.Parameter(randn(3, seed=5))
        self.never = nn.Parameter(randn(7, seed=6))

    def forward(self, x, use=True):
        y = self.trunk(x)
        return y * self.sometimes if use else y


def test_unused_parameters_stay_none_everywhere():
    def use(model, mesh):
        loss_of(lambda x: model(x, use=False), mesh).backward()
        return gradients(model)

    check(Branches, use, data=2)


def test_a_parameter_used_by_one_group_alone():
    """Zero counts for the others: the mean over the groups is that of the whole batch."""
    model = Branches()
    halves = [slice(0, 2), slice(2, 4)]
    (sum(_group_loss(model, halves[i], use=i == 0) for i in (0, 1)) / 2).backward()
    expected = gradients(model)

    def body(mesh):
        model = parallelize(Branches(), mesh)
        _group_loss(model, halves[mesh.data_index], use=mesh.data_index == 0).backward()
        return gradients(model)

    for found in on_ranks((2, 1, 1), body, data=2):
        assert found[1] is None
        for a, b in zip(found, expected, strict=True):
            if b is not None:
                torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def _group_loss(model, rows, use):
    return F.mse_loss(model(randn(*SHAPE)[rows], use=use), randn(BATCH, 3, seed=100)[rows])


def test_a_parameter_used_by_one_group_alone_beside_global_batch_norm(monkeypatch):
    """Its bucket starts at the end there, in the middle elsewhere: statistics must not mix in."""
    monkeypatch.setattr(pydist.comm.reducer, "BUCKET_BYTES", 1)

    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv3d(2, 2, 1)
            self.norm = nn.BatchNorm3d(2)
            self.sometimes = nn.Parameter(torch.ones(2, 1, 1, 1))

        def forward(self, x, use):
            y = self.norm(self.conv(x))
            return (y * self.sometimes if use else y).tanh().square().sum()

    def body(mesh):
        model = parallelize(initialised(Normed()), mesh)
        model(randn(*SHAPE, seed=mesh.data_index), mesh.data_index == 0).backward()
        return gradients(model)

    first, *others = on_ranks((2, 1, 1), body, data=2)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_an_input_of_a_shape_that_leaves_ranks_empty_at_depth():
    """Eight ranks, two voxels: most reach the parameters through empty blocks only."""

    def use(model, mesh):
        model(randn(1, 2, 2, 3, 3)).square().sum().backward()
        return gradients(model)

    def make():
        return initialised(
            nn.Sequential(
                nn.Conv3d(2, 3, 3, padding=1), nn.LeakyReLU(), nn.Conv3d(3, 2, 3, padding=1)
            )
        )

    check(make, use, spatial=(8, 1, 1))


def test_a_penalty_written_by_hand():
    def use(model, mesh):
        loss = loss_of(model, mesh) + 0.1 * sum(p.square().sum() for p in model.parameters())
        loss.backward()
        return gradients(model)

    check(small, use, data=2, spatial=(2, 2, 1))


def test_a_penalty_alone():
    """No exchange at all in this backward."""

    def use(model, mesh):
        sum(p.square().sum() for p in model.parameters()).backward()
        return gradients(model)

    check(small, use, data=2)


def input_of(mesh):
    if mesh is None:
        return randn(*SHAPE).requires_grad_()
    x = pydist.distribute_tensor(randn(*SHAPE)[rows(mesh)], mesh).detach()
    return x.requires_grad_()


@pytest.mark.parametrize(("data", "spatial"), [(1, (2, 2, 1)), (1, (8, 1, 1)), (2, (2, 1, 1))])
def test_gradient_penalty_on_the_input(data, spatial):
    """Wasserstein GANs: the norm of the input's gradient is part of the loss."""

    def use(model, mesh):
        x = input_of(mesh)
        (gx,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        norms = gx.square().sum((1, 2, 3, 4)).sqrt()
        (norms - 1).square().mean().backward()
        return gradients(model)

    check(small, use, data, spatial)


@pytest.mark.parametrize(("data", "spatial"), [(1, (2, 2, 1)), (1, (8, 1, 1)), (2, (2, 1, 1))])
def test_gradient_penalty_on_the_parameters(data, spatial):
    def use(model, mesh):
        grads = torch.autograd.grad(
            loss_of(model, mesh), list(model.parameters()), create_graph=True
        )
        sum(g.square().sum() for g in grads).backward()
        return [*grads, *gradients(model)]

    check(small, use, data, spatial)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_backward_with_create_graph_leaves_differentiable_gradients():
    def use(model, mesh):
        loss_of(model, mesh).backward(create_graph=True)
        grads = gradients(model)
        second = torch.autograd.grad(
            sum(g.square().sum() for g in grads), list(model.parameters())
        )
        model.zero_grad()
        return [*grads, *second]

    check(small, use, data=2)


@pytest.mark.parametrize(("data", "spatial"), GRIDS)
def test_autograd_grad_on_parameters_gives_the_mean(data, spatial):
    def use(model, mesh):
        found = torch.autograd.grad(loss_of(model, mesh), list(model.parameters()))
        assert all(g is None for g in gradients(model))
        return found

    check(small, use, data, spatial)


CHOSEN = {
    "first": ["0.weight"],
    "middle": ["4.bias", "4.weight"],
    "last": ["11.bias"],
    "none": [],
}


@pytest.mark.parametrize("names", CHOSEN.values(), ids=CHOSEN)
def test_autograd_grad_on_some_parameters_and_the_input(names):
    def use(model, mesh):
        x = input_of(mesh)
        chosen = [model.get_parameter(name) for name in names]
        gx, *rest = torch.autograd.grad(model(x).square().mean(), [x, *chosen])
        return [gx.full_tensor() if isinstance(gx, ShardedTensor) else gx, *rest]

    check(small, use)


def test_autograd_grad_on_the_input_reduces_no_parameters():
    def body(mesh):
        model, x = parallelize(small(), mesh), input_of(mesh)
        torch.autograd.grad(model(x).sum(), x)
        assert "gradients" not in mesh.timers.snapshot()

    on_ranks((2, 1, 1), body)


def test_backward_to_chosen_inputs():
    def use(model, mesh):
        loss_of(model, mesh).backward(inputs=[model[0].weight, model[9].bias])
        return gradients(model)

    check(small, use, data=2)


def test_parameters_shared_by_two_layers():
    def make():
        first, second = (nn.Conv3d(2, 2, 3, padding=1) for _ in range(2))
        second.weight = first.weight
        return initialised(
            nn.Sequential(first, nn.Tanh(), second, nn.Flatten(), nn.Linear(2160, 3))
        )

    def use(model, mesh):
        loss_of(model, mesh).backward()
        return gradients(model)

    check(make, use, data=2)


def test_parameters_of_two_dtypes():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.wide = nn.Parameter(randn(2, 1, 1, 1))
            self.narrow = nn.Parameter(randn(2, 1, 1, 1, seed=1).float())

        def forward(self, x):
            y = (x * self.wide).mean((1, 2, 3, 4)) + (x.float() * self.narrow).mean().double()
            return y.unsqueeze(1) * torch.ones(3).double()

    def use(model, mesh):
        loss_of(model, mesh).backward()
        return [p.grad.double() for p in model.parameters()]

    check(Two, use, rtol=1e-5)


@pytest.mark.parametrize("limit", [1, 500, 1 << 30])
def test_buckets_of_any_size(limit, monkeypatch):
    monkeypatch.setattr(pydist.comm.reducer, "BUCKET_BYTES", limit)

    def use(model, mesh):
        for seed in (0, 1):
            model.zero_grad()
            loss_of(model, mesh, seed).backward()
        return gradients(model)

    check(small, use, data=2, spatial=(2, 2, 1))


def test_gradients_are_final_and_equal_when_backward_returns():
    def body(mesh):
        model = parallelize(small(norm=True), mesh)
        loss_of(model, mesh).backward()
        return [g.clone() for g in gradients(model)]

    first, *others = on_ranks((2, 2, 1), body, data=2)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_a_backward_that_raised_does_not_spoil_the_next():
    def body(mesh):
        model = parallelize(small(), mesh)
        loss_of(model, mesh).backward()
        expected = [g.clone() for g in gradients(model)]

        class Interrupted(Exception):
            pass

        def fail(grad):
            raise Interrupted

        handle = model[4].weight.register_hook(fail)
        model.zero_grad()
        # Both ranks are interrupted at the same place, as by an out-of-memory that is caught.
        with pytest.raises(Interrupted):
            loss_of(model, mesh).backward()
        handle.remove()
        model.zero_grad()
        loss_of(model, mesh).backward()
        for a, b in zip(gradients(model), expected, strict=True):
            assert torch.equal(a, b)

    on_ranks((2, 1, 1), body)


def test_parameters_may_outlive_the_model():
    def body(mesh):
        model = parallelize(small(), mesh)
        parameters = list(model.parameters())
        del model
        gc.collect()
        sum(p.square().sum() for p in parameters).backward()
        return parameters[0].grad is not None

    assert all(on_ranks((2, 1, 1), body))


def test_hooks_of_the_user_see_partial_or_final_gradients_only():
    """A post-accumulate hook runs before the end of backward; the optimizer sees the mean."""

    def body(mesh):
        model = parallelize(small(), mesh)
        calls = []
        model[0].weight.register_post_accumulate_grad_hook(lambda p: calls.append(p.grad.shape))
        loss_of(model, mesh).backward()
        return calls

    assert on_ranks((2, 1, 1), body) == [[torch.Size([4, 2, 3, 3, 3])]] * 2
