"""Split reductions over any dims equal the one-device run."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from pydist import distribute_tensor
from pydist.errors import NotSupported
from support.equivalence import Cut, check_function, layout_at, on_ranks, randint, randn, shard
from support.equivalence.strategies import cuts

SHAPE = (2, 3, 4, 5, 3)
POINTS = {
    "2x1x1": [[0, 2, 4], None, None],
    "uneven 2x2x2": [[0, 1, 4], [0, 2, 5], [0, 2, 3]],
    "with empty": [[0, 0, 4, 4], None, [0, 3, 3]],
    "8x1x1": [[0, 1, 1, 2, 3, 3, 4, 4, 4], None, None],
}
HARD = {name: POINTS[name] for name in ("uneven 2x2x2", "with empty")}
"""Splits for single calls; `docs/operators.md` compares the simple ones."""

DIMS = {
    "all": None,
    "whole dims": (0, 1),
    "one split dim": 2,
    "spatial": (2, 3, 4),
    "negative": (-1, 0),
}


def _with_nan(x):
    return x.masked_fill(x > 1, torch.nan)


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
    "3-norm": lambda x, dim, keep: torch.linalg.vector_norm(x, 3, dim, keep),
    "1.5-norm": lambda x, dim, keep: x.norm(1.5, dim, keep),
    "least": lambda x, dim, keep: torch.linalg.vector_norm(x, -math.inf, dim, keep),
    "logsumexp": lambda x, dim, keep: torch.logsumexp(
        x, tuple(range(5)) if dim is None else dim, keep
    ),
    "var_mean": lambda x, dim, keep: torch.mul(*torch.var_mean(x, dim, keepdim=keep)),
    "std_mean": lambda x, dim, keep: torch.add(*torch.std_mean(x, dim, keepdim=keep)),
    "nansum": lambda x, dim, keep: torch.nansum(_with_nan(x), dim, keep),
    "nanmean": lambda x, dim, keep: _with_nan(x).nanmean(dim, keep),
    "maximum norm": lambda x, dim, keep: torch.linalg.vector_norm(x, math.inf, dim, keep),
}


@pytest.mark.parametrize("reduce", BY_DIMS.values(), ids=BY_DIMS)
def test_over_dims(reduce):
    """All dims, splits and values of keepdim in turn; a test below draws them together."""
    splits = list(POINTS.values())
    for i, dim in enumerate(DIMS.values()):
        for keep in (False, True):
            points = splits[(i + keep) % len(splits)]
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
    "any over no dim": lambda x: torch.any(x.trunc(), dim=()),
    "all over no dim": lambda x: (x > 1).all(dim=(), keepdim=True),
    "sum over no dim": lambda x: x.sum(dim=()),
    "sum of flags": lambda x: torch.sum(x.detach() / 9, 2, dtype=torch.bool),
    "nansum of flags": lambda x: _with_nan(x.detach()).nansum(dtype=torch.bool),
    "prod of flags": lambda x: torch.prod(x > -2, 2, dtype=torch.bool),
    "prod in another dtype": lambda x: torch.ones_like(x).prod(2, dtype=torch.int32),
    "frobenius norm": torch.norm,
    "std of all": torch.std,
    "var(unbiased)": lambda x: x.var(False),
    "count_nonzero": lambda x: torch.count_nonzero(x > 1, 2),
    "count_nonzero of all": lambda x: torch.count_nonzero(x.trunc()),
    "zero norm": lambda x: torch.linalg.vector_norm(x.trunc(), 0, (2, 3)),
    "linalg.norm of all": torch.linalg.norm,
    "linalg.norm along a dim": lambda x: torch.linalg.norm(x, 1, dim=2),
    "keepdims": lambda x: torch.sum(x, axis=2, keepdims=True),
    "max along a split dim": lambda x: x.max(2).values,
    "min along a split dim": lambda x: torch.min(x, dim=-1, keepdim=True).values,
    "indices along a split dim": lambda x: torch.max(x, 2).indices,
    "indices of minima": lambda x: x.min(3, True)[1],
    "argmax along a split dim": lambda x: x.argmax(2),
    "argmin along a split dim": lambda x: torch.argmin(x, dim=3, keepdim=True),
    "argmax of all": torch.argmax,
    "argmin of all": lambda x: x.argmin(),
    "argmax of all, keepdim": lambda x: torch.argmax(x, keepdim=True),
    "aminmax": lambda x: torch.sub(*torch.aminmax(x)),
    "aminmax along a dim": lambda x: torch.sub(*x.aminmax(dim=2, keepdim=True)),
    "prod": lambda x: (1 + x / 50).prod(),
    "prod along a split dim": lambda x: torch.prod(1 + x / 5, 2, keepdim=True),
    "cosine along a split dim": lambda x: F.cosine_similarity(x, x * x + 1, 2),
    "cosine with a vector along a split dim": lambda x: F.cosine_similarity(
        x, x.mean((0, 1, 3, 4)).view(4, 1, 1), 2
    ),
    "cosine with numbers along a split dim": lambda x: F.cosine_similarity(
        x, randn(3, 1, 1, 1, seed=1), 2
    ),
    "cosine along the channels": lambda x: F.cosine_similarity(x, x.detach() + 1),
    "normalize": lambda x: F.normalize(x, dim=2),
    "normalize over several dims": lambda x: F.normalize(x, 1.0, (1, 2, 3)),
    "pairwise distance": lambda x: F.pairwise_distance(x, x * x),
    "dist": lambda x: torch.dist(x, x * x, 3),
    "a scalar in further computing": lambda x: (x - x.mean()) / x.std() * x.amax(),
}


@pytest.mark.parametrize("points", HARD.values(), ids=HARD)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_ways_to_call(call, points):
    check_function(call, randn(*SHAPE), (), points)


def _complex(x):
    return torch.complex(x, 1 + x.flip(2))


def _real(y):
    return torch.view_as_real(y).sum(-1)


OF_COMPLEX_NUMBERS = {
    "mean": lambda x: _real(_complex(x).mean((2, 3)) ** 2),
    "mean of all": lambda x: _real(_complex(x).mean() ** 2),
    "var": lambda x: _complex(x).var((2, 3)),
    "std": lambda x: torch.std(_complex(x), 2, correction=0) ** 3,
    "var_mean": lambda x: torch.mul(*torch.var_mean(_complex(x))).real,
    "norm": lambda x: _complex(x).norm() ** 3,
    "norm over dims": lambda x: torch.linalg.vector_norm(_complex(x), dim=(2, 4)) ** 3,
    "3-norm": lambda x: torch.linalg.vector_norm(_complex(x), 3, dim=2),
    "zero norm": lambda x: torch.linalg.vector_norm(_complex(x.trunc()), 0, 2).detach(),
    "normalize": lambda x: _real(F.normalize(_complex(x), dim=2)),
    "dist": lambda x: torch.dist(_complex(x), _complex(x * x)),
    "logsumexp": lambda x: _real(_complex(x).logsumexp((2, 3))),
}


@pytest.mark.parametrize("points", HARD.values(), ids=HARD)
@pytest.mark.parametrize("call", OF_COMPLEX_NUMBERS.values(), ids=OF_COMPLEX_NUMBERS)
def test_of_complex_numbers(call, points):
    check_function(call, randn(*SHAPE), (), points, second_order=True)


OF_A_SCALAR = {
    **{
        name: lambda x, f=f: f(x, 0, True)
        for name, f in BY_DIMS.items()
        if "var" not in name and "std" not in name
    },
    "sum": lambda x: x.sum(0),
    "the last dim": lambda x: x.mean(-1),
    "var": lambda x: x.var(0, correction=0),
    "std": lambda x: x.std(0, correction=0, keepdim=True),
    "prod": lambda x: x.prod(0),
    "max": lambda x: x.max(0).values,
    "indices": lambda x: x.min(-1, keepdim=True).indices,
    "argmax": lambda x: x.argmax(0),
    "median": lambda x: x.median(0).values,
    "any": lambda x: (x > 0).any(0),
    "softmax": lambda x: x.softmax(0),
    "cumsum": lambda x: x.cumsum(0),
    "sort": lambda x: x.sort(-1).values,
    "normalize": lambda x: F.normalize(x, dim=0) * x,
    "squeeze": lambda x: x.squeeze(0),
    "transpose": lambda x: x.transpose(0, -1),
}


@pytest.mark.parametrize("call", OF_A_SCALAR.values(), ids=OF_A_SCALAR)
def test_dim_of_a_sharded_scalar(call):
    def function(x):
        scalar = x.sum(tuple(range(5)), keepdim=True).squeeze()
        assert type(scalar) is type(x)
        return call(scalar)

    for points in ([], POINTS["2x1x1"]):
        check_function(function, randn(*SHAPE), (), points)


TIES = {
    "amax": lambda x: torch.amax(x, (2, 4)),
    "amin": lambda x: torch.amin(x, (2, 4)),
    "max": torch.max,
    "min": torch.min,
    "max along a dim": lambda x: x.max(2).values,
    "min along a dim": lambda x: x.min(3, keepdim=True).values,
    "aminmax": lambda x: torch.sub(*torch.aminmax(x, dim=2)),
    "maximum norm": lambda x: torch.linalg.vector_norm(x - 1, math.inf, (2, 3)),
    "product with zeros": lambda x: x.prod(2),
    "argmax": lambda x: x.argmax(2),
    "argmin": lambda x: x.argmin(4, keepdim=True),
    "argmax of all": torch.argmax,
    "argmin of all": torch.argmin,
    "indices of maxima": lambda x: x.max(3).indices,
}


@pytest.mark.parametrize("points", POINTS.values(), ids=POINTS)
@pytest.mark.parametrize("reduce", TIES.values(), ids=TIES)
def test_equal_elements_are_treated_as_torch_does(reduce, points):
    check_function(reduce, randint(3, *SHAPE).double(), (), points)


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("op", ["amax", "amin", "max", "min"])
def test_an_extreme_has_the_bits_of_an_element(op, seed):
    """This holds even if several ranks hold the extreme, and if it is infinite or NaN."""
    whole = (randint(4, *SHAPE, seed=seed) * 0.1).double()
    whole[0, 0, 1:3], whole[0, 1, 3], whole[1, 1, 2] = torch.inf, -torch.inf, torch.nan

    def body(mesh):
        x = shard(whole, layout_at(mesh, SHAPE, POINTS["uneven 2x2x2"]))
        found, expected = getattr(x, op)(2), getattr(whole, op)(2)
        for a, b in zip(*((t,) if op[0] == "a" else t for t in (found, expected)), strict=True):
            torch.testing.assert_close(a.full_tensor().detach(), b, rtol=0, atol=0, equal_nan=True)

    on_ranks((2, 2, 2), body)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.uint8, torch.float32], ids=str)
def test_extremes_of_any_dtype(dtype):
    whole = randint(2, *SHAPE).to(dtype)
    check_function(lambda x: x.amax((2, 3)), whole, (), POINTS["with empty"])
    check_function(torch.min, whole, (), POINTS["with empty"])
    if dtype != torch.bool:  # torch has none
        check_function(lambda x: x.argmax(2), whole, (), POINTS["with empty"])
    check_function(lambda x: x.any(2), whole, (), POINTS["with empty"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_rounded_once(dtype):
    """Partial sums of the ranks are added in fp32: a mean of large values is finite."""
    whole = (randn(2, 3, 40, 4, 3).abs() * 2000).to(dtype)

    def body(mesh):
        x = shard(whole, layout_at(mesh, whole.shape, [[0, 9, 9, 40], None, None]))
        for reduce in (torch.mean, torch.std, lambda t: torch.var(t / 2000), lambda t: t.norm(3)):
            found, expected = reduce(x), reduce(whole.double())
            assert found.dtype == dtype
            close = torch.finfo(dtype).eps
            torch.testing.assert_close(found.double(), expected, rtol=close, atol=0)

    on_ranks((3, 1, 1), body)


@pytest.mark.parametrize("reduce", [torch.std, torch.var], ids=["std", "var"])
def test_infinite_gradient_of_a_deviation(reduce):
    """After an overflow, as a gradient scaler sees it, gradients are infinities without NaN."""
    whole = randn(*SHAPE)

    def gradient(x):
        (reduce(x.requires_grad_()) * torch.inf).backward()
        return x.grad

    def body(mesh):
        return gradient(
            shard(whole, layout_at(mesh, whole.shape, [[0, 3, 3, 4], None, None]))
        ).full_tensor()

    expected = gradient(whole.clone())
    assert expected.isinf().all()
    assert all(torch.equal(found, expected) for found in on_ranks((3, 1, 1), body))


@pytest.mark.parametrize("value", [0.1, -0.7, 1e5 / 3, 1.1e-9, 0.2, 0.9])
def test_equal_values_have_no_deviation_and_no_gradient_of_it(value):
    """A mean with a rounding error would give nonzero deviations and gradients."""
    whole = torch.full((2, 3, 10, 5, 3), value, dtype=torch.float64)

    def body(mesh):
        x = whole.clone().requires_grad_()
        deviation = distribute_tensor(x, mesh).std((2, 3, 4), correction=0)
        deviation.sum().backward()
        return deviation.full_tensor(), x.grad

    for spatial in ((2, 1, 1), (3, 1, 1), (2, 2, 1)):
        for deviation, grad in on_ranks(spatial, body):
            assert not deviation.any()
            assert not grad.any()


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
    """Statistics by slice and by column meet the tensor and one another again."""
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


ANY = {
    "sum": lambda x, dim, keep: x.sum(dim, keep),
    "mean": lambda x, dim, keep: x.mean(dim, keepdim=keep),
    "var": lambda x, dim, keep: x.var(dim, correction=0, keepdim=keep),
    "nansum": lambda x, dim, keep: _with_nan(x).nansum(dim, keep),
    "amax": lambda x, dim, keep: x.amax(dim, keep),
    "amin": lambda x, dim, keep: x.amin(dim, keep),
    "maximum norm": lambda x, dim, keep: torch.linalg.vector_norm(x, math.inf, dim, keep),
    "3-norm": lambda x, dim, keep: torch.linalg.vector_norm(x, 3, dim, keep),
    "logsumexp": lambda x, dim, keep: x.logsumexp(dim, keep),
    "max": lambda x, dim, keep: x.max(dim[0], keep).values,
    "argmin": lambda x, dim, keep: x.argmin(dim[0], keep),
    "prod": lambda x, dim, keep: x.prod(dim[0], keep),
    "argmax of all": lambda x, dim, keep: x.argmax(keepdim=keep),
}


@settings(max_examples=30)
@given(data=st.data(), keep=st.booleans(), ties=st.booleans())
@pytest.mark.parametrize("count", [1, 2, 3])
def test_anything_over_any_dims_of_any_split(count, data, keep, ties):
    extents = tuple(data.draw(st.lists(st.integers(1, 5), min_size=count, max_size=count)))
    shape = (2, *extents)
    dim = data.draw(st.lists(st.integers(0, count), min_size=1, max_size=count + 1, unique=True))
    reduce = ANY[data.draw(st.sampled_from(sorted(ANY)))]
    x = randint(3, *shape).double() if ties else randn(*shape)
    check_function(lambda t: reduce(t, tuple(dim), keep), x, (), data.draw(cuts(extents)))


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.int32], ids=str)
def test_integers_and_masks_are_summed_as_torch_does(dtype):
    whole = randint(2, *SHAPE).to(dtype)

    def body(mesh):
        total = shard(whole, layout_at(mesh, SHAPE, POINTS["uneven 2x2x2"])).sum()
        assert total.dtype == whole.sum().dtype
        assert total == whole.sum()

    on_ranks((2, 2, 2), body)


OF_NOTHING = {
    "amax": lambda x: x.amax(2),
    "amin of all": lambda x: x.amin(()),
    "max": lambda x: x.max(),
    "max along a dim": lambda x: x.max(2),
    "argmin": lambda x: x.argmin(),
    "argmax along a dim": lambda x: x.argmax(2, True),
    "aminmax": lambda x: torch.aminmax(x, dim=2),
    "maximum norm": lambda x: torch.linalg.vector_norm(x, math.inf, 2),
}


@pytest.mark.parametrize("reduce", OF_NOTHING.values(), ids=OF_NOTHING)
def test_extremes_of_nothing_are_torchs_errors(reduce):
    with pytest.raises((RuntimeError, IndexError), match=r"Expected|cannot"):
        reduce(randn(*SHAPE)[:, :, 4:])

    def body(mesh):
        x = shard(randn(*SHAPE), layout_at(mesh, SHAPE, POINTS["uneven 2x2x2"]))
        with pytest.raises((RuntimeError, IndexError), match=r"Expected|cannot"):
            reduce(x[:, :, 4:])

    on_ranks((2, 2, 2), body)


REFUSED = {
    "a matrix norm": (lambda x: torch.linalg.norm(x, 2, (2, 3)), "a matrix norm"),
    "the nuclear norm": (lambda x: torch.norm(x, "nuc", (2, 3)), "nuclear"),
    "a negative order": (lambda x: torch.linalg.vector_norm(x, -1, 2), "order -1"),
    "out=": (lambda x: torch.sum(x, 2, out=x.detach()), "unexpected keyword argument 'out'"),
}


@pytest.mark.parametrize(("call", "message"), REFUSED.values(), ids=REFUSED)
def test_refusals(call, message):
    def body(mesh):
        x = shard(randn(*SHAPE), layout_at(mesh, SHAPE, POINTS["2x1x1"]))
        with pytest.raises(NotSupported, match=message):
            call(x)

    on_ranks((2, 1, 1), body)
