"""Split adaptive pooling equals the one-device run, for any output size."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from support.equivalence import check_function, layout_at, on_ranks, randn, shard
from support.equivalence.exact import check_exact, whole_numbers
from support.equivalence.strategies import cuts

AVG = {1: F.adaptive_avg_pool1d, 2: F.adaptive_avg_pool2d, 3: F.adaptive_avg_pool3d}
MAX = {1: F.adaptive_max_pool1d, 2: F.adaptive_max_pool2d, 3: F.adaptive_max_pool3d}


@st.composite
def cases(draw, dims):
    """Draws extents, split points and output sizes below, at and above the input's extents."""
    extents = tuple(draw(st.integers(1, 9)) for _ in range(dims))
    sizes = tuple(draw(st.sampled_from([1, 2, 3, n, n + 2])) for n in extents)
    return extents, draw(cuts(extents)), sizes


@pytest.mark.parametrize("dims", [1, 2, 3])
@given(data=st.data())
@settings(max_examples=25)
def test_average(dims, data):
    extents, points, sizes = data.draw(cases(dims))
    x = randn(2, 3, *extents)
    if data.draw(st.booleans(), "channels last"):
        x = x.movedim(1, -1).contiguous().movedim(-1, 1)
    check_function(
        lambda x: AVG[dims](x * x, sizes), x, (), points, second_order=True,
        keep_thin_blocks=data.draw(st.booleans(), "thin"),
    )  # fmt: skip


@pytest.mark.parametrize("dims", [1, 2, 3])
@given(data=st.data())
@settings(max_examples=25)
def test_maxima_and_indices(dims, data):
    extents, points, sizes = data.draw(cases(dims))
    x = whole_numbers(2, 3, *extents)
    if data.draw(st.booleans(), "some are NaN"):
        x[whole_numbers(*x.shape, seed=1) > 1] = torch.nan
    if data.draw(st.booleans(), "channels last"):
        x = x.movedim(1, -1).contiguous().movedim(-1, 1)
    check_exact(
        lambda x: MAX[dims](x, sizes, True), x, points,
        keep_thin_blocks=data.draw(st.booleans(), "thin"),
    )  # fmt: skip


CALLS = {
    "to one": lambda x: F.adaptive_max_pool3d(x, 1, return_indices=True),
    "to one of wide windows": lambda x: F.adaptive_max_pool3d(x, (1, 3, 1), return_indices=True),
    "None keeps": lambda x: F.adaptive_max_pool3d(x, (2, None, 1), return_indices=True),
    "no batch dim": lambda x: F.adaptive_max_pool3d(x[1], 2, return_indices=True),
    "with_indices by name": lambda x: F.adaptive_max_pool3d_with_indices(x, 3),
}
POINTS = {
    "2x1x1": [[0, 4, 8], None, None],
    "uneven, one empty": [[0, 1, 1, 8], None, [0, 3, 8]],
    "2x2x2": [[0, 3, 8], [0, 4, 7], [0, 5, 8]],
}


@pytest.mark.parametrize("points", POINTS.values(), ids=POINTS)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_calls(call, points):
    x = whole_numbers(2, 3, 8, 7, 8)
    for each in (x, x.bfloat16(), x.contiguous(memory_format=torch.channels_last_3d)):
        check_exact(call, each, points)
    check_exact(call, torch.full_like(x, -torch.inf), points)


def test_one_dim_of_its_own_function_gives_indices():
    x = whole_numbers(2, 2, 9)
    for call in (torch.adaptive_max_pool1d, F.adaptive_max_pool1d_with_indices):
        check_exact(lambda x, call=call: call(x, 4), x, [[0, 4, 9]])
    check_function(lambda x: torch.adaptive_avg_pool1d(x, 4), x, (), [[0, 4, 9]])


@pytest.mark.parametrize("pool", [F.adaptive_avg_pool3d, F.adaptive_max_pool3d])
def test_one_output_lies_on_every_rank(pool):
    def body(mesh):
        x = shard(randn(1, 2, 8, 4, 4), layout_at(mesh, (1, 2, 8, 4, 4), [[0, 4, 8], None, None]))
        return pool(x, 1).layout.split_dims, pool(x, (1, 2, 2)).layout.split_dims

    assert on_ranks((2, 1, 1), body) == [((), ())] * 2
