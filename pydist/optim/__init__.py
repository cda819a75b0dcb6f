"""What stands beside the optimizers of torch, which are used as they are."""

from __future__ import annotations

from pydist.optim.schedules import linear_decay

__all__ = ["linear_decay"]
