"""Order statistics over split dims, split against whole."""

from __future__ import annotations

import pytest
import torch

from pydist.errors import NotSupported, UsageError
from support.equivalence import check_function, layout_at, on_ranks, randn, shard
from support.equivalence.splits import SHAPE
from support.equivalence.splits import TWO_SPLITS as POINTS

LEVELS = torch.tensor([0.1, 0.7, 1.0], dtype=torch.float64)
CALLS = {
    "median": lambda x: x.median(2).values * torch.median(x, 1, keepdim=True)[0].sum(2),
    "median of all": lambda x: x.median() * x,
    "nanmedian": lambda x: x.nanmedian(3, True)[0] * x,
    "mode": lambda x: x.mode().values ** 2,
    "kthvalue": lambda x: x.kthvalue(3, 2)[0] * x.kthvalue(1)[1].sum(),
    "quantile": lambda x: x.quantile(0.3, 2) * torch.quantile(x, 0.6, interpolation="lower"),
    "quantiles": lambda x: torch.quantile(x, LEVELS, dim=3, keepdim=True) * x,
    "quantiles of all": lambda x: x.quantile(LEVELS[:1]) * x,
    "nanquantile": lambda x: torch.nanquantile(x.where(x > -1, torch.nan), LEVELS, dim=2) ** 2,
    "of one dim": lambda x: x[0, 0, :, 0, 0].median(0)[0] * x[0, 0, :, 0, 0].quantile(0.5) * x,
    "histc": lambda x: torch.histc(x.detach(), 4) * x.sum() + x.detach().histc(4, -1, 1),
}


@pytest.mark.parametrize("points", POINTS.values(), ids=POINTS)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_to_second_order(call, points):
    check_function(call, randn(*SHAPE), (), points, second_order=True)


ALONG = {
    "median": lambda x: x.median(2).values,
    "median, kept": lambda x: x.median(2, True).values,
    "indices": lambda x: x.nanmedian(2).indices,
    "nanmedian": lambda x: x.nanmedian(2).values,
    "mode": lambda x: x.mode(2).values,
    "kthvalue": lambda x: x.kthvalue(1, 2).values,
    "quantile": lambda x: x.quantile(0.5, 2),
    "quantiles": lambda x: torch.quantile(x, LEVELS, dim=2),
    "of one dim": lambda x: x[0, 0, :, 0, 0].median(0).values,
    "in a sum": lambda x: x.median(2).values.sum(),
}


@pytest.mark.parametrize("points", [[[0, 1, 1], None, None], [[0, 0, 1], [0, 1, 4], None]])
@pytest.mark.parametrize("call", ALONG.values(), ids=ALONG)
def test_along_a_split_dim_of_extent_one(call, points):
    check_function(call, randn(2, 3, 1, 4, 3), (), points)


def test_levels_that_differ_between_ranks_are_named():
    def body(mesh):
        x = shard(randn(*SHAPE), layout_at(mesh, SHAPE, POINTS["2x1x1"]))
        with pytest.raises(UsageError, match="differs between the ranks"):
            x.quantile(LEVELS / (1 + mesh.rank), 2)

    on_ranks((2, 1, 1), body)


def test_levels_with_a_gradient_are_refused():
    def body(mesh):
        x = shard(randn(*SHAPE), layout_at(mesh, SHAPE, POINTS["2x1x1"]))
        with pytest.raises(NotSupported, match="q is split or requires a gradient"):
            x.quantile(LEVELS.clone().requires_grad_(), 1)

    on_ranks((2, 1, 1), body)
