"""Gradient reducer: the mean over all ranks, for any use of parameters on any of them."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pydist.gradients.buckets
from pydist import parallelize
from pydist.errors import NotSupported
from pydist.gradients.reducer import Reducer
from support.equivalence import assert_same, error, on_ranks, randn
from support.networks.small import (
    BATCH,
    SHAPE,
    check_use,
    gradients_of,
    initialized,
    loss_of,
    small,
)

GRIDS = [(1, (2, 1, 1)), (2, (2, 1, 1)), (2, (1, 2, 2)), (1, (8, 1, 1))]


@pytest.mark.parametrize(("data", "spatial"), GRIDS)
def test_two_backwards_accumulate(data, spatial):
    def use(model, mesh):
        for seed in (0, 1):
            loss_of(model, mesh, seed).backward()
        return gradients_of(model)

    check_use(small, use, data, spatial)


@pytest.mark.parametrize(("data", "spatial"), GRIDS)
def test_no_sync_then_a_backward_that_reduces(data, spatial):
    def use(model, mesh):
        if mesh is None:
            loss_of(model, mesh, 0).backward()
        else:
            with model.no_sync():
                loss_of(model, mesh, 0).backward()
        loss_of(model, mesh, 1).backward()
        return gradients_of(model)

    check_use(small, use, data, spatial)


def test_no_sync_sends_nothing_and_restores():
    def body(mesh):
        model = parallelize(small(), mesh)
        with model.no_sync():
            loss_of(model, mesh).backward()
            assert "gradients" not in mesh.session.timers.snapshot()
        partial = model[0].weight.grad.clone()
        loss_of(model, mesh).backward()
        assert "gradients" in mesh.session.timers.snapshot()
        return partial

    first, second = on_ranks((2, 1, 1), body)
    assert not torch.equal(first, second)


def test_retained_graph_twice():
    def use(model, mesh):
        loss = loss_of(model, mesh)
        loss.backward(retain_graph=True)
        loss.backward()
        return gradients_of(model)

    check_use(small, use, data=2)


def test_zeroed_in_place_and_set_to_none():
    def use(model, mesh):
        for set_to_none in (True, False):
            loss_of(model, mesh, 1).backward()
            model.zero_grad(set_to_none=set_to_none)
        loss_of(model, mesh).backward()
        return gradients_of(model)

    check_use(small, use, data=2)


def test_unmodified_clip_grad_norm():
    def use(model, mesh):
        loss_of(model, mesh).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        return [norm, *gradients_of(model)]

    check_use(small, use, data=2)


def test_frozen_parameters_have_no_gradient():
    def make():
        model = small()
        model[0].weight.requires_grad_(False)
        model[9].bias.requires_grad_(False)
        return model

    def use(model, mesh):
        loss_of(model, mesh).backward()
        return gradients_of(model)

    check_use(make, use, data=2)


def test_parameters_unfrozen_later_are_reduced():
    def use(model, mesh):
        model[0].requires_grad_(False)
        loss_of(model, mesh).backward()
        model[0].requires_grad_(True)
        model.zero_grad()
        loss_of(model, mesh).backward()
        return gradients_of(model)

    check_use(small, use, data=2)


class Branches(nn.Module):
    """Network with parameters that some forwards leave out."""

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
        return gradients_of(model)

    check_use(Branches, use, data=2)


def test_a_parameter_used_by_one_group_alone():
    """The other groups contribute zero: the mean over the groups is that of the full batch."""
    model = Branches()
    halves = [slice(0, 2), slice(2, 4)]
    (sum(_group_loss(model, halves[i], use=i == 0) for i in (0, 1)) / 2).backward()
    expected = gradients_of(model)

    def body(mesh):
        model = parallelize(Branches(), mesh)
        _group_loss(model, halves[mesh.data_index], use=mesh.data_index == 0).backward()
        return gradients_of(model)

    for found in on_ranks((2, 1, 1), body, data=2):
        assert found[1] is None
        for a, b in zip(found, expected, strict=True):
            if b is not None:
                assert_same(a, b)


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_hooks_where_one_group_alone_uses_a_parameter_after_a_pass_with_a_graph(early):
    """On the group that does not use the parameter, hooks see the mean as well."""

    def body(mesh):
        model = parallelize(Branches(), mesh)
        rows, found = [slice(0, 2), slice(2, 4)][mesh.data_index], []
        for hooked in (False, True):
            if hooked and early:
                model.sometimes.register_hook(lambda g: 2 * g)
            _group_loss(model, rows, use=True).backward(create_graph=True)
            model.zero_grad()
            if hooked and not early:
                model.sometimes.register_hook(lambda g: 2 * g)
            _group_loss(model, rows, use=mesh.data_index == 0).backward()
            found.append(model.sometimes.grad)
            model.zero_grad()
        return found

    for plain, doubled in on_ranks((2, 1, 1), body, data=2):
        assert_same(doubled, 2 * plain)


def test_a_parameter_that_one_group_alone_begins_to_use():
    """The other group uses the same parameters as before, and still gets the gradient."""

    def body(mesh):
        model = parallelize(Branches(), mesh)
        rows, found = [slice(0, 2), slice(2, 4)][mesh.data_index], []
        for begins in (False, True, False):
            model.zero_grad()
            _group_loss(model, rows, use=begins and mesh.data_index == 0).backward()
            found.append(model.sometimes.grad)
        return found

    ranks = on_ranks((2, 1, 1), body, data=2)
    for before, meanwhile, after in ranks:
        assert (before, after) == (None, None)
        assert torch.equal(meanwhile, ranks[0][1])
        assert meanwhile.abs().sum() > 0


def _group_loss(model, rows, use):
    return F.mse_loss(model(randn(*SHAPE)[rows], use=use), randn(BATCH, 3, seed=100)[rows])


def check_used_by_one_group(make):
    """Compares gradients on all ranks of a network that is told whether to use a part."""

    def body(mesh):
        model = parallelize(initialized(make()), mesh)
        model(randn(*SHAPE, seed=mesh.data_index), mesh.data_index == 0).backward()
        return gradients_of(model)

    first, *others = on_ranks((2, 1, 1), body, data=2)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_a_parameter_used_by_one_group_alone_beside_global_batch_norm(monkeypatch):
    """Its bucket starts at the end there, in the middle elsewhere: statistics must not mix in."""
    monkeypatch.setattr(pydist.gradients.buckets, "BUCKET_BYTES", 1)

    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv3d(2, 2, 1)
            self.norm = nn.BatchNorm3d(2)
            self.sometimes = nn.Parameter(torch.ones(2, 1, 1, 1))

        def forward(self, x, use):
            y = self.norm(self.conv(x))
            return (y * self.sometimes if use else y).tanh().square().sum()

    check_used_by_one_group(Normed)


def test_a_last_layer_used_by_one_group_alone_beside_global_batch_norm():
    """Its bucket starts before the norm's exchange there, and after the exchange elsewhere."""

    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv3d(2, 2, 1)
            self.norm = nn.BatchNorm3d(2)
            self.last = nn.Linear(2 * 12 * 10 * 9, 20)  # large enough for a message of its own

        def forward(self, x, use):
            y = self.norm(self.conv(x)).tanh().flatten(1)
            return (self.last(y) if use else y).square().sum()

    check_used_by_one_group(Normed)


