"""CosmoFlow equals the published network: counts, shapes, initial values, layer order."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from pydist.models.cosmoflow import WIDTHS, CosmoFlow


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("width", WIDTHS)
def test_paper_network_has_the_published_parameter_count_at_every_width(width):
    with torch.device("meta"):
        assert count(CosmoFlow(width)) == 9_437_636
        assert count(CosmoFlow(width, batch_norm=True)) == 9_437_636 + 2_016


@pytest.mark.parametrize(
    ("width", "parameters"), [(128, 8_907_556), (256, 15_985_956), (512, 23_064_356)]
)
def test_mlperf_network_has_its_parameter_count(width, parameters):
    with torch.device("meta"):
        assert count(CosmoFlow(width, variant="mlperf")) == parameters


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("variant", ["paper", "mlperf"])
def test_output_shape(width, variant):
    with torch.device("meta"):
        model = CosmoFlow(width, variant=variant)
        assert model(torch.empty(2, 4, width, width, width)).shape == (2, 4)


def test_feature_widths_at_128_are_those_of_the_paper():
    widths = []
    with torch.device("meta"):
        x = torch.empty(1, 4, 128, 128, 128)
        for name, layer in CosmoFlow(128).features.named_children():
            x = layer(x)
            if name.startswith(("conv", "pool")):
                widths.append((name, x.shape[1], x.shape[2]))
    assert widths == [
        ("conv1", 16, 128), ("pool1", 16, 64), ("conv2", 32, 64), ("pool2", 32, 32),
        ("conv3", 64, 32), ("pool3", 64, 16), ("conv4", 128, 8), ("pool4", 128, 4),
        ("conv5", 256, 4), ("pool5", 256, 2), ("conv6", 256, 2), ("conv7", 256, 2),
    ]  # fmt: skip


def test_convolution_flops_at_128_are_those_of_the_paper():
    """A sample takes 55.55 GFLOP: forward, backward to data and filters, two per multiply-add."""
    forward = 0
    with torch.device("meta"):
        x = torch.empty(1, 4, 128, 128, 128)
        for layer in CosmoFlow(128).features:
            x = layer(x)
            if isinstance(layer, nn.Conv3d):
                forward += 2 * layer.weight.numel() * math.prod(x.shape[2:])
    assert round(3 * forward / 1e9, 2) == 55.55


def test_order_is_convolution_norm_activation_pool():
    names = [name for name, _ in CosmoFlow(32, batch_norm=True).features.named_children()]
    assert names[:8] == ["conv1", "bn1", "act1", "pool1", "conv2", "bn2", "act2", "pool2"]


def test_initial_values():
    model = CosmoFlow(32)
    fc = [m for m in model.modules() if isinstance(m, nn.Linear)]
    convs = [m for m in model.modules() if isinstance(m, nn.Conv3d)]
    assert all((m.bias == 0.1).all() for m in fc)
    assert all(m.bias is None for m in convs)
    for conv in convs:
        bound = math.sqrt(6 / (27 * (conv.in_channels + conv.out_channels)))
        assert 0.9 * bound < conv.weight.abs().max() <= bound
    drops = [m.p for m in model.modules() if isinstance(m, nn.Dropout)]
    assert drops == [0.2, 0.2, 0.2]
    assert isinstance(next(iter(model.head)), nn.Dropout)


def test_mlperf_output_is_bounded_by_scaled_tanh():
    model = CosmoFlow(32, variant="mlperf").eval()
    with torch.no_grad():
        model.head.fc3.bias.fill_(1e6)
        out = model(torch.rand(1, 4, 32, 32, 32))
    torch.testing.assert_close(out, torch.full((1, 4), 1.2))


@pytest.mark.parametrize("width", [0, 16, 48, 100, 1024])
def test_other_widths_are_refused(width):
    with pytest.raises(ValueError, match=f"width {width}: use one of"):
        CosmoFlow(width)


def test_wrong_input_shape_is_refused_by_name():
    with pytest.raises(ValueError, match=r"\(4, 32, 32, 32\), got \(1, 4, 64, 64, 64\)"):
        CosmoFlow(32)(torch.zeros(1, 4, 64, 64, 64))


def test_unknown_variant_and_batch_norm_with_mlperf_are_refused():
    with pytest.raises(ValueError, match="no variant 'v3'"):
        CosmoFlow(32, variant="v3")
    with pytest.raises(ValueError, match="no batch norm"):
        CosmoFlow(32, variant="mlperf", batch_norm=True)
