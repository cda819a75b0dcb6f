"""Local gradient clipping of Deep Gradient Compression, against the formula of its paper."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from pydist import parallelize
from pydist.gradients import DGC
from support.equivalence import error, on_ranks, randn
from support.training.forms import (
    SHAPES,
    Parameters,
    dgc_of_the_paper,
    group_means,
    momentum_of,
    random_gradients,
    reduced,
    reduced_with_state,
)

GRIDS = [(2, (1, 1, 1)), (3, (1, 1, 1)), (2, (2, 1, 1))]
OPTIONS = [{}, {"masking": False}, {"nesterov": True}, {"momentum": 0.0}]


def clipped(given, groups, size, step, clip_norm):
    """The share of each group in the mean gradient, clipped as the paper says, in its notation.

    ∇_k is the sum over the group's samples, over those of all N groups. If |∇_k| is more than
    N^(-1/2) of the threshold, it is scaled to that. Returns [group][parameter].
    """
    found = []
    for each in group_means(given, groups, size, step):
        share = [g / groups for g in each]
        norm = math.sqrt(sum(float(g.square().sum()) for g in share))
        limit = clip_norm / math.sqrt(groups)
        found.append([g * min(1.0, limit / norm) for g in share])
    return found


def unequal_gradients(shapes=SHAPES):
    """Returns random gradients that are larger on later ranks and in later steps."""
    given = random_gradients(shapes)
    return lambda rank, step: [g * (1 + rank + step / 2) for g in given(rank, step)]


@pytest.mark.parametrize(("groups", "spatial"), GRIDS)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_local_clipping_by_the_formulas_of_the_paper(options, groups, spatial):
    """Of the whole gradient of a group, also if its ranks have parts; some groups are below."""
    given, steps, size = unequal_gradients(), 5, spatial[0]
    norm = math.sqrt(sum(math.prod(shape) for shape in SHAPES))
    clip_norm = 2.5 * norm / math.sqrt(groups)
    taken = [
        [
            theirs[-1].equal(g[-1] / groups)
            for theirs, g in zip(
                clipped(given, groups, size, step, clip_norm),
                group_means(given, groups, size, step),
                strict=True,
            )
        ]
        for step in range(steps)
    ]
    assert any(map(any, taken))
    assert not any(map(all, taken[2:]))

    form = DGC(density=0.1, sample=1.0, clip_norm=clip_norm, **options)
    found, state = reduced_with_state(form, given, groups, spatial, steps)
    shares = [clipped(given, groups, size, step, clip_norm) for step in range(steps)]
    for i, shape in enumerate(SHAPES):
        gradients = [[g[i] for g in each] for each in shares]
        if len(shape) == 1:
            expected = momentum_of([sum(each) for each in gradients], **options)
        else:  # which divides the sum of the groups by their number
            expected, u, v = dgc_of_the_paper(gradients, 0.1, **options)
            expected = [groups * each for each in expected]
            entry = state["parameters"][f"'all.{i}'"]
            assert error(entry["rest"] / groups, torch.stack(v)) < 1e-12
            if options.get("momentum", 0.9):
                assert error(entry["velocity"] / groups, torch.stack(u)) < 1e-12
        for step in range(steps):
            assert error(found[step][i], expected[step]) < 1e-12


LARGE = ((300, 200), (5,), (40, 41), (200, 300), (70000,), (3, 3))
"""Of several buckets: of fp64, three parameters are large enough to be sent alone."""


@pytest.mark.parametrize(("groups", "spatial"), [*GRIDS, (2, (3, 1, 1))])
def test_the_norm_is_that_of_all_buckets(groups, spatial):
    """A rank may own nothing of a bucket; at full density the result is the clipped sum."""
    given, size = unequal_gradients(LARGE), spatial[0]
    form = DGC(density=1.0, momentum=0.0, clip_norm=300.0)
    found = reduced(form, given, groups, spatial, steps=2, shapes=LARGE)
    for step, each in enumerate(found):
        expected = zip(*clipped(given, groups, size, step, 300.0), strict=True)
        for mine, theirs in zip(each, expected, strict=True):
            assert error(mine, sum(theirs)) < 1e-12


def test_the_norm_of_parameters_of_several_dtypes():
    """Its squares are summed in fp64: those of 1e30 are infinite in fp32."""
    dtypes = [torch.float32, torch.bfloat16, torch.double]

    def given(rank, factor):
        return [(randn(20, 30, seed=9 * rank + i) * factor).to(d) for i, d in enumerate(dtypes)]

    def body(mesh):
        model = nn.Module()
        model.all = nn.ParameterList(torch.zeros(20, 30, dtype=d) for d in dtypes)
        form = DGC(density=1.0, momentum=0.0, clip_norm=1.0)
        parallelize(model, mesh, gradients=form)
        found = []
        for factor in (1e-4, 1.0, 1e30):
            pairs = zip(model.all, given(mesh.rank, factor), strict=True)
            sum((p * g).sum().double() for p, g in pairs).backward()
            found.append([p.grad for p in model.all])
            model.zero_grad()
        return found

    for each in on_ranks((2, 1, 1), body, data=2):
        for mine, factor in zip(each, (1e-4, 1.0, 1e30), strict=True):
            shares = clipped(lambda rank, step, f=factor: given(rank, f), 2, 2, 0, 1.0)
            for grad, theirs in zip(mine, zip(*shares, strict=True), strict=True):
                # The mean within a group is rounded to bf16, and changes the norm a little.
                bound = 0.03 if grad.dtype == torch.bfloat16 else 1e-3
                assert error(grad.double(), sum(theirs)) < bound


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_threshold_that_is_not_reached_changes_no_bit(options):
    given = random_gradients(dtype=torch.float32)
    forms = DGC(0.1, **options), DGC(0.1, clip_norm=1e3, **options)
    plain, same = (reduced(form, given, 2, (2, 1, 1), steps=4) for form in forms)
    for a, b in zip(plain, same, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_clipping_follows_the_samples_of_the_groups():
    """Groups of three samples and one: a share is the sum of a group's over four samples."""
    x, w = randn(4, 6, seed=1), randn(6, 6, seed=2)

    def body(mesh):
        net = nn.Linear(6, 6, bias=False).double()
        with torch.no_grad():
            net.weight.copy_(w)
        model = parallelize(net, mesh, gradients=DGC(density=1.0, momentum=0.0, clip_norm=2.0))
        model(x[:3] if mesh.data_index == 0 else x[3:]).square().sum(1).mean().backward()
        return net.weight.grad

    expected = 0
    for rows in (x[:3], x[3:]):
        own = w.clone().requires_grad_()
        ((rows @ own.T).square().sum() / 4).backward()
        torch.nn.utils.clip_grad_norm_([own], 2.0 / math.sqrt(2))
        assert float(own.grad.norm()) == pytest.approx(math.sqrt(2), rel=1e-5)
        expected = expected + own.grad
    for found in on_ranks((1, 1, 1), body, data=2):
        assert error(found, expected) < 1e-5  # torch's adds 1e-6 to the norm


