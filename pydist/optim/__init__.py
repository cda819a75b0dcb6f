"""Additions to torch's optimizers: the partitioned optimizer (ZeRO-1), and schedules."""

from __future__ import annotations

from pydist.optim.partitioned import ShardedOptimizer, gather_gradients, sharded
from pydist.optim.schedules import linear_decay

__all__ = ["ShardedOptimizer", "gather_gradients", "linear_decay", "sharded"]
