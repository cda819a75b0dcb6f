"""Networks of MONAI whose tokens attend to each other, with small sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from support.equivalence import Task, check_network, randn, whole_answer
from support.networks.small import initialized

nets = pytest.importorskip("monai.networks.nets")

STEP = torch.tensor([3])
DIFFUSION: dict[str, Any] = {
    "spatial_dims": 3, "in_channels": 1, "num_res_blocks": (1, 1), "channels": (4, 8),
    "attention_levels": (False, True), "norm_num_groups": 2, "num_head_channels": 4,
}  # fmt: skip
TOKENS: dict[str, Any] = {"hidden_size": 12, "mlp_dim": 16, "num_heads": 2}


class First(nn.Module):
    """Wrapper that passes a network more arguments, and returns the first of its results."""

    def __init__(self, network: nn.Module, *arguments: Tensor) -> None:
        super().__init__()
        self.network, self.arguments = network, arguments

    def forward(self, x: Tensor) -> Any:
        y = self.network(x, *self.arguments)
        return y[0] if isinstance(y, tuple) else y


class Autoencoder(nn.Module):
    """Autoencoder that decodes the sum of mean and deviation, without random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nets.AutoencoderKL(
            3, 1, 1, num_res_blocks=(1, 1), channels=(2, 4), latent_channels=2,
            attention_levels=(False, True), norm_num_groups=2,
        )  # fmt: skip

    def forward(self, x: Tensor) -> Any:
        mean, deviation = self.network.encode(x)
        return self.network.decode(mean + deviation)


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


def spade() -> nn.Module:
    network = nets.SPADEDiffusionModelUNet(
        **DIFFUSION, out_channels=1, label_nc=2, spade_intermediate_channels=2
    )
    return First(network, STEP, randn(1, 2, 8, 8, 8))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "DiffusionModelUNet": (
        lambda: First(nets.DiffusionModelUNet(**DIFFUSION, out_channels=1), STEP), (8, 8, 8),
    ),
    "DiffusionModelUNet, fused": (
        lambda: First(
            nets.DiffusionModelUNet(**DIFFUSION, out_channels=1, use_flash_attention=True), STEP
        ), (8, 8, 8),
    ),
    "DiffusionModelUNet with a condition": (
        lambda: First(
            nets.DiffusionModelUNet(
                **DIFFUSION, out_channels=1, with_conditioning=True, cross_attention_dim=3
            ), STEP, randn(1, 2, 3),
        ), (8, 8, 8),
    ),
    "AutoencoderKL": (Autoencoder, (8, 8, 8)),
    "ControlNet": (Controlled, (8, 8, 8)),
    "ViT": (
        lambda: First(nets.ViT(1, (16, 16, 8), 4, num_layers=2, classification=True, **TOKENS)),
        (16, 16, 8),
    ),
    "ViTAutoEnc": (
        lambda: First(
            nets.ViTAutoEnc(1, (16, 16, 8), 4, deconv_chns=2, num_layers=2, **TOKENS)
        ), (16, 16, 8),
    ),
    "UNETR": (lambda: nets.UNETR(1, 2, (32, 32, 16), feature_size=2, **TOKENS), (32, 32, 16)),
}  # fmt: skip
LONG: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "SPADEDiffusionModelUNet": (spade, (8, 8, 8)),
    "SwinUNETR": (
        lambda: nets.SwinUNETR(
            1, 2, depths=(1, 1, 1, 1), num_heads=(1, 1, 1, 1), feature_size=12, window_size=2
        ), (64, 32, 32),
    ),
}  # fmt: skip


def check_attention_network(make: Callable[[], nn.Module], extents: tuple[int, ...]) -> None:
    """Compares two splits of a step with the step on one device."""
    model = initialized(make())
    x = randn(1, 1, *extents)
    with torch.no_grad():
        target = randn(*model(x).shape, seed=1)
    task = Task(model, x, target, F.mse_loss)
    answer = whole_answer(task)
    for spatial in ((2, 1, 1), (1, 2, 2)):
        check_network(task, spatial, answer=answer)
