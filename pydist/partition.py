"""Geometry: boxes, partitions and footprints, computed by the native core.

A `Box` is half open and in global indices. A `Partition` holds the split points of one dim, even
or not; a part may be empty. A `Footprint` computes which inputs an interval of outputs reads
(kernel, stride, dilation, padding). `plan_exchange` intersects the boxes that every rank needs with
the boxes that every rank owns, and so finds every message of an exchange.
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
