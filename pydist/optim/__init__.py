"""Additions to torch's optimizers: LARS and LAMB, ZeRO-1 (partitioned steps), and schedules."""

from __future__ import annotations

from pydist.optim.layerwise import LAMB, LARS
from pydist.optim.partitioned import ShardedOptimizer, gather_gradients, sharded
from pydist.optim.schedules import SampleLR, schedule

__all__ = [
    "LAMB",
    "LARS",
    "SampleLR",
    "ShardedOptimizer",
    "gather_gradients",
    "schedule",
    "sharded",
]
