"""Defines the 2-D U-Net, which predicts the class of each pixel of an image.

The network of Ronneberger et al. (2015), "U-Net: Convolutional Networks for Biomedical Image
Segmentation", with "same" padding instead of cropped skips, so that input and output have the same
extents, and with batch norm, as is usual today.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import torch
from torch import nn


class UNet2d(nn.Module):
    """U-Net that segments 2-D images.

    Each level down has two convolutions (3²), each with a norm and ReLU, then max pooling by 2.
    Each level up has a transposed convolution (2², stride 2) that halves the channels,
    concatenation with the skip connection, then two convolutions. The last layer is a 1²
    convolution to the classes. The defaults are the paper's network, with batch norm: 31,036,546
    parameters.

    Args:
        in_channels: number of input channels.
        classes: number of classes, including background.
        features: channels of the first level; each level doubles them.
        levels: number of times that the width is halved.
        norm: creates the norm after a convolution of the given channels, which has no bias then;
            without norm, convolutions have a bias.

    Raises:
        ValueError: a number is below 1.
    """

    def __init__(
        self,
        in_channels: int = 1,
        classes: int = 2,
        features: int = 64,
        levels: int = 4,
        norm: Callable[[int], nn.Module] | None = nn.BatchNorm2d,
    ) -> None:
        super().__init__()
        if min(in_channels, classes, features, levels) < 1:
            raise ValueError(
                f"UNet2d with in_channels={in_channels}, classes={classes}, features={features}, "
                f"levels={levels}: each is 1 or more"
            )
        self.in_channels = in_channels
        self.levels = levels
        widths = [features << level for level in range(levels + 1)]
        self.down = nn.ModuleList()
        for width in widths[:-1]:
            self.down.append(_convolutions(in_channels, width, norm))
            in_channels = width
        self.pool = nn.MaxPool2d(2)
        self.bottom = _convolutions(in_channels, widths[-1], norm)
        self.unpool = nn.ModuleList()
        self.up = nn.ModuleList()
        for width in widths[-2::-1]:
            self.unpool.append(nn.ConvTranspose2d(2 * width, width, 2, stride=2))
            self.up.append(_convolutions(2 * width, width, norm))
        self.last = nn.Conv2d(features, classes, 1)
        self.reset_parameters()

    @property
    def multiple(self) -> int:
        """Number that must divide every extent of the input."""
        return 1 << self.levels

    def reset_parameters(self) -> None:
        """Draws He-normal weights, as the paper recommends; biases are 0."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
                nn.init.kaiming_normal_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Computes scores, which softmax over dim 1 converts to probabilities.

        Args:
            x: `[N, in_channels, H, W]`, the extents multiples of 2 ** levels (16).

        Returns:
            `[N, classes, H, W]`.

        Raises:
            ValueError: a wrong number of channels, or extents that can't be halved `levels` times.
        """
        if x.dim() != 4 or x.shape[1] != self.in_channels:
            raise ValueError(
                f"this UNet2d accepts [N, {self.in_channels}, H, W], got {tuple(x.shape)}"
            )
        if any(extent % self.multiple for extent in x.shape[2:]):
            raise ValueError(
                f"this UNet2d accepts extents that are multiples of {self.multiple}, got "
                f"{tuple(x.shape[2:])}"
            )
        skips = []
        for convolutions in self.down:
            x = convolutions(x)
            skips.append(x)
            x = self.pool(x)
        x = self.bottom(x)
        for unpool, convolutions in zip(self.unpool, self.up, strict=True):
            x = convolutions(torch.cat([skips.pop(), unpool(x)], dim=1))
        return self.last(x)


def _convolutions(
    channels: int, width: int, norm: Callable[[int], nn.Module] | None
) -> nn.Sequential:
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for i in (1, 2):
        layers[f"conv{i}"] = nn.Conv2d(channels, width, 3, padding=1, bias=norm is None)
        if norm is not None:
            layers[f"norm{i}"] = norm(width)
        layers[f"act{i}"] = nn.ReLU(inplace=True)
        channels = width
    return nn.Sequential(layers)
