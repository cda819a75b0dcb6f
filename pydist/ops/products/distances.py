"""Computes distances between all pairs of points, as for nearest neighbors."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from pydist.ops.dtypes import result_dtype
from pydist.ops.products.contraction import contract
from pydist.tensor import implements

_CHOOSE = "use_mm_for_euclid_dist_if_necessary"
_MANY = 25
"""Points above which torch computes distances from a matrix product, with other rounding."""


@implements(torch.cdist)
def cdist(x1: Tensor, x2: Tensor, p: float = 2.0, compute_mode: str = _CHOOSE) -> Any:
    """Computes the p-norm of the difference of each pair of rows.

    Each rank computes the distances of its points of one operand to all points of the other. The
    coordinates of a point are gathered.
    """
    if compute_mode == _CHOOSE:  # by the global numbers of points
        few = x1.shape[-2] <= _MANY and x2.shape[-2] <= _MANY
        compute_mode = f"{'donot_' if few else ''}use_mm_for_euclid_dist"
    batch = [[f".{i}" for i in range(x.dim() - 2, 0, -1)] for x in (x1, x2)]
    labels = [[*batch[0], "p", "m"], [*batch[1], "r", "m"]]
    out = [*max(batch, key=len), "p", "r"]
    local = partial(_distances, p=p, compute_mode=compute_mode)
    return contract(torch.cdist, [x1, x2], labels, out, local, whole={"m"})


def _distances(x1: Tensor, x2: Tensor, p: float, compute_mode: str) -> Tensor:
    if x1.numel() and x2.numel():
        return torch.cdist(x1, x2, p, compute_mode)
    # torch's distances of no points have no second derivative, for which other ranks would wait.
    # Autocast has another rule for products than for distances.
    dtype = result_dtype(torch.cdist, ((1, 1), x1), ((1, 1), x2))
    return (x1 @ x2.mT).square().to(dtype)
