"""Prepares optimizer state as torch's fused steps need it, which they do not check."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from pydist.gradients.rows import in_order_of


def start_momentum(optimizer: SGD) -> None:
    """Gives a fused SGD a momentum of zeros, from which its first step is that of none.

    torch's fused step takes unset memory for it and, where `GradScaler` finds an overflow, as in
    the first steps of fp16, leaves that as it is: the next step would start from it.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def lie_as_parameters(optimizer: Optimizer) -> None:
    """Brings the state into the memory order of the parameters, after it was loaded.

    A fused step goes through both as they lie. Where the orders differ it refuses on a device, and
    on a CPU takes one element's state for another's.
    """
    for parameter, values in optimizer.state.items():
        for name, value in values.items():
            if not isinstance(value, Tensor) or value.shape != parameter.shape:
                continue
            if not in_order_of(value, parameter):
                values[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
