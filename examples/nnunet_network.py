"""The network of `examples/nnunet.toml`: a function that makes it from the arguments there."""

from __future__ import annotations

from dynamic_network_architectures.architectures.unet import ResidualEncoderUNet
from torch import nn


def residual_encoder_unet(
    in_channels: int, num_classes: int, features: list[int], blocks: list[int]
) -> nn.Module:
    """Returns nnU-Net's residual-encoder U-Net, which returns the scores of all levels.

    Args:
        in_channels: of the images; from the data set.
        num_classes: from the data set.
        features: channels of each level, of which each but the first halves the extents.
        blocks: residual blocks of each level.
    """
    levels = len(features)
    return ResidualEncoderUNet(
        in_channels,
        levels,
        features,
        nn.Conv3d,
        kernel_sizes=3,
        strides=[1] + [2] * (levels - 1),
        n_blocks_per_stage=blocks,
        num_classes=num_classes,
        n_conv_per_stage_decoder=1,
        conv_bias=True,
        norm_op=nn.InstanceNorm3d,
        norm_op_kwargs={"eps": 1e-5, "affine": True},
        nonlin=nn.LeakyReLU,
        nonlin_kwargs={"inplace": True},
        deep_supervision=True,
    )
