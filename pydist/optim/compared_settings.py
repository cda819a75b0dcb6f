"""Compares an optimizer's settings between ranks, each of which steps a part of the parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from pydist.exchange.consistency import consistency_of
from pydist.exchange.contents import Operand
from pydist.mesh import Mesh

_OF_IMPLEMENTATION = "foreach", "fused", "capturable", "differentiable"
"""Settings that do not change results; they may differ between kinds of devices."""


class ComparedSettings:
    """Settings of an optimizer that must be equal on all ranks.

    Each rank steps its parts with its own settings, and all ranks get the same parameters. So no
    comparison of parameters would show that the settings differ.

    Args:
        optimizer: steps this rank's parts.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer, kind = optimizer, type(optimizer).__name__
        names = [name for name in optimizer.defaults if name not in _OF_IMPLEMENTATION]
        self._compared = {name: Operand(f"setting {name!r} of {kind}") for name in names}

    def note(self, mesh: Mesh) -> None:
        """Lets the end of the next backward compare the settings of a step."""
        settings = ((each, self._values_of(name)) for name, each in self._compared.items())
        consistency_of(mesh).sum_settings(mesh, settings)

    def _values_of(self, name: str) -> Tensor:
        """Returns the numbers that a setting has in all groups, except those on a device."""
        given = (group.get(name) for group in self._optimizer.param_groups)
        flat = (x for each in given for x in (each if isinstance(each, tuple) else (each,)))
        numbers = [float(x) for x in flat if _is_on_host(x)]
        # Processors may round differently; 0 is added as -0 equals 0.
        return torch.tensor(numbers, dtype=torch.float64, device="cpu").float() + 0


def _is_on_host(setting: Any) -> bool:
    if isinstance(setting, Tensor):
        return setting.dim() == 0 and setting.device.type == "cpu" and not setting.requires_grad
    return isinstance(setting, int | float)
