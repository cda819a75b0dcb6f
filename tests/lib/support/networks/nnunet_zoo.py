"""The architectures from which nnU-Net builds its networks, in 3-D and small."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

from torch import nn

from support.networks.cases import Case
from support.networks.vision import declare_missing_operators

KERNELS = [[1, 3, 3], [3, 3, 3], [3, 3, 3], [3, 3, 3]]
STRIDES = [[1, 1, 1], [1, 2, 2], [2, 2, 2], [2, 2, 2]]
"""Of an image with thick slices."""
UNET: dict[str, Any] = {
    "num_classes": 3, "deep_supervision": True, "n_conv_per_stage_decoder": [1, 1, 1],
    "conv_bias": True, "norm_op": nn.InstanceNorm3d, "norm_op_kwargs": {"affine": True},
    "nonlin": nn.LeakyReLU, "nonlin_kwargs": {"inplace": True},
}  # fmt: skip
"""What nnU-Net's plans have for all its U-Nets."""
PRIMUS: dict[str, Any] = {
    "eva_depth": 2, "eva_numheads": 2, "input_shape": (24, 16, 16), "drop_path_rate": 0.0,
}  # fmt: skip


def _made(module: str, name: str, *args: Any, **named: Any) -> nn.Module:
    """Returns a network of the package, which takes seconds to import."""
    declare_missing_operators()  # timm, which the package imports, would import torchvision
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # timm uses parts of torch that are deprecated
        found = importlib.import_module(f"dynamic_network_architectures.architectures.{module}")
    made: nn.Module = getattr(found, name)(*args, **named)
    return made


def _unet(name: str, **depths: list[int]) -> Case:
    features = [4, 6, 8, 8]
    return Case(
        lambda: _made("unet", name, 1, 4, features, nn.Conv3d, KERNELS, STRIDES, **depths, **UNET),
        (12, 24, 16),
    )


def _primus(name: str, **named: int) -> Case:
    return Case(lambda: _made("primus", name, 1, 24, (8, 8, 8), 3, **named, **PRIMUS), (24, 16, 16))


CASES: dict[str, Case] = {
    "PlainConvUNet": _unet("PlainConvUNet", n_conv_per_stage=[1, 2, 1, 1]),
    "ResidualEncoderUNet": _unet("ResidualEncoderUNet", n_blocks_per_stage=[1, 1, 2, 1]),
    "ResidualUNet": _unet("ResidualUNet", n_blocks_per_stage=[1, 1, 1, 1]),
    "Primus": _primus("Primus", num_register_tokens=2),
    "PrimusV2": _primus("PrimusV2"),
    "PrimusV3": _primus("PrimusV3"),
    "ResNetD": Case(
        lambda: _made(
            "resnet", "ResNetD", 3, 1, "18_cifar", input_dimension=3, squeeze_excitation=True
        ), (16, 12, 8),
    ),
    "VGG16_cifar": Case(
        lambda: _made("vgg", "VGG16_cifar", 3, 1, input_dimension=3), (16, 16, 16)
    ),
}  # fmt: skip
