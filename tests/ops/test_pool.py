"""Pooling of split samples is that of the whole, with torch's way of counting."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from equivalence import check_function, layout_at, on_ranks, randn, shard
from hypothesis import given
from hypothesis import strategies as st
from strategies import WindowCase, windows

from pydist.errors import NotSupported

AVG = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}
MAX = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}


@pytest.mark.parametrize("dims", [1, 2, 3])
@given(data=st.data())
def test_average(dims, data):
    case: WindowCase = data.draw(windows(dims=dims, dilations=1, pooling=True))
    options = {
        "ceil_mode": data.draw(st.booleans(), "ceil_mode"),
        "count_include_pad": data.draw(st.booleans(), "count_include_pad"),
    }
    if dims > 1:
        options["divisor_override"] = data.draw(st.sampled_from([None, 1, 7]), "divisor_override")
    check_function(
        lambda x: AVG[dims](x, case.kernel, case.stride, case.padding, **options),
        randn(2, 1, *case.extents),
        (),
        case.points,
        keep_thin_blocks=data.draw(st.booleans(), "thin"),
    )


@pytest.mark.parametrize("dims", [1, 2, 3])
@given(data=st.data())
def test_maximum(dims, data):
    case: WindowCase = data.draw(windows(dims=dims, pooling=True))
    ceil_mode = data.draw(st.booleans(), "ceil_mode")
    x = randn(2, 1, *case.extents)
    if data.draw(st.booleans(), "all negative"):
        x = -1 - x.abs()  # the padding must not win
    check_function(
        lambda x: MAX[dims](x, case.kernel, case.stride, case.padding, case.dilation, ceil_mode),
        x,
        (),
        case.points,
        keep_thin_blocks=data.draw(st.booleans(), "thin"),
    )


BY_NAME = {
    "average 3/2/1, CosmoFlow's": lambda x: F.avg_pool3d(x, 3, 2, 1),
    "average 3/2/1, padding not counted": lambda x: F.avg_pool3d(
        x, 3, 2, 1, count_include_pad=False
    ),
    "average 2, stride as the kernel": lambda x: F.avg_pool3d(x, 2),
    "average of ceil mode": lambda x: F.avg_pool3d(x, 3, 2, 1, ceil_mode=True),
    "maximum 3/2/1": lambda x: F.max_pool3d(x, 3, 2, 1),
    "maximum 2": lambda x: F.max_pool3d(x, 2),
    "maximum by keywords": lambda x: F.max_pool3d(x, kernel_size=3, stride=1, padding=1),
    "adaptive average to one": lambda x: F.adaptive_avg_pool3d(x, 1),
    "adaptive average of a divisor": lambda x: F.adaptive_avg_pool3d(x, (2, 4, None)),
    "adaptive maximum to one": lambda x: F.adaptive_max_pool3d(x, 1),
    "adaptive maximum of a divisor": lambda x: F.adaptive_max_pool3d(x, 4),
}
POINTS = {
    "2x1x1": [[0, 4, 8], None, None],
    "8x1x1": [list(range(9)), None, None],
    "uneven, one empty": [[0, 1, 1, 8], None, [0, 3, 8]],
    "2x2x2": [[0, 3, 8], [0, 4, 8], [0, 5, 8]],
}


@pytest.mark.parametrize("points", POINTS.values(), ids=POINTS)
@pytest.mark.parametrize("pool", BY_NAME.values(), ids=BY_NAME)
def test_by_name_to_second_order(pool, points):
    check_function(lambda x: pool(x * x), randn(2, 2, 8, 8, 8), (), points, second_order=True)


def test_of_equal_values_the_first_gets_the_gradient():
    check_function(
        lambda x: F.max_pool3d(x, 3, 1, 1), torch.ones(1, 1, 6, 4, 4).double(), (),
        [[0, 3, 6], None, None],
    )  # fmt: skip


def test_nan_in_a_window_is_its_maximum():
    x = randn(1, 1, 6, 4, 4)
    x[0, 0, 2, 1, 1] = torch.nan
    check_function(lambda x: F.max_pool3d(x, 3, 2, 1).detach(), x, (), [[0, 3, 6], None, None])


REFUSED = {
    "indices": (lambda x: F.max_pool3d(x, 2, return_indices=True), "max_pool3d_with_indices"),
    "no batch dim": (lambda x: F.avg_pool3d(x[0], 2), "N, C"),
    "adaptive, no divisor": (lambda x: F.adaptive_avg_pool3d(x, 3), "does not divide"),
    "padding over half a kernel": (lambda x: F.avg_pool3d(x, 2, 2, 2), "more than half"),
}


@pytest.mark.parametrize(("call", "message"), REFUSED.values(), ids=REFUSED)
def test_refusals(call, message):
    def body(mesh):
        x = shard(randn(1, 1, 4, 4, 4), layout_at(mesh, (1, 1, 4, 4, 4), [[0, 2, 4], None, None]))
        with pytest.raises(NotSupported, match=message):
            call(x)

    on_ranks((2, 1, 1), body)
