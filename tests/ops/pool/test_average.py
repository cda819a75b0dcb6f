"""Window means by box: equal to torch's pooling of the full tensor, with exact adjoints."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pydist.ops.pool.average import Averaging
from pydist.ops.windows import Window, symmetric
from pydist.partition import Box
from support.equivalence import randn
from support.equivalence.strategies import WindowCase, windows

POOLS = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}


def boxes(shape, points) -> list[Box]:
    """Returns the blocks of a tensor that is split at points of its last dims."""
    cuts = [[0, n] for n in shape[: len(shape) - len(points)]] + points
    intervals = [list(itertools.pairwise(cut)) for cut in cuts]
    return [Box(*zip(*block, strict=True)) for block in itertools.product(*intervals)]


def part(x: Tensor, box: Box) -> Tensor:
    return x[box.slices]


@pytest.mark.parametrize("dims", [1, 2, 3])
@given(data=st.data())
def test_parts_add_up_to_the_whole_and_spread_is_the_adjoint(dims, data):
    case: WindowCase = data.draw(windows(dims=dims, dilations=1, pooling=True))
    window = Window(case.kernel, case.stride, case.dilation, symmetric(case.padding))
    x = randn(2, 3, *case.extents)
    if data.draw(st.booleans(), "channels last"):
        x = x.movedim(1, -1).contiguous().movedim(-1, 1)
    expected = POOLS[dims](x, case.kernel, case.stride, case.padding)
    scales = [
        torch.full((n,), 1 / k, dtype=torch.float64)
        for n, k in zip(expected.shape[2:], case.kernel, strict=True)
    ]
    averaging = Averaging(window, scales)
    everything = Box([0] * expected.dim(), expected.shape)
    outputs = data.draw(st.sampled_from([everything, *cut_somewhere(everything)]), "outputs")
    found = torch.zeros(outputs.shape).double()
    grad = randn(*outputs.shape, seed=1)
    for block in boxes(x.shape, case.points):
        local = part(x, block)
        y = averaging.means(local, block, outputs)
        found += y
        grad_x = averaging.spread(grad, outputs, block)
        assert grad_x.shape == local.shape
        torch.testing.assert_close((grad_x * local).sum(), (y * grad).sum())
    torch.testing.assert_close(found, part(expected, outputs), rtol=1e-13, atol=1e-13)


def cut_somewhere(box: Box) -> list[Box]:
    """Returns the halves of a box along each spatial dim."""
    found = []
    for dim in range(2, len(box.lo)):
        middle = (box.lo[dim] + box.hi[dim]) // 2
        lo, hi = list(box.lo), list(box.hi)
        lo[dim] = hi[dim] = middle
        found += [Box(box.lo, hi), Box(lo, box.hi)]
    return found
