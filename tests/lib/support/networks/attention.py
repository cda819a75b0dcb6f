"""Creates networks of MONAI whose tokens attend to each other, in small sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.equivalence import randn
from support.networks.cases import Case, Encoded
from support.networks.vision import declare_missing_operators

declare_missing_operators()  # before MONAI is imported
nets = pytest.importorskip("monai.networks.nets")

STEP = torch.tensor([3])
DIFFUSION: dict[str, Any] = {
    "spatial_dims": 3, "in_channels": 1, "num_res_blocks": (1, 1), "channels": (4, 8),
    "attention_levels": (False, True), "norm_num_groups": 2, "num_head_channels": 4,
}  # fmt: skip
TOKENS: dict[str, Any] = {"hidden_size": 12, "mlp_dim": 16, "num_heads": 2}


class Controlled(nn.Module):
    """Diffusion network that adds the residuals of a ControlNet."""

    def __init__(self) -> None:
        super().__init__()
        self.control = nets.ControlNet(
            **DIFFUSION, conditioning_embedding_in_channels=1,
            conditioning_embedding_num_channels=(2,),
        )  # fmt: skip
        self.network = nets.DiffusionModelUNet(**DIFFUSION, out_channels=1)

    def forward(self, x: Tensor) -> Any:
        down, middle = self.control(x, STEP, x * 2)
        return self.network(
            x, STEP, down_block_additional_residuals=down, mid_block_additional_residual=middle
        )


def _diffusion(**options: Any) -> nn.Module:
    network = nets.DiffusionModelUNet(**DIFFUSION, out_channels=1, **options)
    return Encoded(network, lambda own, x: own(x, STEP))


def _conditioned() -> nn.Module:
    network = nets.DiffusionModelUNet(
        **DIFFUSION, out_channels=1, with_conditioning=True, cross_attention_dim=3
    )
    condition = randn(1, 2, 3)
    return Encoded(network, lambda own, x: own(x, STEP, condition))


def _autoencoder() -> nn.Module:
    """Returns one that decodes the sum of mean and deviation, without random numbers."""
    network = nets.AutoencoderKL(
        3, 1, 1, num_res_blocks=(1, 1), channels=(2, 4), latent_channels=2,
        attention_levels=(False, True), norm_num_groups=2,
    )  # fmt: skip
    return Encoded(network, lambda own, x: own.decode(sum(own.encode(x))))


def _spade() -> nn.Module:
    network = nets.SPADEDiffusionModelUNet(
        **DIFFUSION, out_channels=1, label_nc=2, spade_intermediate_channels=2
    )
    labels = randn(1, 2, 8, 8, 8)
    return Encoded(network, lambda own, x: own(x, STEP, labels))


def _first(network: nn.Module) -> nn.Module:
    """Returns a network with the first of its results alone."""
    return Encoded(network, lambda own, x: own(x)[0])


CASES: dict[str, Case] = {
    "DiffusionModelUNet": Case(_diffusion, (8, 8, 8)),
    "DiffusionModelUNet, fused": Case(lambda: _diffusion(use_flash_attention=True), (8, 8, 8)),
    "DiffusionModelUNet with a condition": Case(_conditioned, (8, 8, 8)),
    "AutoencoderKL": Case(_autoencoder, (8, 8, 8)),
    "ControlNet": Case(Controlled, (8, 8, 8)),
    "ViT": Case(
        lambda: _first(nets.ViT(1, (16, 16, 8), 4, num_layers=2, classification=True, **TOKENS)),
        (16, 16, 8),
    ),
    "ViTAutoEnc": Case(
        lambda: _first(nets.ViTAutoEnc(1, (16, 16, 8), 4, deconv_chns=2, num_layers=2, **TOKENS)),
        (16, 16, 8),
    ),
    "UNETR": Case(lambda: nets.UNETR(1, 2, (32, 32, 16), feature_size=2, **TOKENS), (32, 32, 16)),
    "SPADEDiffusionModelUNet": Case(_spade, (8, 8, 8)),
    "SwinUNETR": Case(
        lambda: nets.SwinUNETR(
            1, 2, depths=(1, 1, 1, 1), num_heads=(1, 1, 1, 1), feature_size=12, window_size=2
        ), (64, 32, 32),
    ),
}  # fmt: skip
