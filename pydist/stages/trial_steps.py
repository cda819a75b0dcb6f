"""Finds by trial whether an optimizer's step combines the gradients of several parameters."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim import LBFGS
from torch.optim.optimizer import Optimizer

from pydist.gradients.partitioned import StepsParts
from pydist.slices.steps import NeedsNorms
from pydist.stages.generators import one_at_a_time

_STEPS = 4


def combines_gradients(optimizer: Optimizer) -> bool | None:
    """Returns whether the step of a parameter depends on another parameter's gradient.

    Of torch's optimizers only LBFGS does, and pydist's do not. Another class steps two small
    parameters with the settings of the optimizer, twice: with two gradients of the second one.

    Returns:
        None if the class can't be made from parameters and its `defaults`, or needs a closure.
    """
    if type(optimizer).__module__.split(".")[:2] == ["torch", "optim"]:
        return isinstance(optimizer, LBFGS)
    if isinstance(optimizer, NeedsNorms | StepsParts) or getattr(optimizer, "elementwise", False):
        return False
    taken = [_stepped(optimizer, scale) for scale in (1.0, 16.0)]
    if taken[0] is None or taken[1] is None:
        return None
    return not torch.equal(taken[0], taken[1])


def _stepped(optimizer: Optimizer, scale: float) -> Tensor | None:
    """Returns a parameter after some steps beside one whose gradient has the given scale."""
    like = optimizer.param_groups[0]["params"][0]
    values = torch.linspace(0.25, 1, 16, dtype=like.dtype, device=like.device).view(4, 4)
    first, second = nn.Parameter(values.clone()), nn.Parameter(values.clone())
    with one_at_a_time(), torch.random.fork_rng([like.device] if like.is_cuda else []):
        torch.manual_seed(0)
        try:
            trial = type(optimizer)([first, second], **optimizer.defaults)
            for _ in range(_STEPS):
                first.grad, second.grad = values.clone(), scale * values
                trial.step()
        except Exception:  # of anybody's code
            return None
    return first.detach()
