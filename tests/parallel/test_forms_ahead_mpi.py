"""Messages of forms that follow the first one of a bucket, and start while backward runs."""

from __future__ import annotations

import time
from unittest.mock import patch

import pytest
import torch

from pydist import Mesh, parallelize
from pydist.comm.transports.c10d import C10dTransport
from pydist.gradients import DGC, Hierarchical, Narrow, PowerSGD, Torus
from pydist.gradients.forms import topology
from pydist.gradients.forms.levels import Levels
from pydist.gradients.registration import reducer_of
from support.training.forms import Parameters, random_gradients

pytestmark = pytest.mark.ranks(4, mpi=("openmpi", "mpich", "gloo"))

SHAPES = ((7, 5), (300, 250), (250, 300), (90000,), (31, 9))
"""Backward starts three buckets of one parameter, then one of the others."""
GRIDS = [(2, (2, 1, 1)), (4, (1, 1, 1))]
FORMS = [Torus(), Torus(row=1), Hierarchical(), Narrow("bf16"), PowerSGD(2, 0), DGC(0.1)]


class Raised(Exception):
    pass


class Polls(torch.autograd.Function):
    """The identity, whose backward lets messages advance."""

    @staticmethod
    def forward(ctx, x, form, lane, seconds, fails):
        ctx.args = form, lane, seconds, fails
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        form, lane, seconds, fails = ctx.args
        end = time.monotonic() + seconds
        while form._started and time.monotonic() < end:
            lane.progress()
        form.seen.append(len(form._started))
        if fails:
            raise Raised
        return grad, None, None, None, None


def patience(mesh):
    """gloo does not tell which messages between two ranks have arrived."""
    return 0.1 if isinstance(mesh.world, C10dTransport) else 20.0


def train(mesh, settings, steps=2, seconds=None, failing=()):
    """Returns the gradients of steps whose first parameter arrives after a while.

    Args:
        mesh: the mesh.
        settings: of the form.
        steps: their number.
        seconds: returns the longest time for which a step polls before that.
        failing: steps that raise then, and have no gradients.
    """
    given = random_gradients(SHAPES, torch.float32)
    model = parallelize(Parameters(SHAPES, torch.float32), mesh, gradients=settings)
    (form,) = model.__dict__["_pydist_entry"].forms
    lane = next(each for each in reducer_of(mesh).members.lanes if each.form is form)
    form.seen, found = [], []
    for step in range(steps):
        pairs = list(zip(model.all, given(mesh.rank, step), strict=True))
        first = (pairs[0][0] * pairs[0][1]).sum()
        wait = patience(mesh) if seconds is None else seconds(step)
        late = Polls.apply(first, form, lane, wait, step in failing)
        loss = sum([(p * g).sum() for p, g in pairs[1:]], late)
        if step in failing:
            with pytest.raises(Raised):
                loss.backward()
            model.zero_grad()
        else:
            loss.backward()
            found.append(model.take())
    return found, form


def equal(a, b):
    return all(
        torch.equal(x, y)
        for mine, theirs in zip(a, b, strict=True)
        for x, y in zip(mine, theirs, strict=True)
    )


@pytest.mark.parametrize(("groups", "spatial"), GRIDS)
@pytest.mark.parametrize("settings", FORMS, ids=str)
def test_all_messages_start_while_backward_runs(world, settings, groups, spatial):
    """With the bits of messages that start after it."""
    mesh = Mesh(world, groups, spatial)
    with patch.object(topology, "own_host", lambda rank: "abbb"[rank]):
        with patch.object(Levels, "runs_ahead", False):
            late, form = train(mesh, settings)
            assert form.seen == [0, 0]
            assert not form._started
        found, form = train(mesh, settings)
    assert equal(found, late)
    if not isinstance(world, C10dTransport):
        assert form.seen == [0, 0]
    assert not form._started
    for each in found[-1]:
        rows = world.all_gather(each.contiguous())
        assert (rows == rows[0]).all()


@pytest.mark.parametrize(("groups", "spatial"), GRIDS)
@pytest.mark.parametrize("settings", FORMS, ids=str)
def test_ranks_may_advance_at_different_times(world, settings, groups, spatial):
    """Some poll, some sleep, some do neither: the order of the messages is the same."""
    mesh = Mesh(world, groups, spatial)

    def seconds(step):
        kind = (world.rank + step) % 3
        if kind == 1:
            time.sleep(0.05)
        return 0.1 if kind == 2 else 0.0

    with patch.object(topology, "own_host", lambda rank: "abbb"[rank]):
        with patch.object(Levels, "runs_ahead", False):
            late, _ = train(mesh, settings, steps=4)
        found, _ = train(mesh, settings, steps=4, seconds=seconds)
    assert equal(found, late)


@pytest.mark.parametrize("settings", [Torus(), Narrow("bf16"), PowerSGD(2, 0), DGC(0.1)], ids=str)
def test_a_backward_that_raises_after_some_ranks_have_advanced(world, settings):
    """The next one completes what some ranks have started, and loses nothing."""
    mesh = Mesh(world, 2, (2, 1, 1))
    clean, _ = train(mesh, settings, steps=1)

    def seconds(step):
        return 0.2 * (world.rank % 2)

    given = random_gradients(SHAPES, torch.float32)
    shifted = patch(f"{__name__}.random_gradients", lambda *_: lambda rank, step: given(rank, 0))
    with shifted:
        found, form = train(mesh, settings, steps=3, seconds=seconds, failing=(0, 1))
    assert equal(found, clean)
    assert not form._started
