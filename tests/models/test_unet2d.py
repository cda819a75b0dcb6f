"""2D U-Net: counts of the published network, norms, extents, initial values, a standalone file."""

from __future__ import annotations

import math
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import pydist.models.unet2d
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


@pytest.mark.parametrize("levels", [1, 2, 4])
def test_any_extents_that_can_be_halved(levels):
    with torch.device("meta"):
        model = UNet2d(in_channels=2, classes=5, features=4, levels=levels)
        shape = (3 << levels, 2 << levels)
        assert model(torch.empty(2, 2, *shape)).shape == (2, 5, *shape)
        with pytest.raises(ValueError, match=f"multiples of {1 << levels}, got"):
            model(torch.empty(1, 2, 3 << levels, (1 << levels) + 1))
        with pytest.raises(ValueError, match=r"accepts \[N, 2, H, W\], got \(2, 1, 8, 8\)"):
            model(torch.empty(2, 1, 8, 8))


@pytest.mark.parametrize("wrong", [{"features": 0}, {"classes": 0}, {"levels": 0}])
def test_numbers_that_make_no_network(wrong):
    with pytest.raises(ValueError, match="each is 1 or more"):
        UNet2d(**wrong)


def test_weights_start_he_normal():
    torch.manual_seed(0)
    for module in UNet2d(features=16).modules():
        if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
            expected = math.sqrt(2 / module.weight[0].numel())
            spread = 4 / math.sqrt(2 * module.weight.numel())
            assert float(module.weight.detach().std()) == pytest.approx(expected, rel=spread)
            assert module.bias is None or not module.bias.any()


def test_the_file_needs_torch_alone(tmp_path):
    source = Path(pydist.models.unet2d.__file__).read_text()
    (tmp_path / "unet.py").write_text(source)
    program = (
        "import sys, torch, unet\n"
        "unet.UNet2d(features=2, levels=1)(torch.zeros(1, 1, 4, 4))\n"
        "assert not any(name.startswith('pydist') for name in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True, timeout=60)
