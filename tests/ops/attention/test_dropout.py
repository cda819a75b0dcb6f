"""Dropout of attention is keyed by the position of the score: equal for every split and form."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from pydist import parallelize
from pydist.ops.attention import ring
from support.attention import forced
from support.equivalence import error, layout_at, on_ranks, randn, shard, spatial_of

SHAPE = (2, 2, 4, 7)
SPLITS = {"1": [[0, 7]], "2": [[0, 3, 7]], "3, one empty": [[0, 2, 2, 7]]}


def results(call, form, points, data=1):
    """Returns output, first and second gradient of a call on one rank."""

    def body(mesh):
        rows = slice(mesh.data_index, mesh.data_index + 1) if data == 2 else slice(None)
        x = shard(randn(*SHAPE)[rows], layout_at(mesh, randn(*SHAPE)[rows].shape, points))
        y = call(x)
        (grad,) = torch.autograd.grad((y * y).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad((grad * grad).sum(), x)
        return [t.full_tensor().detach() for t in (y, grad, second)]

    with forced(form):
        found = on_ranks(spatial_of(points), body, data)
    if data == 2:
        ranks = len(found) // 2
        return [torch.cat(pair) for pair in zip(found[0], found[ranks], strict=True)]
    return found[0]


CALLS = {
    "tokens": lambda x: F.scaled_dot_product_attention(x.mT, x.mT, x.mT * 2, dropout_p=0.3),
    "causal": lambda x: F.scaled_dot_product_attention(
        x.mT, x.mT, x.mT * 2, dropout_p=0.3, is_causal=True
    ),
    "groups of heads": lambda x: F.scaled_dot_product_attention(
        torch.cat([x, x], 1).mT, x.mT, x.mT, randn(1, 7, 7) > 0, 0.3, enable_gqa=True
    ),
    "all": lambda x: F.scaled_dot_product_attention(x.mT, x.mT, x.mT, dropout_p=1.0) + x.mT,
    "plain queries": lambda x: F.scaled_dot_product_attention(
        randn(1, 2, 5, 4), x.mT, x.mT, dropout_p=0.3
    ),
}


@pytest.mark.parametrize("queries", [2, 1024])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_mask_does_not_depend_on_the_split(call, queries, monkeypatch):
    monkeypatch.setattr(ring, "MOST_QUERIES", queries)
    alone = results(call, "gather", SPLITS["1"])
    for points in SPLITS.values():
        for form in ("ring", "gather"):
            for mine, its in zip(results(call, form, points), alone, strict=True):
                assert error(mine, its) < 1e-12


def test_a_mask_does_not_depend_on_the_number_of_groups():
    alone = results(CALLS["tokens"], "gather", SPLITS["1"])
    for form in ("ring", "gather"):
        for mine, its in zip(results(CALLS["tokens"], form, SPLITS["2"], 2), alone, strict=True):
            assert error(mine, its) < 1e-12


@pytest.mark.parametrize("form", ["ring", "gather"])
def test_factors_are_not_rounded_to_half_precision(form):
    """1 / 0.9 would be 0.16 % too small in bf16, and so would be the mean of all results."""

    def mean(dtype):
        shape = (1, 4, 128, 8)

        def body(mesh):
            x = shard(randn(*shape).to(dtype), layout_at(mesh, shape, [[0, 50, 128], None]))
            y = F.scaled_dot_product_attention(x, x * 0.1, x + 1, dropout_p=0.1)
            return y.full_tensor().detach().double().mean().item()

        with forced(form):
            return on_ranks((2, 1, 1), body)[0]

    assert mean(torch.bfloat16) == pytest.approx(mean(torch.float64), rel=4e-4)


def test_dropped_probabilities():
    """With values that are the unit vectors, the result is the matrix of probabilities."""

    def body(mesh):
        points = [0, 20, 50]
        x = shard(randn(1, 8, 4, 50), layout_at(mesh, (1, 8, 4, 50), [points])).mT
        unit = torch.eye(50).double()[None, None]
        v = shard(unit, layout_at(mesh, unit.shape, [points, None]))
        weights = F.scaled_dot_product_attention(x, x, v.expand(1, 8, 50, 50), dropout_p=0.25)
        whole = F.scaled_dot_product_attention(x, x, v.expand(1, 8, 50, 50))
        return weights.full_tensor().detach(), whole.full_tensor().detach()

    with forced("ring"):
        weights, whole = on_ranks((2, 1, 1), body)[0]
    dropped = weights == 0
    assert 0.24 < dropped.double().mean() < 0.26
    assert torch.allclose(weights[~dropped], whole[~dropped] / 0.75, rtol=1e-12, atol=0)


class Attention(nn.Module):
    """Attention of one head with dropout."""

    def forward(self, x):
        return F.scaled_dot_product_attention(x.mT, x.mT, x.mT, dropout_p=0.5)


class Checkpointed(nn.Module):
    """The same layer, computed again in backward."""

    def __init__(self, is_checkpointed):
        super().__init__()
        self.layer, self.is_checkpointed = Attention(), is_checkpointed

    def forward(self, x):
        if self.is_checkpointed:
            return checkpoint(self.layer, x, use_reentrant=False)
        return self.layer(x)


@pytest.mark.parametrize("form", ["ring", "gather"])
def test_checkpointing_draws_the_same_mask(form):
    def gradient(is_checkpointed):
        def body(mesh):
            model = parallelize(Checkpointed(is_checkpointed), mesh).train()
            x = shard(randn(*SHAPE), layout_at(mesh, SHAPE, SPLITS["2"]))
            model(x).square().sum().backward()
            return x.grad.full_tensor()

        return on_ranks((2, 1, 1), body)[0]

    with forced(form):
        assert error(gradient(True), gradient(False)) < 1e-12
