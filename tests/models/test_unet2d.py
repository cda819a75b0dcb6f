"""2D U-Net: counts of the published network, norms."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from pydist.models import UNet2d


def weights(modules: nn.Module) -> list[int]:
    kinds = nn.Conv2d | nn.ConvTranspose2d
    return [m.weight.numel() for m in modules.modules() if isinstance(m, kinds)]


def test_weights_by_level_are_those_of_the_paper():
    """The paper's figure 1: 64 to 1024 channels, halved by each transposed convolution."""
    with torch.device("meta"):
        model = UNet2d()
    channels = (64, 128, 256, 512, 1024)
    down = [weights(level) for level in (*model.down, model.bottom)]
    assert down == [
        [9 * a * b, 9 * b * b] for a, b in zip((1, *channels[:-1]), channels, strict=True)
    ]
    assert [weights(level) for level in model.up] == [
        [9 * 2 * c * c, 9 * c * c] for c in channels[-2::-1]
    ]
    assert weights(model.unpool) == [4 * 2 * c * c for c in channels[-2::-1]]
    assert weights(model.last) == [2 * 64]


def test_a_convolution_without_norm_has_a_bias():
    with torch.device("meta"):
        plain, batch, group = (
            UNet2d(3, 1, 16, 2, norm) for norm in (None, nn.BatchNorm2d, partial(nn.GroupNorm, 4))
        )
    count = {m: sum(p.numel() for p in m.parameters()) for m in (plain, batch, group)}
    filters = 2 * (16 + 32 + 64 + 32 + 16)
    assert count[batch] == count[group] == count[plain] + filters  # a scale more than a bias
    kinds = [sum(isinstance(m, nn.GroupNorm) for m in net.modules()) for net in (plain, group)]
    assert kinds == [0, 10]
