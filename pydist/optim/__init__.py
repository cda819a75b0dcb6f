"""Extends torch's optimizers: LARS and LAMB, ZeRO-1 (partitioned steps), and schedules.

It also manages the state of compressed gradients (`pydist.gradients`).
"""

from __future__ import annotations

from pydist.optim.compressed import (
    average_parameters,
    gradient_state,
    load_gradient_state,
    set_loss_scale,
)
from pydist.optim.layerwise import LAMB, LARS, Trust, trust_ratios
from pydist.optim.noise_scale import NoiseScale
from pydist.optim.partitioned import ShardedOptimizer, gather_gradients, sharded
from pydist.optim.schedules import SampleLR, schedule

__all__ = [
    "LAMB",
    "LARS",
    "NoiseScale",
    "SampleLR",
    "ShardedOptimizer",
    "Trust",
    "average_parameters",
    "gather_gradients",
    "gradient_state",
    "load_gradient_state",
    "schedule",
    "set_loss_scale",
    "sharded",
    "trust_ratios",
]
