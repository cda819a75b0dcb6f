"""Places the gradients of parameters in a row of a bucket."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from pydist.gradients.leaf import Leaf


def pieces_of(row: Tensor, leaves: Sequence[Leaf]) -> list[Tensor]:
    """Returns views of the parameters' places in a row that holds all of them, in this order."""
    places, start = [], 0
    for leaf in leaves:
        piece = row[start : start + leaf.numel]
        shape, stride = leaf.kind.shape, leaf.kind.stride
        places.append(piece.as_strided(shape, stride) if leaf.dense else piece.view(shape))
        start += leaf.numel
    return places
