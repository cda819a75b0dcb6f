"""Tests of steps in stages whose inputs require a gradient."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pydist.errors import NotSupported
from pydist.stages import pipeline
from support.equivalence import randn
from support.networks.small import initialized
from support.staged import DEEP, ONE, TWO_GROUPS, Between, on_stages

X, TARGET = randn(8, 1, 6, 4, 4, seed=1), randn(8, 2, 6, 4, 4, seed=2)


class UsedTwice(Between):
    def forward(self, x):
        return self.last(torch.tanh(self.first(x))) * x


@pytest.mark.parametrize(
    ("meshes", "options", "bounds"),
    [
        ((ONE, ONE), {"schedule": "1f1b"}, [0, 4]),
        ((DEEP, DEEP), {"schedule": "gems", "micro_batches": 4}, [0, 4]),
        ((DEEP, ONE), {"schedule": "zero-bubble"}, [0, 4]),
        ((TWO_GROUPS, TWO_GROUPS), {"schedule": "gpipe", "recompute": True}, [0, 2, 4]),
        ((TWO_GROUPS, TWO_GROUPS), {"micro_batches": 1}, [0, 1, 4]),
        ((TWO_GROUPS, TWO_GROUPS), {"schedule": "1f1b"}, [0, 5, 8]),
    ],
    ids=str,
)
def test_gradients_of_inputs(meshes, options, bounds):
    """They are those of the group's loss, also with groups of unequal size."""
    net = initialized(UsedTwice())

    def rank(stages):
        own = copy.deepcopy(net)
        made = pipeline(own, stages, X[:1], cuts=["last"], **{"micro_batches": 2, **options})
        rows = slice(*bounds[stages.mesh.data_index :][:2])
        target = TARGET[rows]
        whole, x = copy.deepcopy(net), X[rows].clone().requires_grad_()
        mine = x.detach().clone().requires_grad_()
        for _ in range(2):
            F.mse_loss(whole(x), target).backward()
            made.step(mine, target, F.mse_loss)
        assert torch.allclose(mine.grad, x.grad, rtol=0, atol=1e-12)
        with pytest.raises(NotSupported, match="inputs that require a gradient and are sharded"):
            made.step(2 * mine, target, F.mse_loss)

    on_stages(list(meshes), rank)


def test_inputs_with_gaps_in_memory():
    net = initialized(Between())

    def rank(stages):
        own, whole = copy.deepcopy(net), copy.deepcopy(net)
        made = pipeline(own, stages, X[:1], cuts=["last"], micro_batches=2)
        x = torch.stack([X, X], -1)[..., 0]
        loss = made.step(x, TARGET, F.mse_loss)
        assert torch.allclose(loss, F.mse_loss(whole(x), TARGET), rtol=0, atol=1e-12)

    on_stages([ONE, ONE], rank)


def test_an_input_that_two_stages_of_a_split_mesh_use():
    net = initialized(UsedTwice())

    def rank(stages):
        own, whole = copy.deepcopy(net), copy.deepcopy(net)
        x = X.clone().requires_grad_()
        mine = X.clone().requires_grad_()
        made = pipeline(own, stages, X[:1], cuts=["last", "UsedTwice"], micro_batches=2)
        made.step(mine, TARGET, F.mse_loss)
        F.mse_loss(whole(x), TARGET).backward()
        assert torch.allclose(mine.grad, x.grad, rtol=0, atol=1e-12)

    on_stages([DEEP, ONE], rank, order=[0, 1, 0])


def test_gradients_of_targets_in_uneven_groups():
    net = initialized(Between())

    def rank(stages):
        rows = slice(*[0, 5, 8][stages.mesh.data_index :][:2])
        target = TARGET[rows].clone().requires_grad_()
        mine = TARGET[rows].clone().requires_grad_()
        made = pipeline(copy.deepcopy(net), stages, X[:1], cuts=["last"], micro_batches=2)
        made.step(X[rows], mine, F.mse_loss)
        F.mse_loss(copy.deepcopy(net)(X[rows]), target).backward()
        assert torch.allclose(mine.grad, target.grad, rtol=0, atol=1e-12)

    on_stages([TWO_GROUPS, TWO_GROUPS], rank)


class Conditioned(Between):
    def forward(self, x, z, w):
        y = self.last(torch.tanh(self.first(x)) * z.view(1, 2, 1, 1, 1))
        return F.conv3d(y, w)


def test_gradients_of_inputs_without_samples_in_uneven_groups():
    """They are those of the group's loss, too."""
    net, z, w = initialized(Conditioned()), randn(2, seed=3), randn(2, 2, 1, 1, 1, seed=4)

    def rank(stages):
        rows = slice(*[0, 5, 8][stages.mesh.data_index :][:2])
        own, mine = copy.deepcopy(net), [t.clone().requires_grad_() for t in (z, w)]
        made = pipeline(own, stages, (X[:1], z, w), cuts=["last"], micro_batches=2)
        made.step((X[rows], *mine), TARGET[rows], F.mse_loss)
        alone = [t.clone().requires_grad_() for t in (z, w)]
        F.mse_loss(copy.deepcopy(net)(X[rows], *alone), TARGET[rows]).backward()
        for a, b in zip(mine, alone, strict=True):
            assert torch.allclose(a.grad, b.grad, rtol=0, atol=1e-12)

    on_stages([TWO_GROUPS, TWO_GROUPS], rank)


