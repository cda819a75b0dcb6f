"""Determinants and inverses of matrices, at each voxel or of each sample."""

from __future__ import annotations

import pytest
import torch

from pydist import distribute_tensor
from support.equivalence import check_function, on_ranks, randn

POINTS = {"2": [[0, 2, 5], None, None], "4, two of them empty": [[0, 2, 2, 5], None, [0, 0, 3]]}
CALLS = {
    "det": torch.linalg.det,
    "slogdet": lambda x: torch.linalg.slogdet(x).logabsdet + torch.slogdet(x)[0],
    "logdet": lambda x: torch.logdet(x @ x.mT),
    "inv": torch.linalg.inv,
    "inverse": lambda x: x.inverse() @ x.inverse().mT,
    "of a matrix without dims before": lambda x: x[0, 0].det() * x[1, 4].inverse(),
}


@pytest.mark.parametrize("points", POINTS.values(), ids=POINTS)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_split_equals_whole(call, points):
    """Rows or columns of a matrix may be split, too."""
    check_function(call, randn(2, 5, 3, 3) + 3 * torch.eye(3), (), points, second_order=True)


def test_what_torch_refuses():
    def body(mesh):
        x = distribute_tensor(randn(1, 1, 4, 4, 3), mesh)
        with pytest.raises(RuntimeError, match="square"):
            torch.linalg.det(x)

    on_ranks((2, 1, 1), body)


def test_a_singular_matrix_of_one_rank_is_an_error_of_all():
    """So a program that catches it goes on with the same calls on all ranks."""

    def body(mesh):
        factors = torch.arange(4).sub(3)[:, None, None]
        x = distribute_tensor((randn(1, 1, 4, 3, 3) + 3 * torch.eye(3)) * factors, mesh)
        with pytest.raises(torch.linalg.LinAlgError, match="singular"):
            torch.inverse(input=x)
        assert torch.det(input=x).full_tensor()[0, 0, 3] == 0

    on_ranks((2, 1, 1), body)
