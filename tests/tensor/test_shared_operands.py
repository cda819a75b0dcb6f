"""Calls with operands that depend on one another, in double backward."""

from __future__ import annotations

import pytest
import torch.nn.functional as F

from support.equivalence import check_function, randn


def shared_by_layers(x, weight, bias):
    return F.conv3d(F.conv3d(x, weight, bias, padding=1).tanh(), weight, bias, padding=1)


def computed_from_the_input(x, weight, bias):
    return F.conv3d(x, weight * x.square().mean(), bias + x.mean(), padding=1)


def norm_computed_from_the_input(x, weight, bias):
    scale = weight.sum((1, 2, 3, 4)) * x.square().mean((0, 2, 3, 4))
    return F.batch_norm(x, None, None, scale, bias + x.mean(), training=True).tanh()


def norm_shared_by_layers(x, weight, bias):
    scale = weight.select(1, 0)[:, 0, 0, 0]
    for _ in range(2):
        x = F.batch_norm(x, None, None, bias, bias, training=True).tanh() * scale.sum()
    return x


@pytest.mark.parametrize(
    "function",
    [
        shared_by_layers,
        computed_from_the_input,
        norm_computed_from_the_input,
        norm_shared_by_layers,
    ],
)
@pytest.mark.parametrize(
    "points",
    [[[0, 2, 4], None], [[0, 0, 1, 4], None], [None, [0, 1, 4]], [None, None]],
)
@pytest.mark.parametrize("keep", [True, False])
def test_second_order(function, points, keep):
    """The call uses correction, gathered inputs, or the full tensor on one rank."""
    check_function(
        function,
        randn(1, 2, 4, 4, 3),
        [randn(2, 2, 3, 3, 3, seed=1) / 5, randn(2, seed=2)],
        [*points, None],
        second_order=True,
        keep_thin_blocks=keep,
    )