class Prompted(nn.Module):
    def __init__(self, conv):
        super().__init__()
        self.project, self.last = nn.Linear(4, 2), conv(2, 2, 3, padding=1)
        self.first = conv(1, 2, 3, padding=1)

    def forward(self, prompt, x):
        x = x["x"] if isinstance(x, dict) else x
        scale = self.project(prompt).flatten(0, -2).mean(0)
        y = torch.tanh(self.first(x)) * scale.view(1, 2, *[1] * (x.dim() - 2))
        return self.last(y)


@pytest.mark.parametrize(
    ("shape", "nested"),
    [((4, 4), False), ((4, 4), True), ((1, 4), False), ((1, 1, 3, 4, 4), False)],
    ids=str,
)
@pytest.mark.parametrize(
    ("conv", "meshes"),
    [
        (nn.Conv3d, (ONE, ONE)),
        (nn.Conv3d, (TWO_GROUPS, TWO_GROUPS)),
        (nn.Conv2d, (ONE, {"spatial": (1, 2, 1)})),
    ],
)
def test_samples_are_counted_by_a_batch_of_the_network(shape, conv, meshes, nested):
    """Not by a prompt or an atlas before it."""
    net, prompt = initialized(Prompted(conv)), randn(*shape, seed=5)
    x, target = (t if conv is nn.Conv3d else t[..., 0] for t in (X[:6], TARGET[:6]))
    whole = copy.deepcopy(net)
    loss = F.mse_loss(whole(prompt, x), target)
    loss.backward()
    grads = {name: p.grad for name, p in whole.named_parameters()}

    def given(x):
        return prompt, {"x": x} if nested else x

    def rank(stages):
        own, data = copy.deepcopy(net), stages.mesh.data_size
        rows = slice(*[0, 6 // data, 6][stages.mesh.data_index :][:2])
        made = pipeline(own, stages, given(x[:1]), cuts=["last"], micro_batches=3)
        found = made.step(given(x[rows]), target[rows], F.mse_loss)
        for name, p in own.named_parameters():
            if p.grad is not None:
                torch.testing.assert_close(p.grad, grads[name], rtol=1e-12, atol=1e-13)
        return stages.mesh.data_index, found

    losses = dict(on_stages(list(meshes), rank)).values()
    torch.testing.assert_close(torch.stack(list(losses)).mean(), loss.detach())


def test_a_sample_that_requires_a_gradient():
    """It is recorded as another one, also with a second input."""

    class Twice(Between):
        def forward(self, x, t):
            return self.last(torch.tanh(self.first(x)) * torch.sigmoid(t))

    net, x, t = initialized(Twice()), X[:1].clone().requires_grad_(), X[1:2].clone()

    def rank(stages):
        starts = []
        for trains in (True, False):
            sample = x.detach().requires_grad_(trains), t.detach().requires_grad_(trains)
            made = pipeline(copy.deepcopy(net), stages, sample, cuts=["last"])
            starts.append(made.plan.starts)
        assert starts[0] == starts[1]
        made.step((X, X), TARGET, F.mse_loss)

    on_stages([ONE, ONE], rank)


def test_an_input_that_is_given_twice():
    net, x = initialized(Between()), X.repeat(1, 2, 1, 1, 1).requires_grad_()
    net.first = initialized(nn.Conv3d(2, 2, 3, padding=1))
    F.mse_loss(net(x), x).backward()

    def rank(stages):
        own, mine = copy.deepcopy(net), x.detach().clone().requires_grad_()
        made = pipeline(own, stages, mine[:1].detach(), cuts=["last"], micro_batches=2)
        made.step(mine, mine, F.mse_loss)
        assert torch.allclose(mine.grad, x.grad, rtol=0, atol=1e-12)

    on_stages([ONE, ONE], rank)


@pytest.mark.parametrize("meshes", [[ONE], [DEEP, ONE], [TWO_GROUPS] * 2], ids=str)
def test_masks_do_not_depend_on_gradients_of_inputs(meshes):
    layers = nn.Conv3d(1, 4, 1), nn.Dropout(0.5), nn.Conv3d(4, 2, 1)
    net = initialized(nn.Sequential(*layers))

    def rank(stages):
        cuts = ["2"][: len(meshes) - 1]
        x, target = (t.chunk(stages.mesh.data_size)[stages.mesh.data_index] for t in (X, TARGET))
        found = []
        for trains, count in itertools.product((False, True), (1, 2)):
            stages.mesh.session.forwards = 0  # the same step, by the key of random numbers
            made = pipeline(copy.deepcopy(net), stages, X[:1], cuts=cuts, micro_batches=count)
            loss = made.step(x.clone().requires_grad_(trains), target, F.mse_loss)
            found.append(float(loss))
        assert found == pytest.approx(found[:1] * 4, rel=1e-12)

    on_stages(meshes, rank)


def test_a_parameter_that_is_an_input():
    """It is counted once, also with an earlier gradient."""

    class Added(Between):
        def __init__(self):
            super().__init__()
            self.template = nn.Parameter(torch.ones(1, 1, 6, 4, 4))

        def forward(self, x, template):
            return self.last(torch.tanh(self.first(x + template))) + template

    net = initialized(Added())

    def rank(stages):
        own, whole = copy.deepcopy(net), copy.deepcopy(net)
        made = pipeline(own, stages, (X[:1], own.template), cuts=["last"], micro_batches=2)
        for _ in range(2):
            made.step((X, own.template), TARGET, F.mse_loss)
            F.mse_loss(whole(X, whole.template), TARGET).backward()
        assert torch.allclose(own.template.grad, whole.template.grad, rtol=0, atol=1e-12)

    on_stages([ONE, ONE], rank)
