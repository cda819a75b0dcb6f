"""Defines CosmoFlow, which predicts cosmological parameters from a cube of particle counts.

Two networks have that name. "paper" is that of Oyama et al. (2021), "The Case for Strong Scaling in
Deep Learning: Training Large 3D CNNs With Hybrid Parallelism", as its authors published it in
LBANN; "mlperf" is that of the MLPerf HPC benchmark. Both map cubes
`[N, in_channels, width, width, width]` to `[N, outputs]`.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Literal

import torch
from torch import nn

WIDTHS = (32, 64, 128, 256, 512)
Variant = Literal["paper", "mlperf"]

# The paper's seven convolutions: (output channels, stride, smallest width with a pool after it).
# So the flattened features are 256 * 2^3 at every width.
_PAPER_CONVS = (
    (16, 1, 32),
    (32, 1, 32),
    (64, 1, 32),
    (128, 2, 64),
    (256, 1, 128),
    (256, 1, 256),
    (256, 1, 512),
)
_PAPER_HIDDEN = (2048, 256)
_MLPERF_HIDDEN = (128, 64)


class ScaledTanh(nn.Module):
    """Activation `scale * tanh(x)`, whose bound is slightly beyond the targets' [-1, 1]."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Applies the activation to each element of a tensor of any shape."""
        return self.scale * torch.tanh(x)

    def extra_repr(self) -> str:
        """Returns the arguments for `print(model)`."""
        return f"scale={self.scale}"


class CosmoFlow(nn.Module):
    """CosmoFlow, which predicts cosmological parameters from a cube of matter densities.

    Args:
        width: edge of the input cube in voxels: 32, 64, 128, 256 or 512.
        in_channels: number of input channels (redshifts).
        outputs: number of parameters to predict.
        batch_norm: whether to put batch normalization between each convolution and its activation
            (only variant "paper", where it is the authors' option).
        dropout: dropout probability; None for the variant's own, 0.2 ("paper", before each fully
            connected layer) or 0.5 ("mlperf", after the first two).
        variant: "paper" (9,437,636 parameters at every width) or "mlperf" (8,907,556 at 128).
        batch_norm_momentum: weight of a batch in the running statistics. The authors' decay by
            0.999 per step, which suits runs of thousands of steps.

    Raises:
        ValueError: an unknown width or variant, or batch norm with "mlperf".

    Source: LBANN, applications/physics/cosmology/cosmoflow/cosmoflow.py of 2020 ("paper");
    mlcommons/hpc, cosmoflow, closed division since 1.0 ("mlperf"; widths other than 128 follow
    LBANN's rule of log2(width) - 2 convolutions).
    """

    def __init__(
        self,
        width: int = 128,
        in_channels: int = 4,
        outputs: int = 4,
        batch_norm: bool = False,
        dropout: float | None = None,
        variant: Variant = "paper",
        batch_norm_momentum: float = 0.001,
    ) -> None:
        super().__init__()
        if width not in WIDTHS:
            raise ValueError(f"CosmoFlow has no network for width {width}: use one of {WIDTHS}")
        if variant == "paper":
            self.features, features = _paper_features(
                width, in_channels, batch_norm_momentum if batch_norm else None
            )
            self.head = _paper_head(features, outputs, 0.2 if dropout is None else dropout)
        elif variant == "mlperf":
            if batch_norm:
                raise ValueError('CosmoFlow variant "mlperf" has no batch norm: use "paper"')
            self.features, features = _mlperf_features(width, in_channels)
            self.head = _mlperf_head(features, outputs, 0.5 if dropout is None else dropout)
        else:
            raise ValueError(f'CosmoFlow has no variant {variant!r}: use "paper" or "mlperf"')
        self.input_shape = (in_channels, width, width, width)
        self.reset_parameters(fc_bias=0.1 if variant == "paper" else 0.0)

    def reset_parameters(self, fc_bias: float) -> None:
        """Draws Glorot-uniform weights; sets biases to 0, those of linear layers to `fc_bias`."""
        for module in self.modules():
            if isinstance(module, nn.Conv3d | nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.constant_(module.bias, fc_bias if isinstance(module, nn.Linear) else 0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Predicts the parameters.

        Args:
            x: `[N, in_channels, width, width, width]`.

        Returns:
            `[N, outputs]`.

        Raises:
            ValueError: the shape differs from the network's.
        """
        if tuple(x.shape[1:]) != self.input_shape:
            raise ValueError(
                f"this CosmoFlow accepts samples of shape {self.input_shape}, got {tuple(x.shape)}"
            )
        return self.head(torch.flatten(self.features(x), 1))


def _paper_features(width: int, channels: int, momentum: float | None) -> tuple[nn.Sequential, int]:
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for i, (out, stride, pooled_from) in enumerate(_PAPER_CONVS, start=1):
        layers[f"conv{i}"] = nn.Conv3d(channels, out, 3, stride=stride, padding=1, bias=False)
        if momentum is not None:
            layers[f"bn{i}"] = nn.BatchNorm3d(out, eps=1e-5, momentum=momentum)
        layers[f"act{i}"] = nn.LeakyReLU(0.01, inplace=True)
        if width >= pooled_from:
            layers[f"pool{i}"] = nn.AvgPool3d(3, stride=2, padding=1)
        channels = out
    return nn.Sequential(layers), channels * 2**3


def _paper_head(features: int, outputs: int, dropout: float) -> nn.Sequential:
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for i, out in enumerate((*_PAPER_HIDDEN, outputs), start=1):
        layers[f"drop{i}"] = nn.Dropout(dropout)
        layers[f"fc{i}"] = nn.Linear(features, out)
        if i <= len(_PAPER_HIDDEN):
            layers[f"act{i}"] = nn.LeakyReLU(0.01, inplace=True)
        features = out
    return nn.Sequential(layers)


def _mlperf_features(width: int, channels: int) -> tuple[nn.Sequential, int]:
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for i in range(1, width.bit_length() - 2):
        out = min(32 * 2 ** (i - 1), 512)
        layers[f"conv{i}"] = nn.Conv3d(channels, out, 3, padding=1)
        layers[f"act{i}"] = nn.LeakyReLU(0.3, inplace=True)
        layers[f"pool{i}"] = nn.MaxPool3d(2)
        channels = out
    return nn.Sequential(layers), channels * 4**3


def _mlperf_head(features: int, outputs: int, dropout: float) -> nn.Sequential:
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for i, out in enumerate(_MLPERF_HIDDEN, start=1):
        layers[f"fc{i}"] = nn.Linear(features, out)
        layers[f"act{i}"] = nn.LeakyReLU(0.3, inplace=True)
        layers[f"drop{i}"] = nn.Dropout(dropout)
        features = out
    layers[f"fc{len(_MLPERF_HIDDEN) + 1}"] = nn.Linear(features, outputs)
    layers["bound"] = ScaledTanh(1.2)
    return nn.Sequential(layers)
