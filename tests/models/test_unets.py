"""What 2D and 3D U-Nets have in common: extents, initial values, a standalone file."""

from __future__ import annotations

import inspect
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from pydist.models import UNet2d, UNet3d


@pytest.mark.parametrize("levels", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", [UNet2d, UNet3d])
def test_any_extents_that_can_be_halved(kind, levels):
    more, axes = ((), "H, W") if kind is UNet2d else ((1 << levels,), "D, H, W")
    with torch.device("meta"):
        model = kind(in_channels=2, classes=5, features=4, levels=levels)
        shape = (3 << levels, *more, 2 << levels)
        assert model(torch.empty(2, 2, *shape)).shape == (2, 5, *shape)
        with pytest.raises(ValueError, match=f"multiples of {1 << levels}, got"):
            model(torch.empty(1, 2, 3 << levels, *more, (1 << levels) + 1))
        with pytest.raises(ValueError, match=rf"accepts \[N, 2, {axes}\], got \(1, 3, 8, 8"):
            model(torch.empty(1, 3, *[8] * len(shape)))


@pytest.mark.parametrize(
    ("kind", "wrong", "message"),
    [
        (UNet2d, {"features": 0}, "each is 1 or more"),
        (UNet2d, {"classes": 0}, "each is 1 or more"),
        (UNet2d, {"levels": 0}, "each is 1 or more"),
        (UNet3d, {"features": 3}, "features is even"),
        (UNet3d, {"classes": 0}, "features is even"),
        (UNet3d, {"levels": 0}, "features is even"),
    ],
)
def test_numbers_that_make_no_network(kind, wrong, message):
    with pytest.raises(ValueError, match=message):
        kind(**wrong)


@pytest.mark.parametrize("kind", [UNet2d, UNet3d])
def test_weights_start_he_normal(kind):
    torch.manual_seed(0)
    for module in kind(features=16).modules():
        if isinstance(module, nn.modules.conv._ConvNd):
            expected = math.sqrt(2 / module.weight[0].numel())
            spread = 4 / math.sqrt(2 * module.weight.numel())
            assert float(module.weight.detach().std()) == pytest.approx(expected, rel=spread)
            assert module.bias is None or not module.bias.any()
        if isinstance(module, nn.BatchNorm3d):
            assert (module.weight == 1).all()
            assert (module.bias == 0).all()


@pytest.mark.parametrize(("kind", "shape"), [(UNet2d, (4, 4)), (UNet3d, (2, 2, 4))])
def test_the_file_needs_torch_alone(kind, shape, tmp_path):
    (tmp_path / "unet.py").write_text(Path(inspect.getfile(kind)).read_text())
    program = (
        "import sys, torch, unet\n"
        f"unet.{kind.__name__}(features=2, levels=1)(torch.zeros(1, 1, *{shape}))\n"
        "assert not any(name.startswith('pydist') for name in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True, timeout=60)