def test_where_noise_dominates_groups_clip_as_the_mean():
    """The reason for N^(-1/2): shares of equal variance add up to √N of their norm."""
    shapes, groups = ((100, 100),), 3
    given = random_gradients(shapes)
    mean = torch.stack([g[0] for g in group_means(given, groups, 1, 0)]).mean(0)
    threshold = 0.5 * float(mean.norm())
    form = DGC(density=1.0, momentum=0.0, clip_norm=threshold)
    ((found,),) = reduced(form, given, groups, shapes=shapes)
    assert float(found.norm()) == pytest.approx(threshold, rel=0.03)
    assert error(found, 0.5 * mean) < 0.03


def test_messages_of_clipping():
    """A norm in fp64 from each rank to the others of its group, once a pass."""
    given = random_gradients(LARGE, torch.float32)

    def body(mesh):
        sent = []
        for clip_norm in (None, 1.0):
            form = DGC(density=0.01, clip_norm=clip_norm)
            model = parallelize(Parameters(LARGE, torch.float32), mesh, gradients=form)
            model.backward(given(mesh.rank, 0))
            sent.append(model.__dict__["_pydist_entry"].forms[0].sent())
        plain, clips = sent
        return clips["within"] - plain["within"], clips["between"] - plain["between"]

    assert on_ranks((2, 1, 1), body, data=2) == [(8, 0)] * 4
