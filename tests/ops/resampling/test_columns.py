"""Windows as dims and as columns, split against whole."""

from __future__ import annotations

import pytest
import torch.nn.functional as F

from support.equivalence import check_function, randn

SHAPE = (2, 3, 9, 8)
POINTS = {
    "2x1": [[0, 4, 9], None],
    "2x3, one of them empty": [[0, 2, 9], [0, 3, 3, 8]],
}
CALLS = {
    "unfold": lambda x: x.unfold(2, 3, 1).square().sum(-1) * x[:, :, 1:-1],
    "unfold with steps": lambda x: x.unfold(2, 2, 3) ** 2,
    "patches": lambda x: x.unfold(2, 3, 3).unfold(3, 4, 4) ** 2,
    "neighborhoods": lambda x: (
        F.pad(x, (1, 1, 1, 1)).unfold(2, 3, 1).unfold(3, 3, 1) * x[..., None, None]
    ),
    "columns": lambda x: F.unfold(x, 3, padding=1) ** 2,
    "columns with steps": lambda x: F.unfold(x, (3, 2), (1, 2), (2, 1), (2, 3)) ** 2,
    "there and back": lambda x: F.fold(F.unfold(x, 3, 2, 2, 2) ** 2, (9, 8), 3, 2, 2, 2),
    "of an image": lambda x: F.fold(F.unfold(x[0], 2) ** 2, (9, 8), 2),
}


@pytest.mark.parametrize("points", POINTS.values(), ids=POINTS)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_to_second_order(call, points):
    check_function(call, randn(*SHAPE), (), points, second_order=True)
