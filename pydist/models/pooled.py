"""Defines a CosmoFlow for cubes of any size, whose features are averaged over the voxels."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import nn


class PooledCosmoFlow(nn.Module):
    """Network of CosmoFlow's blocks that accepts volumes of any size, with the same parameters.

    Each block is a convolution, batch norm, LeakyReLU and average pooling as in CosmoFlow's variant
    "paper", and doubles the channels. Instead of flattening the last features, which fixes the
    input's width, the network averages them over all voxels.

    Args:
        in_channels: number of input channels (redshifts).
        outputs: number of values to predict.
        features: channels of the first block.
        levels: number of blocks.
        hidden: width of the fully connected layer before the output.
    """

    def __init__(
        self,
        in_channels: int = 4,
        outputs: int = 4,
        features: int = 8,
        levels: int = 3,
        hidden: int = 64,
    ) -> None:
        super().__init__()
        blocks: OrderedDict[str, nn.Module] = OrderedDict()
        channels = in_channels
        for level in range(levels):
            wider = features << level
            blocks[f"conv{level + 1}"] = nn.Conv3d(channels, wider, 3, padding=1, bias=False)
            blocks[f"norm{level + 1}"] = nn.BatchNorm3d(wider)
            blocks[f"act{level + 1}"] = nn.LeakyReLU(0.01)
            blocks[f"pool{level + 1}"] = nn.AvgPool3d(3, stride=2, padding=1)
            channels = wider
        self.blocks = nn.Sequential(blocks)
        self.head = nn.Sequential(
            nn.Linear(channels, hidden), nn.LeakyReLU(0.01), nn.Linear(hidden, outputs)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Predicts the values of each sample.

        Args:
            x: volumes, [N, in_channels, D, H, W].

        Returns:
            The values, [N, outputs].
        """
        out: torch.Tensor = self.head(self.blocks(x).mean((2, 3, 4)))
        return out
