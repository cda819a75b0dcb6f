"""Distances between points of split clouds, as for nearest neighbors."""

from __future__ import annotations

import pytest
import torch

from support.equivalence import Cut, check_function, randn

POINTS = {"2": [[0, 3, 8], None], "3, one of them empty": [[0, 3, 3, 8], None]}
CLOUD = randn(2, 8, 3, seed=1)
CALLS = {
    "both split": torch.cdist,
    "with itself": lambda x, y: torch.cdist(x, x + 1) * torch.cdist(y, x, 1.0),
    "to a plain cloud": lambda x, y: torch.cdist(x, CLOUD, p=3.0) * torch.cdist(CLOUD, x),
    "coordinates that are split": lambda x, y: torch.cdist(x.mT, y.mT),
    "neighbors": lambda x, y: torch.cdist(x, y).topk(3, largest=False)[0],
    "features of neighbors": lambda x, y: (
        y[torch.arange(2)[:, None, None], torch.cdist(x, y).topk(3, largest=False)[1]]
        * x[:, :, None]
    ),
    "within a radius": lambda x, y: (torch.cdist(x, y) < 1.5).to(x.dtype) @ y,
}


@pytest.mark.parametrize("points", POINTS.values(), ids=POINTS)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_split_equals_whole(call, points):
    """torch has no second derivative."""
    check_function(call, randn(2, 8, 3), (), points, beside=[Cut(CLOUD, points)])


def test_many_points_use_a_matrix_product_on_all_ranks():
    """By the global numbers: torch would compute blocks of 20 points otherwise."""
    x = randn(1, 40, 3)
    check_function(lambda x: torch.cdist(x, x.detach() + 1e-3), x, (), [[0, 20, 40], None])


@pytest.mark.parametrize("points", [[0, 20, 40], [0, 20, 20, 40], [0, 40, 40]])
def test_second_derivatives_of_many_points(points):
    """torch has those of a matrix product; a rank without points takes part in them."""

    def distances(x):
        return torch.cdist(x, x.detach() + 1e-3).sum(1) + torch.cdist(CLOUD[:1], x).sum(1)

    check_function(distances, randn(1, 40, 3), (), [points, None], second_order=True)
