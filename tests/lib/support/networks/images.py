"""Defines networks for images: published ones for MNIST and CIFAR-10, and a residual one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pydist.models import UNet2d
from support.equivalence import Task, randint, randn

CLASSES = 10
BATCH = 8


def mnist(width: int = 60) -> nn.Sequential:
    """Creates the network for MNIST that HeterogeneusModelDNN divides over unequal devices.

    Args:
        width: filters of the first convolution; the next ones have twice and four times as many.
    """
    return nn.Sequential(
        nn.Conv2d(1, width, 7, padding=3),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 5, padding=2),
        nn.ReLU(),
        nn.Conv2d(2 * width, 4 * width, 3, padding=1),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.LazyLinear(128),
        nn.ReLU(),
        nn.Linear(128, CLASSES),
    )


def cifar10(width: int = 60) -> nn.Sequential:
    """Creates the network for CIFAR-10 of the same work: pairs of 3² convolutions, each pooled."""
    layers: list[nn.Module] = []
    channels = 3
    for filters in (width, 2 * width, 4 * width, 8 * width):
        for _ in range(2):
            layers += [nn.Conv2d(channels, filters, 3, padding=1), nn.ReLU()]
            channels = filters
        layers.append(nn.MaxPool2d(2))
    head = nn.Flatten(), nn.LazyLinear(256), nn.ReLU(), nn.Linear(256, CLASSES)
    return nn.Sequential(*layers, *head)


class Residual(nn.Module):
    """Basic block that a residual network repeats (He et al., 2016)."""

    def __init__(self, channels: int, filters: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, filters, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(filters)
        self.conv2 = nn.Conv2d(filters, filters, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(filters)
        self.shortcut = nn.Sequential()
        if stride > 1 or channels != filters:
            convolution = nn.Conv2d(channels, filters, 1, stride, bias=False)
            self.shortcut = nn.Sequential(convolution, nn.BatchNorm2d(filters))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)), inplace=True)
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """Residual network for small images, which resembles ResNet-110 but has fewer blocks.

    Args:
        width: channels of the first blocks; each group of blocks has twice as many as the one
            before, at half the extent.
        blocks: number of blocks in each of three groups.
    """

    def __init__(self, width: int = 16, blocks: int = 2) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(True)
        )
        channels, self.blocks = width, nn.ModuleList()
        for group in range(3):
            for block in range(blocks):
                stride = 2 if group and not block else 1
                self.blocks.append(Residual(channels, width << group, stride))
                channels = width << group
        self.head = nn.Linear(channels, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Sequence[int]]] = {
    "MNIST": (lambda: mnist(6), (1, 12, 12)),
    "CIFAR-10": (lambda: cifar10(4), (3, 16, 16)),
    "ResNet": (lambda: ResNet(4), (3, 12, 12)),
    "U-Net": (lambda: UNet2d(1, CLASSES, 4, 2), (1, 12, 8)),
}
"""Narrow networks, with the shape of a sample."""


def task_of(name: str) -> Task:
    """Returns a task of a narrow network in fp64, whose loss is the cross-entropy."""
    make, sample = NETWORKS[name]
    x = randn(BATCH, *sample)
    with torch.random.fork_rng():  # rank-threads share the generator
        torch.manual_seed(0)
        model = make()
        with torch.no_grad():
            y = model.eval()(x.float())  # lazy layers become linear ones
    labels = randint(CLASSES, BATCH, *y.shape[2:], seed=1)
    return Task(model.double().train(), x, labels, F.cross_entropy)
