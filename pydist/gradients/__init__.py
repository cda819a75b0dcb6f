"""Reduces gradients to means over all ranks, in full or partitioned (ZeRO-1).

The classes here describe how the ranks average gradients, for `parallelize(..., gradients=)`:

    pydist.parallelize(model, mesh, gradients="bf16")
    pydist.parallelize(model, mesh, gradients=pydist.gradients.PowerSGD(rank=4))

Compressed forms average gradients as they are within a sample group, and compress what is sent
between groups; with one group they send nothing else than the dense form.
"""

from __future__ import annotations

from pydist.gradients.forms.settings import (
    DGC,
    Dense,
    Hierarchical,
    Narrow,
    PostLocal,
    PowerSGD,
    Torus,
)

__all__ = ["DGC", "Dense", "Hierarchical", "Narrow", "PostLocal", "PowerSGD", "Torus"]
