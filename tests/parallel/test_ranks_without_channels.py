"""Layers after a gate, which leaves some ranks along the channel axis without channels."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from support.equivalence import Task, check_network, randn

AFTER = {
    "batch norm": lambda: [nn.BatchNorm3d(4)],
    "instance norm": lambda: [nn.InstanceNorm3d(4, affine=True, track_running_stats=True)],
    "norm, PReLU": lambda: [nn.InstanceNorm3d(4), nn.PReLU()],
    "norm, PReLU a channel": lambda: [nn.BatchNorm3d(4), nn.PReLU(4)],
}


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("layers", AFTER.values(), ids=AFTER)
def test_training_is_that_of_one_device(layers, mode):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv3d(2, 8, 1), nn.GLU(1), *layers(), nn.Conv3d(4, 3, 1)).double()
    model.train(mode == "train")
    x, target = randn(2, 2, 4, 4, 4), randn(2, 3, 4, 4, 4, seed=1)
    check_network(Task(model, x, target, F.mse_loss), (1, 1, 1), axes={"channel": 2})
