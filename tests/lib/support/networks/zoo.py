"""Creates narrow third-party networks and small batches for the equivalence suite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pydist.models import CosmoFlow, UNet3d
from support.equivalence import Task, randint, randn
from support.networks.attention import nets
from support.networks.cases import BATCH
from support.networks.monai_zoo import CASES
from support.networks.vision import declare_missing_operators


class Entry(NamedTuple):
    """Entry of the zoo, which creates a network and describes its samples and outputs.

    Attributes:
        make: creates the network from torch's global generator.
        sample: shape of one sample.
        classes: number of classes of a dense output, for cross-entropy; 0 for mean squares.
        numbers: number of outputs for mean squares.
    """

    make: Callable[[], nn.Module]
    sample: tuple[int, ...]
    classes: int = 2
    numbers: int = 3


class Summed(nn.Module):
    """Wrapper that adds up the outputs of a network."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        y = self.network(x)
        if isinstance(y, (list, tuple)):
            y = sum(y[1:], y[0])
        return y


def of_monai(name: str, classes: int = 2) -> Entry:
    """Returns an entry for a network of MONAI as `monai_zoo` has it."""
    case = CASES[name]
    return Entry(case.make, (case.channels, *case.extents), classes)


def torchvision(name: str) -> Callable[[], nn.Module]:
    """Returns a function that creates a network of `torchvision.models.video`."""
    return lambda: getattr(_video(), name)(num_classes=3)


def _video() -> Any:
    declare_missing_operators()
    return pytest.importorskip("torchvision.models.video")


def _squeeze_and_excitation() -> nn.Module:
    blocks = pytest.importorskip("monai.networks.blocks.squeeze_and_excitation")
    return nn.Sequential(
        nn.Conv3d(1, 8, 3, stride=2, padding=1),
        blocks.SEResNetBottleneck(3, 8, 2, groups=1, reduction=4),
        blocks.SEResNeXtBottleneck(3, 8, 2, groups=2, reduction=4, base_width=64),
        blocks.ResidualSELayer(3, 8),
        nn.ConvTranspose3d(8, 2, 3, stride=2, padding=1, output_padding=1),
    )


ZOO = {
    "MONAI UNet": of_monai("UNet"),
    "MONAI UNet, batch norm": Entry(
        lambda: nets.UNet(3, 1, 2, (4, 8), (2,), num_res_units=1, norm="batch", act="relu"),
        (1, 10, 8, 6),
    ),
    "MONAI UNet, group norm": Entry(
        lambda: nets.UNet(
            3, 1, 2, (4, 8, 8), (2, 2), num_res_units=2, norm=("group", {"num_groups": 2})
        ),
        (1, 12, 8, 8),
    ),
    "MONAI UNet, 2-D": Entry(
        lambda: nets.UNet(2, 1, 2, (4, 8, 8), (2, 2), num_res_units=2), (1, 16, 12)
    ),
    "BasicUNet": of_monai("BasicUNet"),
    "BasicUNet, trilinear": Entry(
        lambda: nets.BasicUNet(3, 1, 2, features=(2, 2, 4, 4, 4, 2), upsample="nontrainable"),
        (1, 16, 32, 16),
    ),
    "BasicUNet, subpixels": Entry(
        lambda: nets.BasicUNet(3, 1, 2, features=(2, 2, 4, 4, 4, 2), upsample="pixelshuffle"),
        (1, 16, 16, 32),
    ),
    "AttentionUnet": of_monai("AttentionUnet"),
    "SegResNet": of_monai("SegResNet"),
    "DynUNet": Entry(
        lambda: nets.DynUNet(
            3,
            1,
            2,
            [3, [3, 3, 1], 3],
            [1, 2, [2, 2, 1]],
            [2, [2, 2, 1]],
            filters=[4, 8, 8],
            res_block=True,
        ),
        (1, 12, 8, 6),
    ),
    "DynUNet, deep supervision": of_monai("DynUNet"),
    "BasicUNetPlusPlus": of_monai("BasicUNetPlusPlus"),
    "HighResNet": of_monai("HighResNet"),
    "DenseNet121": of_monai("DenseNet121", classes=0),
    "ResNet10": of_monai("ResNet10", classes=0),
    "blocks of SENet": Entry(_squeeze_and_excitation, (1, 12, 10, 8)),
    "r3d_18": Entry(torchvision("r3d_18"), (3, 8, 20, 20), classes=0),
    "mc3_18": Entry(torchvision("mc3_18"), (3, 6, 24, 20), classes=0),
    "r2plus1d_18": Entry(torchvision("r2plus1d_18"), (3, 8, 20, 20), classes=0),
    "CosmoFlow": Entry(lambda: CosmoFlow(32, dropout=0.0), (4, 32, 32, 32), classes=0, numbers=4),
    "3D U-Net": Entry(lambda: UNet3d(1, 2, 4, 2), (1, 12, 8, 8)),
    "3D U-Net of the paper": Entry(UNet3d, (1, 16, 16, 16), classes=3),
}
"""The networks by name."""

WIDE = {
    "CosmoFlow",
    "DenseNet121",
    "r3d_18",
    "mc3_18",
    "r2plus1d_18",
    "3D U-Net of the paper",
}
"""Networks that take seconds per step: they have one split only."""


def task_of(name: str, dtype: torch.dtype = torch.float64) -> Task:
    """Returns a task with a batch of two; its loss is cross-entropy for classes, else MSE."""
    entry = ZOO[name]
    # Initialized by the authors' code, which uses torch's global generator: seeded, then restored.
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Summed(entry.make()).to(dtype)
    x = randn(BATCH, *entry.sample).to(dtype)
    if not entry.classes:
        return Task(model, x, randn(BATCH, entry.numbers, seed=1).to(dtype), F.mse_loss)
    labels = randint(entry.classes, BATCH, *entry.sample[1:], seed=1)
    return Task(model, x, labels, _cross_entropy)


def _cross_entropy(y: Tensor, labels: Tensor) -> Tensor:
    """Returns the cross-entropy, averaged over the heads of an output [N, heads, classes, ...]."""
    heads = y.unbind(1) if y.dim() > labels.dim() + 1 else [y]
    return torch.stack([F.cross_entropy(head, labels) for head in heads]).mean()
