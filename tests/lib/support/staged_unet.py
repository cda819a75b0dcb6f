"""A small U-Net in stages: the task that tests of schedules share."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support.equivalence import Task, randn
from support.networks.small import initialized

BATCH = 8


class SmallUNet(nn.Module):
    """U-Net of two levels that has norms, in-place activations and two skips."""

    def __init__(self) -> None:
        super().__init__()
        self.top, self.norm = nn.Conv3d(1, 3, 3, padding=1), nn.BatchNorm3d(3)
        self.down = nn.Conv3d(3, 4, 3, stride=2, padding=1)
        self.deep = nn.Conv3d(4, 4, 3, padding=1)
        self.up = nn.ConvTranspose3d(4, 3, 2, stride=2)
        self.last = nn.Conv3d(6, 2, 3, padding=1)
        self.act = nn.LeakyReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        top = self.act(self.norm(self.top(x)))
        down = self.act(self.down(top))
        deep = self.act(self.deep(down)) + down
        return self.last(torch.cat([top, self.up(deep)], 1))


def unet_task(batch: int = BATCH) -> Task:
    x, target = randn(batch, 1, 6, 4, 4, seed=1), randn(batch, 2, 6, 4, 4, seed=2)
    return Task(initialized(SmallUNet()), x, target, F.mse_loss)


def without_statistics(task: Task) -> Task:
    """Replaces the batch norm, which GEMS refuses in training, by a group norm."""
    model = copy.deepcopy(task.model)
    model.norm = initialized(nn.GroupNorm(1, 3))
    return task._replace(model=model)
