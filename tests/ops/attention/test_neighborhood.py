"""Neighborhood attention over split space equals one device; what natten computes is its oracle."""

from __future__ import annotations

import copy

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import assume, given

import pydist
from pydist.errors import UsageError
from pydist.ops.attention.neighborhood import Neighborhood
from support.equivalence import check_function, error, layout_at, on_ranks, randn, shard
from support.neighborhood import keys_of, neighborhood_attention_generic, overridable

windows = st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3), st.booleans()).filter(
    lambda w: w[1] <= w[0]
)


@given(st.data(), windows)
def test_windows_in_the_box_are_those_in_the_domain(data, window):
    kernel, _, dilation, _ = window
    extent = data.draw(st.integers(kernel * dilation, 24))
    lo = data.draw(st.integers(0, extent))
    hi = data.draw(st.integers(lo, extent))
    begin, end = Neighborhood(extent, *window).needs(lo, hi)
    assert 0 <= begin <= lo
    assert hi <= end <= extent
    assert end - begin >= kernel * dilation
    for query in range(lo, hi):
        found = [begin + key for key in keys_of(query - begin, end - begin, *window)]
        assert found == keys_of(query, extent, *window)


def test_the_box_is_a_halo():
    assert Neighborhood(100, 7, 1, 1, is_causal=False).needs(40, 60) == (37, 63)
    assert Neighborhood(100, 7, 1, 2, is_causal=False).needs(40, 60) == (34, 66)
    assert Neighborhood(100, 7, 1, 1, is_causal=False).needs(0, 2) == (0, 7)


def tokens(x, heads=2):
    """Returns [samples, *space, heads, channels] of [samples, heads * channels, *space]."""
    return x.movedim(1, -1).unflatten(-1, (heads, -1))


def itself(x, *args, **kwargs):
    t = tokens(x)
    return overridable(t, t.flip(-1), t * 2, *args, **kwargs)


def joined(x, *args, **kwargs):
    result, sums = itself(x, *args, return_lse=True, **kwargs)
    return torch.cat([result, sums.unsqueeze(-1)], -1)


LINE, PLANE, VOLUME = (2, 4, 11), (1, 4, 7, 6), (1, 4, 4, 5, 3)
CALLS = {
    "1-D": (LINE, lambda x: itself(x, 3)),
    "even kernel": (LINE, lambda x: itself(x, 4)),
    "wider than a block": (LINE, lambda x: itself(x, 7)),
    "all keys": (LINE, lambda x: itself(x, 11)),
    "dilated": (LINE, lambda x: itself(x, 3, 1, 2)),
    "dilated by 3": (LINE, lambda x: itself(x, 3, 1, 3)),
    "strided": (LINE, lambda x: itself(x, 4, 3)),
    "blocks": (LINE, lambda x: itself(x, 3, 3)),
    "strided and dilated": (LINE, lambda x: itself(x, 3, 2, 3)),
    "causal": (LINE, lambda x: itself(x, 3, is_causal=True)),
    "causal, strided and dilated": (LINE, lambda x: itself(x, 3, 2, 2, is_causal=True)),
    "scaled": (LINE, lambda x: itself(x, 3, scale=0.3)),
    "sums of exponentials": (LINE, lambda x: joined(x, 3)),
    "keys for all": (
        LINE,
        lambda x: itself(
            x, 3, additional_keys=randn(2, 5, 2, 2), additional_values=randn(2, 5, 2, 2, seed=1)
        ),
    ),
    "sharded keys for all": (
        LINE,
        lambda x: itself(x, 3, additional_keys=tokens(x), additional_values=tokens(x) + 1),
    ),
    "two queries per key": (
        LINE,
        lambda x: overridable(tokens(x, 4), tokens(x[:, :2]), tokens(x[:, 2:]), 3),
    ),
    "wider values": (
        LINE,
        lambda x: overridable(tokens(x), tokens(x), tokens(torch.cat([x, x], 1)), 3),
    ),
    "plain queries": (LINE, lambda x: overridable(randn(2, 11, 2, 2), tokens(x), tokens(x), 3)),
    "plain keys": (LINE, lambda x: overridable(tokens(x), randn(2, 11, 2, 2), tokens(x), 3)),
    "a learned context": (
        LINE,
        lambda x, key: itself(x, 3, additional_keys=key, additional_values=key * 2),
    ),
    "2-D": (PLANE, lambda x: itself(x, 3)),
    "2-D, a tuple of each": (PLANE, lambda x: itself(x, (3, 2), (1, 2), (2, 3), (False, True))),
    "3-D": (VOLUME, lambda x: itself(x, (3, 5, 2))),
}
POINTS = {
    1: {"2": [[0, 4, 11]], "3, one empty": [[0, 3, 3, 11]], "2, one empty": [[0, 11, 11]]},
    2: {"4": [[0, 3, 7], [0, 4, 6]], "3, one empty": [[0, 2, 7, 7], [0, 6]]},
    3: {"4": [[0, 4], [0, 2, 5], [0, 1, 3]], "thin": [[0, 1, 2, 3, 4], [0, 5], [0, 3]]},
}


