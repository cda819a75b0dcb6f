"""Learning-rate schedules by the number of samples seen, so that they suit any batch size."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from pydist.errors import UsageError

Decay = Literal["linear", "polynomial", "cosine", "step", "none"]


class SampleLR(LRScheduler):
    """A schedule whose factor of the learning rates is a function of the samples seen.

    Args:
        optimizer: its groups' `lr` are the rates that the factor multiplies.
        factor: of the number of samples seen.
    """

    def __init__(self, optimizer: Optimizer, factor: Callable[[int], float]) -> None:
        self._factor, self.samples = factor, 0
        super().__init__(optimizer)

    def get_lr(self) -> list[float | Tensor]:
        """Returns the learning rate of each group."""
        return [rate * self._factor(self.samples) for rate in self.base_lrs]

    def step(self, samples: int = 1) -> None:  # type: ignore[override]  # torch counts steps
        """Advances the schedule after a step of the optimizer.

        Args:
            samples: of the step's global batch.
        """
        if self.last_epoch >= 0:  # torch's constructor calls this once before
            self.samples += samples
            # A first step that `GradScaler` skips after an overflow is not a mistake to warn of.
            self.optimizer.__dict__["_opt_called"] = True
        super().step()

    def state_dict(self) -> dict[str, Any]:
        """Returns the state without the factor; see `torch.optim.lr_scheduler.LRScheduler`."""
        state: dict[str, Any] = super().state_dict()
        return {name: value for name, value in state.items() if name != "_factor"}


def schedule(
    optimizer: Optimizer,
    samples: float,
    end_lr: float = 0.0,
    decay: Decay = "linear",
    *,
    warmup: float = 0.0,
    warmup_start: float = 0.01,
    power: float = 2.0,
    milestones: Sequence[tuple[float, float]] = (),
    batch: Callable[[int], float] | None = None,
) -> SampleLR:
    """Returns a schedule with linear warm-up, then a decay, then a constant rate.

    Args:
        optimizer: its groups' `lr` is the peak, reached when the warm-up ends.
        samples: from the peak to `end_lr`, > 0.
        end_lr: learning rate of the first group after the decay, in the optimizer's unit; others
            fall by the same factor.
        decay: the form. "linear", as CosmoFlow's; "polynomial", (1 - t)^power as of LARS; "cosine";
            "step", by `milestones`; "none".
        warmup: samples of the warm-up; 0 starts at the peak.
        warmup_start: factor of the peak at the first sample.
        power: of the polynomial.
        milestones: of "step": samples since the beginning, warm-up included, and the factor of the
            peak from then on.
        batch: for a batch that changes: a further factor of all rates, of the step that begins
            after a number of samples, such as its batch over the first one, or the root of that.

    Returns:
        A scheduler; call `step(samples)` after every step of the optimizer.

    Raises:
        UsageError: the peak is below `end_lr`, there are no samples to decay over, the form does
            not exist, or "step" has no or unordered milestones.
    """
    peak = float(optimizer.param_groups[0]["lr"])  # a tensor would follow the schedule
    if decay not in get_args(Decay):
        raise UsageError(f"decay={decay!r}; possible are {', '.join(get_args(Decay))}")
    is_gradual = decay in ("linear", "polynomial", "cosine")
    if is_gradual and end_lr > peak:
        raise UsageError(f"end_lr={end_lr:g} is above the learning rate {peak:g} that decays to it")
    if is_gradual and not samples > 0:
        raise UsageError(f"decay over {samples:g} samples: more than 0 are needed")
    places = [place for place, _ in milestones]
    if warmup < 0 or not peak > 0 or any(min(each) < 0 for each in milestones):
        raise UsageError(
            f"lr={peak:g}, warmup={warmup:g}, milestones={list(milestones)}: expected lr > 0, and "
            "no negative numbers"
        )
    if (decay == "step") != bool(places) or places != sorted(places):
        raise UsageError(
            f"decay={decay!r} with milestones={list(milestones)}: decay in steps has ascending "
            "milestones, and other forms have none"
        )

    def factor(seen: int) -> float:
        return of_schedule(seen) * (1.0 if batch is None else batch(seen))

    def of_schedule(seen: int) -> float:
        if seen < warmup:
            return warmup_start + (1 - warmup_start) * seen / warmup
        if decay == "none":
            return 1.0
        if decay == "step":
            # A product of epochs and samples may be off by rounding.
            return next((f for place, f in reversed(milestones) if seen > place - 0.5), 1.0)
        left = max(0.0, 1 - (seen - warmup) / samples)
        if decay == "cosine":
            left = (1 - math.cos(math.pi * left)) / 2
        elif decay == "polynomial":
            left **= power
        return end_lr / peak + (1 - end_lr / peak) * left

    return SampleLR(optimizer, factor)
