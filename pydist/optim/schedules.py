"""Learning-rate schedules, composed of those in `torch.optim.lr_scheduler`."""

from __future__ import annotations

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LinearLR, LRScheduler, SequentialLR

from pydist.errors import UsageError


def linear_decay(
    optimizer: Optimizer,
    decay_steps: int,
    end_lr: float,
    warmup_steps: int = 0,
    warmup_start: float = 0.01,
) -> LRScheduler:
    """Returns a schedule with linear warm-up, linear decay, then a constant rate (CosmoFlow's).

    Args:
        optimizer: its groups' `lr` is the peak, reached when the warm-up ends.
        decay_steps: steps from the peak to `end_lr`, >= 1.
        end_lr: learning rate after decay, in the optimizer's unit (not a factor).
        warmup_steps: steps of the warm-up; 0 starts at the peak.
        warmup_start: factor of the peak at the first step of the warm-up.

    Returns:
        A scheduler to be stepped once after every optimizer step.

    Raises:
        UsageError: the peak is below `end_lr`, or there is no decay step.
    """
    peak = optimizer.param_groups[0]["lr"]
    if end_lr > peak:
        raise UsageError(f"end_lr={end_lr:g} is above the learning rate {peak:g} that decays to it")
    if decay_steps < 1:
        raise UsageError(f"decay over {decay_steps} steps: at least 1 is needed")

    def decay() -> LRScheduler:
        return LinearLR(optimizer, 1.0, end_lr / peak, total_iters=decay_steps)

    if not warmup_steps:
        return decay()
    warmup = LinearLR(optimizer, warmup_start, 1.0, total_iters=warmup_steps)
    return SequentialLR(optimizer, [warmup, decay()], milestones=[warmup_steps])
