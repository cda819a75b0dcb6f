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
from support.networks.vision import declare_missing_operators

BATCH = 2


class Entry(NamedTuple):
    """Entry of the zoo, which creates a network and describes its samples and outputs.

    Attributes:
        make: creates the network from torch's global generator; skips the test if its package is
            missing.
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


def monai(name: str, *args: Any, **kwargs: Any) -> Callable[[], nn.Module]:
    """Returns a function that creates a network of `monai.networks.nets`."""

    def make() -> nn.Module:
        return getattr(pytest.importorskip("monai.networks.nets"), name)(*args, **kwargs)

    return make


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
    "MONAI UNet": Entry(
        monai("UNet", 3, 1, 2, (4, 8, 16), (2, 2), num_res_units=2), (1, 16, 12, 8)
    ),
    "MONAI UNet, batch norm": Entry(
        monai("UNet", 3, 1, 2, (4, 8), (2,), num_res_units=1, norm="batch", act="relu"),
        (1, 10, 8, 6),
    ),
    "MONAI UNet, 2-D": Entry(
        monai("UNet", 2, 1, 2, (4, 8, 8), (2, 2), num_res_units=2), (1, 16, 12)
    ),
    "BasicUNet": Entry(
        monai("BasicUNet", 3, 1, 2, features=(2, 2, 4, 4, 4, 2), upsample="deconv"), (1, 32, 16, 16)
    ),
    "BasicUNet, trilinear": Entry(
        monai("BasicUNet", 3, 1, 2, features=(2, 2, 4, 4, 4, 2), upsample="nontrainable"),
        (1, 16, 32, 16),
    ),
    "BasicUNet, subpixels": Entry(
        monai("BasicUNet", 3, 1, 2, features=(2, 2, 4, 4, 4, 2), upsample="pixelshuffle"),
        (1, 16, 16, 32),
    ),
    "AttentionUnet": Entry(monai("AttentionUnet", 3, 1, 2, (4, 8, 8), (2, 2)), (1, 16, 12, 8)),
    "SegResNet": Entry(
        monai("SegResNet", 3, 8, 1, 2, blocks_down=(1, 2, 2), blocks_up=(1, 1)), (1, 12, 8, 8)
    ),
    "DynUNet": Entry(
        monai(
            "DynUNet",
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
    "DynUNet, deep supervision": Entry(
        monai(
            "DynUNet",
            3,
            1,
            2,
            [3] * 4,
            [1, 2, 2, 2],
            [2, 2, 2],
            filters=[4, 4, 8, 8],
            deep_supervision=True,
            deep_supr_num=2,
        ),
        (1, 16, 16, 16),
    ),
    "BasicUNetPlusPlus": Entry(
        monai("BasicUNetPlusPlus", 3, 1, 2, features=(2, 2, 2, 4, 4, 2), deep_supervision=True),
        (1, 16, 16, 32),
    ),
    "HighResNet": Entry(
        monai(
            "HighResNet",
            3,
            1,
            2,
            layer_params=(
                {"name": "conv_0", "n_features": 4, "kernel_size": 3},
                {"name": "res_1", "n_features": 4, "kernels": (3, 3), "repeat": 2},
                {"name": "res_2", "n_features": 6, "kernels": (3, 3), "repeat": 2},
                {"name": "conv_1", "n_features": 8, "kernel_size": 1},
                {"name": "conv_2", "kernel_size": 1},
            ),
        ),
        (1, 9, 8, 7),
    ),
    "VNet": Entry(monai("VNet", 3, 1, 2), (1, 32, 16, 16)),
    "DenseNet121": Entry(
        monai("DenseNet121", 3, 1, 3, init_features=8, growth_rate=4), (1, 48, 32, 32), classes=0
    ),
    "ResNet10": Entry(
        monai("resnet10", spatial_dims=3, n_input_channels=1, num_classes=3, widen_factor=0.125),
        (1, 32, 20, 16),
        classes=0,
    ),
    "blocks of SENet": Entry(_squeeze_and_excitation, (1, 12, 10, 8)),
    "SENet": Entry(
        monai(
            "SENet",
            3,
            1,
            block="se_bottleneck",
            layers=(1, 1, 1, 1),
            groups=2,
            reduction=4,
            inplanes=16,
            num_classes=3,
            dropout_prob=None,
        ),
        (1, 64, 20, 16),
        classes=0,
    ),
    "r3d_18": Entry(torchvision("r3d_18"), (3, 8, 20, 20), classes=0),
    "mc3_18": Entry(torchvision("mc3_18"), (3, 6, 24, 20), classes=0),
    "r2plus1d_18": Entry(torchvision("r2plus1d_18"), (3, 8, 20, 20), classes=0),
    "CosmoFlow": Entry(lambda: CosmoFlow(32, dropout=0.0), (4, 32, 32, 32), classes=0, numbers=4),
    "3D U-Net": Entry(lambda: UNet3d(1, 2, 4, 2), (1, 12, 8, 8)),
    "3D U-Net of the paper": Entry(UNet3d, (1, 16, 16, 16), classes=3),
}
"""The networks by name."""

WIDE = {
    "VNet",
    "CosmoFlow",
    "DenseNet121",
    "SENet",
    "r3d_18",
    "mc3_18",
    "r2plus1d_18",
    "3D U-Net of the paper",
}
"""Networks that take seconds per step: they have one split only, unless time is available."""


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
