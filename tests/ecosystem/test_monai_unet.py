"""Unmodified MONAI UNet with each of its norms: the split run equals the one-device run."""

from __future__ import annotations

import pytest
import torch.nn.functional as F

from support.equivalence import Task, check_network, randn
from support.networks.small import initialized

nets = pytest.importorskip("monai.networks.nets")

NORMS = {
    "instance": "instance",
    "instance, affine": ("instance", {"affine": True}),
    "batch": "batch",
    "group": ("group", {"num_groups": 2}),
}
SPLITS = {"2x2x1": ((2, 2, 1), 1), "3x1x1": ((3, 1, 1), 1), "two groups": ((1, 2, 1), 2)}


@pytest.mark.parametrize(("spatial", "data"), SPLITS.values(), ids=SPLITS)
@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
def test_residual_unet(norm, spatial, data):
    """It has residual units, PReLU, transposed convolutions of stride 2, skips joined on channels.

    It has no biases: before a norm their gradients are 0, and the computed ones are pure rounding.
    """
    model = initialized(
        nets.UNet(3, 1, 2, (4, 8, 16), (2, 2), num_res_units=2, norm=norm, bias=False)
    )
    task = Task(model, randn(2, 1, 12, 8, 8), randn(2, 2, 12, 8, 8, seed=3), F.mse_loss)
    check_network(task, spatial, data)


def test_with_empty_blocks_kept():
    """The lowest level has 2 planes for 5 ranks."""
    model = initialized(nets.UNet(3, 1, 2, (2, 4, 6), (2, 2), num_res_units=1, bias=False))
    task = Task(model, randn(1, 1, 8, 8, 8), randn(1, 2, 8, 8, 8, seed=3), F.mse_loss)
    check_network(task, (5, 1, 1), keep_thin_blocks=True)