def test_an_input_of_a_shape_that_leaves_ranks_empty_at_depth():
    """With two voxels on eight ranks, most reach the parameters through empty blocks only."""

    def use(model, mesh):
        model(randn(1, 2, 2, 3, 3)).square().sum().backward()
        return gradients_of(model)

    def make():
        return initialized(
            nn.Sequential(
                nn.Conv3d(2, 3, 3, padding=1), nn.LeakyReLU(), nn.Conv3d(3, 2, 3, padding=1)
            )
        )

    check_use(make, use, spatial=(8, 1, 1))


def test_backward_to_chosen_inputs():
    def use(model, mesh):
        loss_of(model, mesh).backward(inputs=[model[0].weight, model[9].bias])
        return gradients_of(model)

    check_use(small, use, data=2)


def test_parameters_shared_by_two_layers():
    def make():
        first, second = (nn.Conv3d(2, 2, 3, padding=1) for _ in range(2))
        second.weight = first.weight
        return initialized(
            nn.Sequential(first, nn.Tanh(), second, nn.Flatten(), nn.Linear(2160, 3))
        )

    def use(model, mesh):
        loss_of(model, mesh).backward()
        return gradients_of(model)

    check_use(make, use, data=2)


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

    check_use(Two, use, rtol=1e-5)


@pytest.mark.parametrize("alone", [1, 2000, 1 << 30])
@pytest.mark.parametrize("limit", [1, 500, 1 << 30])
def test_buckets_of_any_size(limit, alone, monkeypatch):
    monkeypatch.setattr(pydist.gradients.buckets, "BUCKET_BYTES", limit)
    monkeypatch.setattr(pydist.gradients.buckets, "ALONE_BYTES", alone)

    def use(model, mesh):
        for seed in (0, 1):
            model.zero_grad()
            loss_of(model, mesh, seed).backward()
        return gradients_of(model)

    check_use(small, use, data=2, spatial=(2, 2, 1))


