"""Keeps small constant tensors of plans, with a cached copy per device."""

from __future__ import annotations

import torch
from torch import Tensor


class Constant:
    """Tensor of a plan, with a cached copy on each device that has requested it.

    Copying to a device blocks the host until the device is done, and no CUDA graph can capture it.
    So the first step makes the copy, and later steps reuse it.

    Args:
        values: in host memory.
    """

    def __init__(self, values: Tensor) -> None:
        self._values = values
        self._copies: dict[torch.device, Tensor] = {}

    def on(self, device: torch.device) -> Tensor:
        """Returns the values on a device; callers must not write to them."""
        if device not in self._copies:
            self._copies[device] = self._values.to(device)
        return self._copies[device]
