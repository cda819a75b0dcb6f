"""Calls along one dim."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from pydist.errors import NotSupported
from support.equivalence import check_function, layout_at, on_ranks, randn, shard
from support.equivalence.splits import SHAPE
from support.equivalence.splits import THREE_SPLITS as POINTS

CALLS = {
    "F.softmax": lambda x: F.softmax(x, 1),
    "by keyword": lambda x: F.softmax(x, dim=1),
    "method": lambda x: x.softmax(dim=1),
    "torch.softmax": lambda x: torch.softmax(x, -4),
    "log_softmax": lambda x: F.log_softmax(x, dim=1),
    "of a dtype": lambda x: torch.log_softmax(x.float().double(), 1, dtype=torch.float64),
    "softmax over split dims": lambda x: F.softmax(x, 2) * x.softmax(-1),
    "log_softmax over split dims": lambda x: F.log_softmax(x * 100, 2) * x.log_softmax(axis=3),
    "softmin": lambda x: F.softmin(x, 2),
    "cumsum": lambda x: x.cumsum(1) * torch.cumsum(x, dim=0),
    "cumprod": lambda x: x.cumprod(dim=1),
    "cummax": lambda x: torch.cummax(x, 1).values,
    "logcumsumexp": lambda x: x.logcumsumexp(1),
    "sort": lambda x: torch.sort(x, 1, descending=True)[0] * x.sort(dim=0).values,
    "argsort": lambda x: x.argsort(1) * x,
    "topk": lambda x: x.topk(2, 1).values * torch.topk(x, 1, dim=0, largest=False)[0].sum(),
    "cumsum over split dims": lambda x: x.cumsum(2) * x.cumsum(-1),
    "cumprod over split dims": lambda x: x.cumprod(2) * x.cumprod(3),
    "cummax over split dims": lambda x: x.cummax(2).values * x.cummax(3).indices,
    "sort over split dims": lambda x: x.sort(2, descending=True)[0] * torch.sort(x, dim=3)[0],
    "sort of one dim": lambda x: x.transpose(0, 2).reshape(5, -1)[:, 0].sort().values,
    "argsort over split dims": lambda x: x.argsort(2) * x.argsort(dim=3, stable=True) * x,
    "msort": lambda x: x.transpose(0, 2).msort(),
    "topk over split dims": lambda x: x.topk(3, 2)[0].sum((2, 3, 4)) * x.topk(1, 3)[0].sum(2),
    "cumsum of nothing": lambda x: x[:, :0].cumsum(1).sum() + x,
    "diff": lambda x: x.diff(dim=1) * torch.diff(x, 2, 1).sum(),
    "diff over split dims": lambda x: x.diff(dim=2).square().sum() * torch.diff(x, 2, axis=3),
    "diff with ends": lambda x: torch.diff(x, dim=2, prepend=x[:, :, -2:], append=x[:, :, :1] * 2),
    "diff of nothing left": lambda x: x + x.diff(99, dim=2).sum() + x.diff(0),
    "gradient": lambda x: torch.stack(torch.gradient(x, spacing=0.5, dim=(1, 2, -1))),
    "gradient of second order": lambda x: torch.gradient(x, dim=2, edge_order=2)[0],
    "gradient at coordinates": lambda x: sum(
        torch.gradient(
            x,
            spacing=(torch.arange(5.0).double() ** 2, x[0, 0, 0, :, 0].detach().cumsum(0)),
            dim=(2, 3),
        )
    ),
    "diff of flags": lambda x: (x > 0).diff(dim=2) * x.diff(dim=2),
}


@pytest.mark.parametrize("points", POINTS.values(), ids=POINTS)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_to_second_order(call, points):
    check_function(call, randn(*SHAPE), (), points, second_order=True)


def test_softmax_of_half_precision_over_a_split_dim():
    x = randn(2, 40).bfloat16()
    whole = x.softmax(1)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = x.softmax(1)

    def body(mesh):
        y = shard(x, layout_at(mesh, (2, 40), [[0, 7, 40]])).softmax(1)
        assert y.dtype == whole.dtype
        assert (y.full_tensor() - whole).abs().max() <= whole.max() * 2**-8
        with torch.autocast("cpu", torch.bfloat16):
            assert y.softmax(1).dtype == mixed.dtype

    on_ranks((2, 1, 1), body)


REFUSED = {
    "without dim": (F.softmax, "give the dim"),
    "k in a tensor": (lambda x: x.topk(torch.tensor(1), 1), "must be numbers"),
}


@pytest.mark.parametrize(("call", "message"), REFUSED.values(), ids=REFUSED)
def test_refusals(call, message):
    def body(mesh):
        x = shard(randn(*SHAPE), layout_at(mesh, SHAPE, POINTS["2x1x1"]))
        with pytest.raises(NotSupported, match=message):
            call(x)

    on_ranks((2, 1, 1), body)