@pytest.mark.parametrize(
    ("call", "shape", "points"),
    [
        pytest.param(call, shape, points, id=f"{name}-{cut}")
        for name, (shape, call) in CALLS.items()
        for cut, points in POINTS[len(shape) - 2].items()
    ],
)
def test_to_second_order(call, shape, points):
    learned = [randn(2, 5, 2, 2, seed=4)] if call.__code__.co_argcount == 2 else []
    check_function(call, randn(*shape), learned, points)
    check_function(call, randn(*shape), learned, points, second_order=True)


@pytest.mark.parametrize(
    ("message", "call"),
    {
        "kernel_size 12": lambda x: itself(x, 12),
        "dilation 6": lambda x: itself(x, 2, 1, 6),
        "stride 3": lambda x: itself(x, 2, 3),
        "kernel_size 0": lambda x: itself(x, 0),
        "one value or 1": lambda x: itself(x, (3, 3)),
        "the same 1 to 3 dims": lambda x: overridable(tokens(x), tokens(x)[:, :4], tokens(x), 3),
    }.items(),
)
def test_refusals(message, call):
    def body(mesh):
        with pytest.raises(UsageError, match=message):
            call(shard(randn(*LINE), layout_at(mesh, LINE, [[0, 4, 11]])))

    on_ranks((2, 1, 1), body)


def _random_case(data):
    dims = data.draw(st.integers(1, 3))
    each = [data.draw(windows) for _ in range(dims)]
    space = [data.draw(st.integers(w[0] * w[2], 12)) for w in each]
    return space, [tuple(column) for column in zip(*each, strict=True)]


@pytest.mark.filterwarnings("ignore:(return_lse is deprecated|flex_attention called)")
@given(st.data())
def test_the_oracle_is_natten(data):
    natten = pytest.importorskip("natten")
    space, window = _random_case(data)
    kernel, _, _, is_causal = window
    assume(min(kernel) > 1)  # which natten needs
    # natten has no causal attention to all keys on CPUs.
    assume(not (is_causal == (True,) and kernel[0] == space[0]))
    q, k, v = (randn(1, *space, 2, 8, seed=i).float() for i in range(3))
    found = [natten.na1d, natten.na2d, natten.na3d][len(space) - 1](q, k, v, *window)
    assert error(found, neighborhood_attention_generic(q, k, v, *window)) < 1e-5


@pytest.mark.filterwarnings("ignore:(return_lse is deprecated|flex_attention called)")
@pytest.mark.parametrize("shape", [(2, 16, 11), (1, 16, 7, 6), (1, 16, 4, 5, 3)])
def test_natten_on_split_space(shape):
    natten = pytest.importorskip("natten")
    dims = len(shape) - 2
    module = getattr(natten, f"NeighborhoodAttention{dims}D")(16, 2, kernel_size=3).eval()
    x = randn(*shape).float().requires_grad_(False)

    def body(mesh):
        split = shard(x, layout_at(mesh, shape, next(iter(POINTS[dims].values()))))
        with torch.no_grad():
            by_function = getattr(natten, f"na{dims}d")(*[tokens(split)] * 3, kernel_size=3)
            by_module = pydist.parallelize(copy.deepcopy(module), mesh)(split.movedim(1, -1))
        return by_function.full_tensor(), by_module.full_tensor()

    with torch.no_grad():
        expected = [
            getattr(natten, f"na{dims}d")(*[tokens(x)] * 3, kernel_size=3),
            module(x.movedim(1, -1)),
        ]
    grid = [len(p) - 1 for p in next(iter(POINTS[dims].values()))]
    for found in on_ranks((*grid, *[1] * (3 - dims)), body):
        for a, b in zip(found, expected, strict=True):
            assert error(a, b) < 1e-5
