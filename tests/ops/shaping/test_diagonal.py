"""Diagonals of sharded tensors equal torch's."""

from __future__ import annotations

import pytest
import torch

from pydist import distribute_tensor
from pydist.errors import NotSupported
from support.equivalence import check_function, on_ranks, randn
from support.equivalence.splits import TWO_SPLITS as POINTS

CALLS = {
    "two split dims": lambda x: torch.diagonal(x * x, 0, 2, 3),
    "below": lambda x: x.diagonal(-1, -2, 2),
    "above, beyond the end": lambda x: x.diagonal(7, 3, 4),
    "no split dim": lambda x: x.diagonal(),
    "an in-place change": lambda x: (x * x).clone().diagonal(0, 0, 1).mul_(2),
    "similarity of voxels": lambda x: torch.einsum(
        "bcn,bcm->bnm", x.flatten(2), x.flatten(2).sin()
    ).diagonal(dim1=1, dim2=2),
    "a matrix": lambda x: torch.diag(x[0, 0, :, :, 1], 1),
    "trace": lambda x: (x[0, 0, :, :, 1] @ x[1, 1, :, :, 0].T).trace(),
}


@pytest.mark.parametrize("points", POINTS.values(), ids=POINTS)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_diagonals(call, points):
    check_function(call, randn(2, 3, 5, 4, 3), (), points)


def test_refusals():
    def body(mesh):
        x = distribute_tensor(randn(2, 3, 5, 4, 3), mesh)
        with pytest.raises(NotSupported, match="it is no matrix"):
            torch.diag(x[0, 0, :, 0, 0])
        with pytest.raises(RuntimeError, match="expected a matrix"):
            x.trace()
        with pytest.raises(RuntimeError, match="appears twice"):
            x.diagonal(0, 2, -3)

    on_ranks((2, 1, 1), body)
