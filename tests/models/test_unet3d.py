"""3D U-Net equals the published network: counts, channels, operations."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pydist.models import UNet3d


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def test_the_paper_s_network_has_its_parameter_count():
    with torch.device("meta"):
        assert count(UNet3d()) == 19_070_560


def test_weights_by_stage_are_those_of_the_paper():
    with torch.device("meta"):
        model = UNet3d()
    convolutions = [m for m in model.modules() if isinstance(m, nn.Conv3d | nn.ConvTranspose3d)]
    assert all(m.bias is None for m in convolutions)
    by_stage = [[c.weight.numel() for c in stage if hasattr(c, "kernel_size")]
                for stage in (*model.down, model.bottom, *model.up)]  # fmt: skip
    assert by_stage == [
        [864, 55_296], [110_592, 221_184], [442_368, 884_736], [1_769_472, 3_538_944],
        [5_308_416, 1_769_472], [1_327_104, 442_368], [331_776, 110_592],
    ]  # fmt: skip
    assert [m.weight.numel() for m in model.unpool] == [2_097_152, 524_288, 131_072]
    assert model.last.weight.numel() == 192
    assert count(model) - sum(c.weight.numel() for c in convolutions) == 2 * 2_336  # batch norm


def test_forward_flops_at_128_are_those_of_the_paper():
    """A sample takes 3.91 TFLOP, two per multiply-add."""
    flops = 0

    def add(module: nn.Module, args: tuple[torch.Tensor], out: torch.Tensor) -> None:
        nonlocal flops
        if isinstance(module, nn.Conv3d):
            flops += 2 * out[0, 0].numel() * module.weight.numel()
        elif isinstance(module, nn.ConvTranspose3d):
            flops += 2 * args[0][0, 0].numel() * module.weight.numel()

    with torch.device("meta"):
        model = UNet3d()
        for module in model.modules():
            module.register_forward_hook(add)
        assert model(torch.empty(1, 1, 128, 128, 128)).shape == (1, 3, 128, 128, 128)
    assert flops == pytest.approx(3.91e12, rel=2e-3)
