"""Reductions of split tensors, over any dims, are those of the whole."""

from __future__ import annotations

import math

import pytest
import torch
from equivalence import Cut, check_function, layout_at, on_ranks, randint, randn, shard

from pydist.errors import NotSupported

SHAPE = (2, 3, 4, 5, 3)
POINTS = {
    "2x1x1": [[0, 2, 4], None, None],
    "uneven 2x2x2": [[0, 1, 4], [0, 2, 5], [0, 2, 3]],
    "with empty": [[0, 0, 4, 4], None, [0, 3, 3]],
    "8x1x1": [[0, 1, 1, 2, 3, 3, 4, 4, 4], None, None],
}
DIMS = {
    "all": None,
    "whole dims": (0, 1),
    "one split dim": 2,
    "spatial": (2, 3, 4),
    "negative": (-1, 0),
}

BY_DIMS = {
    "sum": lambda x, dim, keep: x.sum(dim, keep),
    "torch.sum": lambda x, dim, keep: torch.sum(x, dim=dim, keepdim=keep),
    "mean": lambda x, dim, keep: x.mean(dim, keepdim=keep),
    "amax": lambda x, dim, keep: x.amax(() if dim is None else dim, keep),
    "amin": lambda x, dim, keep: torch.amin(x, dim=() if dim is None else dim, keepdim=keep),
    "var": lambda x, dim, keep: x.var(dim, keepdim=keep),
    "biased var": lambda x, dim, keep: torch.var(x, dim, correction=0, keepdim=keep),
    "std": lambda x, dim, keep: x.std(dim, keepdim=keep),
    "2-norm": lambda x, dim, keep: x.norm(2, dim, keep),
    "1-norm": lambda x, dim, keep: torch.norm(x, 1, dim, keep),
    "linalg norm": lambda x, dim, keep: torch.linalg.vector_norm(x, dim=dim, keepdim=keep),
    "maximum norm": lambda x, dim, keep: torch.linalg.vector_norm(x, math.inf, dim, keep),
}


@pytest.mark.parametrize("points", POINTS.values(), ids=POINTS)
@pytest.mark.parametrize("reduce", BY_DIMS.values(), ids=BY_DIMS)
def test_over_dims(reduce, points):
    for dim in DIMS.values():
        for keep in (False, True):
            check_function(lambda x, d=dim, k=keep: reduce(x, d, k), randn(*SHAPE), (), points)


@pytest.mark.parametrize("reduce", BY_DIMS.values(), ids=BY_DIMS)
def test_second_order(reduce):
    check_function(
        lambda x: reduce(x * x, (2, 3, 4), False) ** 2,
        randn(*SHAPE),
        (),
        POINTS["uneven 2x2x2"],
        second_order=True,
    )


CALLS = {
    "sum()": lambda x: x.sum(),
    "sum with axis": lambda x: torch.sum(x, axis=2),
    "sum to another dtype": lambda x: x.float().sum(2, dtype=torch.float64),
    "mean(dim, keepdim) positional": lambda x: torch.mean(x, (2, 3), True),
    "max()": lambda x: x.max(),
    "min()": torch.min,
    "max of two": lambda x: torch.max(x, x.square()),
    "max over a whole dim": lambda x: x.max(1).values,
    "min over a whole dim": lambda x: x.min(dim=1, keepdim=True)[0],
    "argmax over a whole dim": lambda x: x.argmax(1),
    "argmin over a whole dim": lambda x: x.argmin(dim=1, keepdim=True),
    "logsumexp over a whole dim": lambda x: x.logsumexp(1),
    "prod over a whole dim": lambda x: x.prod(1),
    "median over a whole dim": lambda x: x.median(1).values,
    "any": lambda x: (x > 2.5).any(),
    "any over dims": lambda x: (x > 1).any((2, 3)),
    "all": lambda x: (x > -9).all(),
    "all over a dim": lambda x: torch.all(x > -1, 2),
    "frobenius norm": torch.norm,
    "std of all": torch.std,
    "var(unbiased)": lambda x: x.var(False),
    "a scalar in further computing": lambda x: (x - x.mean()) / x.std() * x.amax(),
}


@pytest.mark.parametrize("points", POINTS.values(), ids=POINTS)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_ways_to_call(call, points):
    check_function(call, randn(*SHAPE), (), points)


@pytest.mark.parametrize("reduce", [torch.amax, torch.amin], ids=["amax", "amin"])
def test_equal_extremes_share_the_gradient(reduce):
    x = randint(3, *SHAPE).double()
    check_function(lambda x: reduce(x, (2, 4)), x, (), POINTS["uneven 2x2x2"])


def test_norm_of_zeros_has_gradient_zero():
    x = torch.zeros(SHAPE).double()
    check_function(
        lambda x: torch.linalg.vector_norm(x, dim=(2, 3, 4)), x, (), POINTS["uneven 2x2x2"]
    )


@pytest.mark.parametrize("reduce", [torch.amax, torch.amin], ids=["amax", "amin"])
def test_nan_is_the_extreme(reduce):
    x = randn(*SHAPE)
    x[0, 1, 3, 2, 2] = torch.nan
    check_function(lambda x: reduce(x.detach(), (2, 3, 4)), x, (), POINTS["uneven 2x2x2"])


def test_partial_reductions_in_a_product_of_several_layouts():
    """Statistics by slice and by column meet the tensor and each other again."""
    check_function(
        lambda x, y: (
            x * y.mean((3, 4), keepdim=True) + x.amax(2, keepdim=True) * y.sum((0, 3)).mean()
        ),
        randn(*SHAPE),
        (),
        POINTS["uneven 2x2x2"],
        beside=[Cut(randn(*SHAPE, seed=1), [[0, 3, 4], [0, 1, 5], [0, 0, 3]])],
        second_order=True,
    )


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.int32], ids=str)
def test_integers_and_masks_are_summed_as_torch_does(dtype):
    whole = randint(2, *SHAPE).to(dtype)

    def body(mesh):
        total = shard(whole, layout_at(mesh, SHAPE, POINTS["uneven 2x2x2"])).sum()
        assert total.dtype == whole.sum().dtype
        assert total == whole.sum()

    on_ranks((2, 2, 2), body)


REFUSED = {
    "argmax over a split dim": (lambda x: x.argmax(2), "dim 2 is split"),
    "max over a split dim": (lambda x: x.max(2), "dim 2 is split"),
    "argmax of all": (lambda x: x.argmax(), "give the dim"),
    "median of all": (lambda x: x.median(), "give the dim"),
    "3-norm": (lambda x: x.norm(3), "order 3"),
}


@pytest.mark.parametrize(("call", "message"), REFUSED.values(), ids=REFUSED)
def test_refusals(call, message):
    def body(mesh):
        x = shard(randn(*SHAPE), layout_at(mesh, SHAPE, POINTS["2x1x1"]))
        with pytest.raises(NotSupported, match=message):
            call(x)

    on_ranks((2, 1, 1), body)
