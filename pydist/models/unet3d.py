"""Defines the 3-D U-Net, which predicts the class of each voxel of a volume.

The network of Çiçek et al. (2016), "3D U-Net: Learning Dense Volumetric Segmentation from Sparse
Annotation", as the authors of Oyama et al. (2021) built it in LBANN: "same" padding instead of
cropped skips, so that input and output have the same extents.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import nn


class UNet3d(nn.Module):
    """U-Net that segments 3-D volumes.

    Each level down has two convolutions (3³, no bias; the first has half the channels), each with
    batch norm and ReLU, then max pooling by 2. Each level up has a transposed convolution (2³,
    stride 2, no bias) that keeps the channels, concatenation with the skip connection, then two
    convolutions. The last layer is a 1³ convolution to the classes. The defaults are the paper's
    network: 19,070,560 parameters.

    Args:
        in_channels: number of input channels.
        classes: number of classes, including background.
        features: channels after the second convolution of the first level, an even number; each
            level doubles them.
        levels: number of times that the width is halved.

    Raises:
        ValueError: `features` is odd, or a number is below 1.

    Source: LBANN, applications/segmentation/unet3d/unet3d.py of 2020. Weights are initialized as by
    LBANN's defaults: He-normal, batch norm with scale 1 and bias 0.
    """

    def __init__(
        self, in_channels: int = 1, classes: int = 3, features: int = 64, levels: int = 3
    ) -> None:
        super().__init__()
        if min(in_channels, classes, features, levels) < 1 or features % 2:
            raise ValueError(
                f"UNet3d with in_channels={in_channels}, classes={classes}, features={features}, "
                f"levels={levels}: each is 1 or more, and features is even"
            )
        self.in_channels = in_channels
        self.levels = levels
        widths = [features << level for level in range(levels + 1)]
        self.down = nn.ModuleList()
        for width in widths[:-1]:
            self.down.append(_convolutions(in_channels, width // 2, width))
            in_channels = width
        self.pool = nn.MaxPool3d(2)
        self.bottom = _convolutions(in_channels, widths[-1] // 2, widths[-1])
        self.unpool = nn.ModuleList()
        self.up = nn.ModuleList()
        for below, width in zip(widths[:0:-1], widths[-2::-1], strict=True):
            self.unpool.append(nn.ConvTranspose3d(below, below, 2, stride=2, bias=False))
            self.up.append(_convolutions(below + width, width, width))
        self.last = nn.Conv3d(features, classes, 1, bias=False)
        self.reset_parameters()

    @property
    def multiple(self) -> int:
        """Number that must divide every extent of the input."""
        return 1 << self.levels

    def reset_parameters(self) -> None:
        """Draws He-normal weights."""
        for module in self.modules():
            if isinstance(module, nn.Conv3d | nn.ConvTranspose3d):
                nn.init.kaiming_normal_(module.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Computes scores, which softmax over dim 1 converts to probabilities.

        Args:
            x: `[N, in_channels, D, H, W]`, the extents multiples of 2 ** levels (8).

        Returns:
            `[N, classes, D, H, W]`.

        Raises:
            ValueError: a wrong number of channels, or extents that can't be halved `levels` times.
        """
        if x.dim() != 5 or x.shape[1] != self.in_channels:
            raise ValueError(
                f"this UNet3d accepts [N, {self.in_channels}, D, H, W], got {tuple(x.shape)}"
            )
        if any(extent % self.multiple for extent in x.shape[2:]):
            raise ValueError(
                f"this UNet3d accepts extents that are multiples of {self.multiple}, got "
                f"{tuple(x.shape[2:])}"
            )
        skips = []
        for convolutions in self.down:
            x = convolutions(x)
            skips.append(x)
            x = self.pool(x)
        x = self.bottom(x)
        for unpool, convolutions in zip(self.unpool, self.up, strict=True):
            x = convolutions(torch.cat([unpool(x), skips.pop()], dim=1))
        return self.last(x)


def _convolutions(channels: int, *widths: int) -> nn.Sequential:
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for i, width in enumerate(widths, start=1):
        layers[f"conv{i}"] = nn.Conv3d(channels, width, 3, padding=1, bias=False)
        layers[f"bn{i}"] = nn.BatchNorm3d(width)
        layers[f"act{i}"] = nn.ReLU(inplace=True)
        channels = width
    return nn.Sequential(layers)
