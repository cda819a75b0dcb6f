"""Additions to torch's optimizers: LARS and LAMB, ZeRO-1 (partitioned steps), and schedules."""

from __future__ import annotations

from pydist.optim.layerwise import LAMB, LARS
from pydist.optim.partitioned import ShardedOptimizer, gather_gradients, sharded
from pydist.optim.schedules import linear_decay

__all__ = ["LAMB", "LARS", "ShardedOptimizer", "gather_gradients", "linear_decay", "sharded"]
