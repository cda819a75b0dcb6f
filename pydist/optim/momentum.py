"""Momentum that does not depend on what memory held before."""

from __future__ import annotations

import torch
from torch.optim import SGD


def start_momentum(optimizer: SGD) -> None:
    """Gives a fused SGD a momentum of zeros, from which its first step is that of none.

    torch's fused step takes unset memory for it and, where `GradScaler` finds an overflow, as in
    the first steps of fp16, leaves that as it is: the next step would start from it.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
