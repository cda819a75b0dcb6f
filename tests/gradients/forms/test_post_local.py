"""Post-local SGD: groups that train by themselves, against a loop over groups on one device."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from pydist import parallelize
from pydist.errors import UsageError
from pydist.gradients import PostLocal
from pydist.optim import average_parameters, gradient_state, load_gradient_state
from support.equivalence import error, on_ranks, randn
from support.networks.small import BATCH, loss_of, small
from support.training.forms import SHAPES, Parameters, random_gradients

STEPS = 9


def sgd(model):
    return torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)


def group_loss(model, group, groups, step):
    class Group:
        data_index, data_size = group, groups

    return loss_of(model, Group(), step)  # type: ignore[arg-type]


def oracle(groups, every, start):
    """One model per group: the mean gradient first, then each its own, and means of all."""
    models = [small() for _ in range(groups)]
    optimizers = [sgd(model) for model in models]
    for step in range(STEPS):
        for group, model in enumerate(models):
            model.zero_grad()
            group_loss(model, group, groups, step).backward()
        if step < start:
            for same in zip(*(m.parameters() for m in models), strict=True):
                mean = torch.stack([p.grad for p in same]).mean(0)
                for p in same:
                    p.grad = mean.clone()
        for optimizer in optimizers:
            optimizer.step()
        if step >= start and (step - start + 1) % every == 0:
            for same in zip(*(m.parameters() for m in models), strict=True):
                states = [o.state[p] for o, p in zip(optimizers, same, strict=True)]
                momentum = torch.stack([s["momentum_buffer"] for s in states]).mean(0)
                mean = torch.stack([p.detach() for p in same]).mean(0)
                for p, s in zip(same, states, strict=True):
                    p.data.copy_(mean)
                    s["momentum_buffer"].copy_(momentum)
    return models


@pytest.mark.parametrize(("groups", "spatial"), [(2, (1, 1, 1)), (2, (2, 1, 1)), (4, (1, 1, 1))])
@pytest.mark.parametrize(("every", "start"), [(1, 0), (2, 3), (4, 1), (3, 20)])
def test_the_loop_over_groups(groups, spatial, every, start):
    assert BATCH % groups == 0

    def body(mesh):
        model = parallelize(small(), mesh, gradients=PostLocal(every, start))
        optimizer = sgd(model)
        averages = 0
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, mesh, step).backward()
            optimizer.step()
            averages += average_parameters(model, optimizer)
        assert averages == max(0, STEPS - start) // every
        return mesh.data_index, [p.detach().clone() for p in model.parameters()]

    expected = oracle(groups, every, start)
    for group, found in on_ranks(spatial, body, groups):
        for mine, p in zip(found, expected[group].parameters(), strict=True):
            assert error(mine, p.detach()) < 1e-10


def test_nothing_is_sent_between_groups_meanwhile():
    def body(mesh):
        model = parallelize(Parameters(SHAPES), mesh, gradients=PostLocal(every=4, start=2))
        (form,) = model.__dict__["_pydist_entry"].forms
        sent = []
        for step in range(5):
            model.backward(random_gradients()(mesh.rank, step))
            sent.append(form.sent()["between"])
        return sent

    for sent in on_ranks((1, 1, 1), body, data=2):
        assert 0 < sent[0] < sent[1] == sent[2] == sent[4]


def test_an_average_that_was_forgotten():
    def body(mesh):
        model = parallelize(Parameters(SHAPES), mesh, gradients=PostLocal(every=2))
        for step in range(2):
            model.backward(random_gradients()(mesh.rank, step))
        with pytest.raises(UsageError, match=r"2 steps without an average .*average_parameters"):
            model.backward(random_gradients()(mesh.rank, 3))

    on_ranks((1, 1, 1), body, data=2)


def test_parameters_of_a_group_are_still_compared():
    """A rank of a group that differs from the others of its group is named."""

    def body(mesh):
        model = parallelize(nn.Conv3d(2, 2, 3, padding=1).double(), mesh, gradients=PostLocal(50))
        optimizer = torch.optim.SGD(model.parameters(), 0.01)

        def train():
            for step in range(40):
                model(randn(1, 2, 8, 4, 4, seed=step)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                if mesh.rank == 1 and step == 2:
                    with torch.no_grad():
                        model.bias += 1.0

        with pytest.raises(UsageError, match="differ"):
            train()

    on_ranks((2, 1, 1), body, data=2)


def test_a_run_goes_on_after_an_average():
    def body(mesh):
        model = parallelize(small(), mesh, gradients=PostLocal(every=3, start=1))
        optimizer = sgd(model)

        def train(model, optimizer, steps):
            for step in steps:
                optimizer.zero_grad()
                loss_of(model, mesh, step).backward()
                optimizer.step()
                average_parameters(model, optimizer)

        train(model, optimizer, range(6))
        assert average_parameters(model, optimizer, always=True)
        assert not average_parameters(model, optimizer, always=True)
        for p in model.parameters():
            rows = mesh.world.all_gather(p.detach().contiguous())
            assert (rows == rows[0]).all()
        state, found = gradient_state(model), copy.deepcopy(optimizer.state_dict())
        other = small()
        other.load_state_dict(model.state_dict())
        parallelize(other, mesh, gradients=PostLocal(every=3, start=1))
        second = sgd(other)
        second.load_state_dict(found)
        steps = {"form": "post_local", "steps": 6, "groups": 2, "parameters": {}}
        assert state == (steps if mesh.rank == 0 else {})
        assert load_gradient_state(other, steps) == ""
        for each, its in ((model, optimizer), (other, second)):
            train(each, its, range(6, 12))
        for a, b in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(a, b)

    on_ranks((2, 1, 1), body, data=2)


@pytest.mark.parametrize("state", [{"form": "post_local", "steps": 1, "parameters": {}}, {}])
def test_an_earlier_step_that_is_loaded_again_is_averaged_as_it_was(state):
    def body(mesh):
        model = parallelize(small(), mesh, gradients=PostLocal(every=4))
        optimizer, found = sgd(model), []
        for step in (0, 1, 2, 3, 1, 2, 3, 4):
            if len(found) in (1, 4):
                average_parameters(model, optimizer, always=True)
                load_gradient_state(model, {**state, "groups": 2} if state else {}, 1)
            optimizer.zero_grad()
            loss_of(model, mesh, step).backward()
            optimizer.step()
            found.append(average_parameters(model, optimizer))
        return found

    expected = [False] * 7 + [True]
    assert on_ranks((1, 1, 1), body, data=2) == [expected, expected]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"every": 0}, r"PostLocal\(every=0\): expected a count >= 1"),
        ({"start": -1}, r"PostLocal\(start=-1\): expected a count >= 0"),
    ],
)
def test_bad_settings(settings, message):
    with pytest.raises(UsageError, match=message):
        PostLocal(**settings)
