"""Small tensors that plans make once, on whichever device they are read."""

from __future__ import annotations

import torch
from torch import Tensor


class Constant:
    """A tensor of a plan, and its copy on each device that has asked for it.

    Such a copy holds the host until the device is done, and no graph can capture it: so it is made
    once, by the first step.

    Args:
        values: in host memory.
    """

    def __init__(self, values: Tensor) -> None:
        self._values = values
        self._copies: dict[torch.device, Tensor] = {}

    def on(self, device: torch.device) -> Tensor:
        """The values there; not to be written to."""
        if device not in self._copies:
            self._copies[device] = self._values.to(device)
        return self._copies[device]
