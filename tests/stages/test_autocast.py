"""Tests of networks in stages under autocast, whose dtypes one stage alone knows."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pydist.errors import NotSupported
from pydist.stages import pipeline
from support.equivalence import randn
from support.networks.small import initialized
from support.staged import ONE, on_stages

X = randn(4, 1, 4, 4, 4, seed=1).float()


class Function(nn.Module):
    """Module of a function."""

    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def doubled(x: Tensor) -> Tensor:
    y = x.float()
    y.mul_(2)
    return x + y


def outputs(net: nn.Module, cuts: list[str]) -> tuple[Tensor, Tensor]:
    """Returns the output of one device, and that of stages."""
    net = initialized(net).float().eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = net(X)

    def rank(stages):
        made = pipeline(copy.deepcopy(net), stages, X[:1], cuts=cuts)
        with torch.autocast("cpu", torch.bfloat16):
            return made(X)

    found = on_stages([ONE] * (len(cuts) + 1), rank)[-1]
    return expected, getattr(found, "full_tensor", lambda: found)()


CONVERSIONS = {
    "a copy changes": ((lambda x: doubled(x + 1),), ["1"]),
    "an argument changes": ((lambda x: doubled(x.square().float()),), ["1"]),
    "to another stage": ((lambda x: x.float(), lambda x: x.square()), ["1", "2"]),
    "where autocast ends": (
        (torch.autocast("cpu", enabled=False)(lambda x: x.to(torch.float32)), torch.square),
        ["1", "2"],
    ),
}


@pytest.mark.parametrize(("functions", "cuts"), CONVERSIONS.values(), ids=CONVERSIONS)
def test_conversions_of_what_autocast_has_converted(functions, cuts):
    """Their results are no arguments, though float32 ones without autocast are."""
    layers = [nn.Conv3d(1, 2, 3, padding=1), *map(Function, functions)]
    expected, found = outputs(nn.Sequential(*layers), cuts)
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


def test_a_changed_conversion_of_another_stages_tensor_is_refused():
    """It may be that tensor: other stages do not know."""
    with pytest.raises(NotSupported, match="shares memory with: begin the stage at another call"):
        outputs(nn.Sequential(nn.Conv3d(1, 2, 3, padding=1), Function(doubled)), ["1"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_inputs_of_another_dtype_than_weights(dtype):
    """Autocast converts either."""
    layers = nn.Conv3d(1, 4, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool3d(1), nn.Flatten()
    net = initialized(nn.Sequential(*layers, nn.Linear(4, 3))).to(
        torch.float32 if dtype == torch.bfloat16 else torch.bfloat16
    )
    x, target = X.to(dtype), randn(4, 3, seed=2).float()

    def loss(y, target):
        return F.mse_loss(y.float(), target)

    with torch.autocast("cpu", torch.bfloat16):
        expected = float(loss(net(x), target).detach())

    def rank(stages):
        own = copy.deepcopy(net)
        with torch.autocast("cpu", torch.bfloat16):
            made = pipeline(own, stages, x[:1].to(net[0].weight.dtype), cuts=["1"])
            return float(made.step(x, target, loss))

    assert on_stages([ONE] * 2, rank) == pytest.approx([expected] * 2, rel=2e-2)
