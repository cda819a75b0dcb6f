"""Tests of steps in stages with criteria that have parameters, and with earlier gradients."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import pydist
from pydist.errors import NotSupported, RankFailed, UsageError
from pydist.optim import sharded
from pydist.stages import pipeline
from support.equivalence import randn
from support.networks.small import initialized
from support.staged import DEEP, ONE, TWO_GROUPS, Between, on_stages

X, TARGET = randn(4, 1, 6, 4, 4, seed=1), randn(4, 2, 6, 4, 4, seed=2)
STEPS = 3


class Weighted(nn.Module):
    """Loss with a trained weight (Kendall et al. 2018), outside of the network."""

    def __init__(self):
        super().__init__()
        self.s = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, y, t):
        return torch.exp(-self.s) * F.mse_loss(y, t) + self.s


def trained_with_criterion(step_of, net, criterion):
    """Returns losses, and the parameters of a network and its criterion after steps of Adam."""
    optimizer = torch.optim.Adam([*net.parameters(), *criterion.parameters()], lr=0.05)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        losses.append(step_of().detach())
        optimizer.step()
    return losses, optimizer


@pytest.mark.parametrize(
    ("meshes", "options"),
    [
        ((ONE, ONE), {"schedule": "gems"}),
        ((DEEP, DEEP), {"schedule": "gems", "micro_batches": 4}),
        ((ONE, ONE), {"schedule": "1f1b"}),
        ((DEEP, ONE), {"schedule": "zero-bubble"}),
        ((TWO_GROUPS, TWO_GROUPS), {"schedule": "gpipe", "recompute": True}),
    ],
    ids=str,
)
def test_parameters_that_the_criterion_alone_has(meshes, options):
    net, data = initialized(Between()), meshes[0].get("data", 1)
    whole, of_whole = copy.deepcopy(net), Weighted()

    def on_one_device():
        loss = of_whole(whole(X), TARGET)
        loss.backward()
        return loss

    expected, alone = trained_with_criterion(on_one_device, whole, of_whole)
    values = [p.detach() for p in (*whole.parameters(), *of_whole.parameters())]

    def rank(stages):
        own, criterion = copy.deepcopy(net), Weighted()
        made = pipeline(own, stages, X[:1], cuts=["last"], **{"micro_batches": 2, **options})
        rows = slice(stages.mesh.data_index * 4 // data, (stages.mesh.data_index + 1) * 4 // data)
        found, optimizer = trained_with_criterion(
            lambda: made.step(X[rows], TARGET[rows], criterion), own, criterion
        )
        if data == 1:  # else each group's loss is its own
            assert torch.allclose(torch.stack(found), torch.stack(expected), atol=1e-12)
        made.gather()
        for mine, value in zip((*own.parameters(), *criterion.parameters()), values, strict=True):
            assert torch.allclose(mine, value, rtol=0, atol=1e-10)
        state = made.optimizer_state(optimizer)["state"]
        for i, entries in alone.state_dict()["state"].items():
            assert torch.allclose(state[i]["exp_avg"], entries["exp_avg"], rtol=0, atol=1e-12)
        kept = copy.deepcopy(state)
        made.step(X[rows], TARGET[rows], criterion)
        optimizer.step()
        for i, entries in kept.items():  # the state is not that of the optimizer, which goes on
            assert torch.equal(state[i]["exp_avg"], entries["exp_avg"])

    on_stages(list(meshes), rank)


@pytest.mark.parametrize("schedule", ["1f1b", "gems"])
def test_criteria_of_their_own_in_each_step(schedule):
    """A rank may keep some, or free them later; a step that fails on one rank is repeated."""
    net, kept = initialized(Between()), []

    def expected(value):
        criterion = Weighted()
        criterion.s.data.fill_(value)
        criterion(net(X), TARGET).backward()
        return criterion.s.grad.item()

    def rank(stages):
        own = copy.deepcopy(net)
        made = pipeline(own, stages, X[:1], cuts=["last"], micro_batches=2, schedule=schedule)
        fails = [stages.index == 0]

        def hook(*_):
            if fails and fails.pop():
                raise ValueError("once")

        own.first.register_forward_hook(hook)
        found = []
        for step in range(4):
            criterion = Weighted()
            criterion.s.data.fill_(0.1 * step)
            criterion.itself = lambda c=criterion: c  # freed by a garbage collection
            try:
                made.step(X, TARGET, criterion)
            except (ValueError, RankFailed):
                assert step == 0
                continue
            made.gather()
            trains = schedule == "gems" or stages.index == 1
            assert (criterion.s.grad is not None) == trains
            found.append((criterion.s.item(), criterion.s.grad if trains else None))
            if stages.index == 1:
                kept.append(criterion)
        return found

    values = [0.1, 0.2, 0.3]
    gradients = [expected(value) for value in values]
    for found in on_stages([ONE, ONE], rank):
        assert [value for value, _ in found] == pytest.approx(values)
        for (_, gradient), right in zip(found, gradients, strict=True):
            assert gradient is None or gradient.item() == pytest.approx(right, rel=1e-12)


def check_trained(rounds, meshes, *, partitioned=False, **options):
    """Compares weights after steps in stages, which `rounds` makes, with those of one device.

    Args:
        rounds: called with the network, its criterion, the optimizer, and a function that runs
            forward and backward.
        meshes: of the stages.
        partitioned: whether each mesh partitions the optimizer.
        options: of `pipeline`.
    """
    net = initialized(Between())

    def run(model, step, wrap=lambda optimizer, _: optimizer):
        criterion = Logged()
        optimizer = torch.optim.SGD([*model.parameters(), *criterion.parameters()], 0.05)
        rounds(model, criterion, wrap(optimizer, model), lambda: step(criterion))
        return [*model.parameters(), *criterion.parameters()]

    whole = copy.deepcopy(net)
    expected = run(whole, lambda criterion: criterion(whole(X), TARGET).backward())

    def rank(stages):
        own = copy.deepcopy(net)
        made = pipeline(own, stages, X[:1], cuts=["last"], **{"micro_batches": 2, **options})

        def wrap(optimizer, model):
            return sharded(optimizer, model, "always") if partitioned else optimizer

        found = run(own, lambda criterion: made.step(X, TARGET, criterion), wrap)
        made.gather()
        for mine, value in zip(found, expected, strict=True):
            assert torch.allclose(mine, value, rtol=0, atol=1e-11)

    on_stages(list(meshes), rank)


LAYOUTS = [
    ((ONE, ONE), {"schedule": "1f1b"}),
    ((ONE, DEEP), {"schedule": "1f1b"}),
    ((ONE, DEEP), {"schedule": "zero-bubble"}),
    ((ONE, ONE), {"schedule": "gems"}),
    ((DEEP, ONE), {"schedule": "zero-bubble"}),
    ((DEEP, ONE), {"schedule": "1f1b", "partitioned": True}),
    ((DEEP, DEEP), {"schedule": "gems", "partitioned": True}),
]


@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize(("meshes", "options"), LAYOUTS, ids=str)
def test_gradients_that_are_there_before_a_step(meshes, options, first):
    """Those of a penalty, which all ranks compute for all weights, from a step on."""

    def rounds(model, criterion, optimizer, step):
        for i in range(4):
            optimizer.zero_grad()
            if i >= first:
                penalty = sum(p.square().sum() for p in model.parameters())
                (0.1 * penalty + 0.1 * (criterion.s - 1) ** 2).backward()
            step()
            optimizer.step()

    check_trained(rounds, meshes, **options)


def test_gradients_of_a_penalty_make_no_mesh_an_owner():
    """The last stage is on the first mesh, and only the first steps have the penalty."""
    net = initialized(Between())

    def train(model, criterion, step, clip):
        optimizer = torch.optim.SGD([*model.parameters(), *criterion.parameters()], 0.05)
        norms = []
        for i in range(4):
            optimizer.zero_grad()
            if i < 2:
                (0.1 * sum(p.square().sum() for p in model.parameters())).backward()
            step(criterion)
            norms.append(float(clip(1e9)))
            optimizer.step()
        return norms

    whole = copy.deepcopy(net)
    expected = train(
        whole,
        Weighted(),
        lambda criterion: criterion(whole(X), TARGET).backward(),
        lambda most: nn.utils.clip_grad_norm_(whole.parameters(), most),
    )

    def rank(stages):
        own = copy.deepcopy(net)
        made = pipeline(own, stages, X[:1], cuts=["last"], micro_batches=2)
        found = train(own, Weighted(), lambda c: made.step(X, TARGET, c), made.clip_grad_norm_)
        assert found == pytest.approx(expected, rel=1e-6)
        made.gather()
        for mine, value in zip(own.parameters(), whole.parameters(), strict=True):
            assert torch.allclose(mine, value, rtol=0, atol=1e-11)

    on_stages([DEEP, ONE], rank, order=[1, 0])


@pytest.mark.parametrize("penalized", [False, True])
def test_a_first_step_of_one_micro_batch_with_gems(penalized):
    """The criterion is on one mesh at first, and on two then."""

    def run(model, step):
        criterion, found = Weighted(), []
        optimizer = torch.optim.SGD([*model.parameters(), *criterion.parameters()], 0.2)
        for i, count in enumerate((1, 2, 2)):
            optimizer.zero_grad()
            if penalized and i:
                (0.3 * (criterion.s - 1) ** 2).backward()
            step(criterion, count)
            optimizer.step()
            found.append(criterion.s.item())
        return found

    net = initialized(Between())
    whole = copy.deepcopy(net)
    expected = run(whole, lambda criterion, _: criterion(whole(X), TARGET).backward())

    def rank(stages):
        made = pipeline(
            copy.deepcopy(net), stages, X[:1], cuts=["last"], micro_batches=2, schedule="gems"
        )
        return run(made.model, lambda c, count: made.step(X, TARGET, c, micro_batches=count))

    for found in on_stages([ONE, ONE], rank):
        assert found == pytest.approx(expected, rel=1e-12)


def test_a_norm_in_a_criterion_is_refused_with_gems():
    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm3d(2).double()

        def forward(self, y, t):
            return F.mse_loss(self.norm(y), t)

    def rank(stages):
        made = pipeline(
            initialized(Between()), stages, X[:1], cuts=["last"], micro_batches=2, schedule="gems"
        )
        with pytest.raises(NotSupported, match=r"gems.*which two meshes would update"):
            made.step(X, TARGET, Normed())

    on_stages([ONE, ONE], rank)


class Logged(Weighted):
    def forward(self, y, t):
        self.logged = self.s.item()  # for people: ranks see their own value
        return super().forward(y, t)


@pytest.mark.parametrize(("meshes", "options"), LAYOUTS, ids=str)
def test_a_parameter_of_a_criterion_that_is_frozen_and_read(meshes, options):
    def rounds(model, criterion, optimizer, step):
        for i in range(4):
            optimizer.zero_grad()
            criterion.s.requires_grad_(i in (0, 3))
            step()
            optimizer.step()

    check_trained(rounds, meshes, **options)


@pytest.mark.parametrize("meshes", [(ONE, ONE), (DEEP, ONE)], ids=str)
def test_ranks_that_are_given_other_criteria_or_inputs_are_told(meshes):
    def step(stages, x, criterion):
        pipeline(initialized(Between()), stages, X[:1], cuts=["last"]).step(x, TARGET, criterion)

    def other_criterion(stages):
        criterion = Weighted()
        is_first = stages.world.rank == 0
        step(stages, X, functools.partial(criterion) if is_first else criterion)

    def other_inputs(stages):  # on the mesh of one rank, as a mesh of two compares its own
        step(stages, X.clone().requires_grad_(stages.index == 1), F.mse_loss)

    for body, what in ((other_criterion, r"s \[\]|no parameters"), (other_inputs, "[01] inputs")):
        with pytest.raises(UsageError, match=rf"pipe.step has .*({what}).*give all ranks the same"):
            on_stages(list(meshes), body)


@pytest.mark.parametrize("made_of", [lambda s: s, lambda s: torch.exp(-s)])
def test_trained_tensors_that_are_no_parameters_are_refused_with_gems(made_of):
    def rank(stages):
        scale = torch.ones((), dtype=torch.float64, requires_grad=True)
        made = pipeline(
            initialized(Between()), stages, X[:1], cuts=["last"], micro_batches=2, schedule="gems"
        )
        with pytest.raises(NotSupported, match="criterion that is a module: schedule='gems'"):
            made.step(X, TARGET, lambda y, t: F.mse_loss(y, t) * made_of(scale))

    on_stages([ONE, ONE], rank)


def test_a_mean_over_the_labels_of_all_groups():
    """As docs/stages.md shows."""
    weight = torch.tensor([0.2, 1.0], dtype=torch.float64)
    labels = (randn(4, 6, 4, 4, seed=3) > 0.3).long()
    net = initialized(Between())
    whole = copy.deepcopy(net)
    F.cross_entropy(whole(X), labels, weight=weight).backward()

    def rank(stages):
        own, group = copy.deepcopy(net), stages.mesh.data_index
        made = pipeline(own, stages, X[:1], cuts=["last"], micro_batches=2)
        x, target = X[2 * group : 2 * group + 2], labels[2 * group : 2 * group + 2]
        total = pydist.sum_over_groups(weight[target].sum(), stages.mesh)
        of_a_sample = total / (len(target) * stages.mesh.data_size)

        def criterion(y, t):
            entropy = F.cross_entropy(y, t, weight=weight, reduction="sum")
            return entropy / (len(t) * of_a_sample)

        made.step(x, target, criterion)
        pairs = zip(own.parameters(), whole.parameters(), strict=True)
        trained = [(mine.grad, p.grad) for mine, p in pairs if mine.grad is not None]
        assert len(trained) == 2  # weight and bias of the stage
        for mine, grad in trained:
            assert torch.allclose(mine, grad, rtol=0, atol=1e-12)
        with pytest.raises(NotSupported, match=r"sum_over_groups in the criterion"):
            made.step(x, target, lambda y, t: pydist.sum_over_groups(y.sum(), stages.mesh))

    on_stages([TWO_GROUPS, TWO_GROUPS], rank)
