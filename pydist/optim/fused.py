"""Preparation of optimizer state for torch's fused steps, which do not check it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from pydist.exchange.own_slice import is_sharded_weight
from pydist.gradients.rows import in_order_of


def start_momentum(optimizer: SGD) -> None:
    """Sets the momentum of a fused SGD to zeros, with which the first step is as without one.

    torch's fused step allocates uninitialized memory and, if `GradScaler` finds an overflow, as in
    the first steps of fp16, leaves it unset: the next step would start from it.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def match_parameter_formats(optimizer: Optimizer) -> None:
    """Converts loaded state to the memory order of the parameters.

    A fused step reads both in memory order. If the orders differ, it raises on a device, and on a
    CPU uses the state of other elements.
    """
    for parameter, values in optimizer.state.items():
        # State under another key belongs to all parameters; slices have the order of the weight's.
        if not isinstance(parameter, Tensor) or is_sharded_weight(parameter):
            continue
        for name, value in values.items():
            if not isinstance(value, Tensor) or value.shape != parameter.shape:
                continue
            if not in_order_of(value, parameter):
                values[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
