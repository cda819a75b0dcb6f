"""Geometry: boxes, partitions and footprints, computed by the native core.

A `Box` is half open and in global indices. A `Partition` holds the split points of one dim, even
or not; a part may be empty. A `Footprint` says which inputs an interval of outputs reads (kernel,
stride, dilation, padding). `plan_exchange` intersects what every rank needs with what every rank
owns and so finds every message of an exchange.
"""

from __future__ import annotations

from pydist._loader import native

Box = native.Box
Partition = native.Partition
Footprint = native.Footprint
Plan = native.Plan
plan_exchange = native.plan_exchange
subtract = native.subtract

__all__ = ["Box", "Footprint", "Partition", "Plan", "plan_exchange", "subtract"]