def test_gradients_are_final_and_equal_when_backward_returns():
    def body(mesh):
        model = parallelize(small(norm=True), mesh)
        loss_of(model, mesh).backward()
        return [g.clone() for g in gradients_of(model)]

    first, *others = on_ranks((2, 2, 1), body, data=2)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_a_backward_that_raised_does_not_spoil_the_next():
    def body(mesh):
        model = parallelize(small(), mesh)
        loss_of(model, mesh).backward()
        expected = [g.clone() for g in gradients_of(model)]

        class Interrupted(Exception):
            pass

        def fail(grad):
            raise Interrupted

        handle = model[4].weight.register_hook(fail)
        model.zero_grad()
        # Both ranks stop at the same place, as after a caught out-of-memory error.
        with pytest.raises(Interrupted):
            loss_of(model, mesh).backward()
        handle.remove()
        model.zero_grad()
        loss_of(model, mesh).backward()
        for a, b in zip(gradients_of(model), expected, strict=True):
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


def test_messages_advance_after_each_gradient():
    """Transports that progress only inside calls are called during backward."""

    def body(mesh):
        model = parallelize(small(), mesh)
        transport = mesh.session.find(Reducer).members.lanes[0].transport
        calls = []
        transport.progress = lambda: calls.append(model[0].weight.grad is None)
        loss_of(model, mesh).backward()
        return calls

    # Of eight parameters, that of the first layer is the last to get its gradient.
    calls = on_ranks((2, 1, 1), body)[0]
    assert len(calls) == 8
    assert any(calls)


def test_a_large_gradient_travels_out_of_its_own_memory():
    def body(mesh):
        model = parallelize(nn.Linear(300, 300, bias=False), mesh)
        places = []
        # Registered after the reducer's hooks: the all-reduce is in flight.
        model.weight.register_post_accumulate_grad_hook(lambda p: places.append(p.grad.data_ptr()))
        model(torch.full((2, 300), 1.0 + mesh.rank)).sum().backward()
        assert places == [model.weight.grad.data_ptr()]
        assert (model.weight.grad == 3.0).all()

    on_ranks((1, 1, 1), body, data=2)


def test_gradients_that_share_memory_are_copied():
    """Both gradients are views of one tensor: an in-place sum would add it twice."""

    def body(mesh):
        a, b = (nn.Parameter(torch.zeros(300, 300)) for _ in range(2))
        model = nn.ParameterList([a, b])
        parallelize(model, mesh)
        (a.view(-1) + b.view(-1)).mul(1.0 + mesh.rank).sum().backward()
        assert a.grad.untyped_storage().data_ptr() == b.grad.untyped_storage().data_ptr()
        return float(a.grad.max()), float(b.grad.min())

    assert on_ranks((2, 1, 1), body) == [(1.5, 1.5)] * 2


def _with_other_memory(model, x):
    """Runs a backward in which the bias's gradient has two parts: torch has two nodes for it."""
    y = model(x)
    with torch.no_grad():
        model.bias.set_((model.bias * 0.8).detach())
    (y.square().mean() + 0.01 * sum(p.square().sum() for p in model.parameters())).backward()


def test_a_parameter_that_gets_other_memory_between_two_uses():
    whole = nn.Conv3d(1, 2, 3, padding=1).double()
    expected = copy.deepcopy(whole)
    _with_other_memory(expected, randn(1, 1, 4, 3, 2))

    def body(mesh):
        model = parallelize(copy.deepcopy(whole), mesh)
        _with_other_memory(model, randn(1, 1, 4, 3, 2))
        for p, q in zip(model.parameters(), expected.parameters(), strict=True):
            assert error(p.grad, q.grad) <= 1e-12

    on_ranks((2, 1, 1), body)


def test_the_second_part_of_a_gradient_that_has_left_is_refused():
    class Adds(nn.Module):
        def __init__(self):
            super().__init__()
            self.bias = nn.Parameter(torch.ones(1, dtype=torch.float64))

        def forward(self, x):
            return x + self.bias

    def body(mesh):
        with pytest.raises(NotSupported, match="'bias' got other memory between two uses"):
            _with_other_memory(parallelize(Adds(), mesh), randn(1, 1, 4, 3, 2))

    on_ranks((2, 1, 1), body)
