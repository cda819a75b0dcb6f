"""Cost model of a layer whose input channels are cut: in which form its ranks exchange them."""

from __future__ import annotations

import math
from typing import Literal

from pydist.hardware import CPU
from pydist.layout import Layout, Split
from pydist.ops.coarsening import BYTE_S, ELEMENT_BYTES, EXCHANGE_S

ChannelForm = Literal["sum", "scatter", "gather"]
"""What the ranks of a layer with cut input channels exchange:

- "sum": all-reduce of partial sums. The result is whole; backward exchanges nothing.
- "scatter": reduce-scatter of partial sums. The result is cut; backward gathers its gradient.
- "gather": the input. The result is cut; backward adds up the parts of dL/dx (reduce-scatter).
"""

# Time per byte of a result, on one rank, for what follows a layer before the next one (a norm and
# an activation, forward and backward, about 8 accesses to memory). A cut result divides it.
# `benchmarks/python/channel_forms.py` measures the resulting choices.
BETWEEN_S = 8 / CPU.bandwidth


def channel_form(layout: Layout, outputs: tuple[int, ...]) -> ChannelForm:
    """Chooses the form with the least estimated time of a layer, with backward.

    The next layer counts as well, as one with as many outputs: for a whole result it adds up parts
    of dL/dx in backward (all-reduce), for a cut one it exchanges once in each direction. All forms
    compute the same products. With several sample groups the choice assumes one sample, as
    `coarsen_if_faster` does.

    Args:
        layout: of the input, whose dim 1 is cut.
        outputs: shape of the result; it can be cut along the same axes.
    """
    key = ("channel form", layout, outputs)
    return layout.mesh.session.plan(key, lambda: _choose(layout, outputs))


def _choose(layout: Layout, outputs: tuple[int, ...]) -> ChannelForm:
    split = layout.splits[1]
    assert split is not None
    of_input, of_result = (_bytes(layout, shape) for shape in (layout.shape, outputs))
    return cheapest_form(split.partition.parts, of_input, of_result)


def cheapest_form(parts: int, of_input: float, of_result: float) -> ChannelForm:
    """Returns the form with the least estimated time, as `channel_form` does.

    Args:
        parts: ranks that the channels are cut over.
        of_input: bytes of all channels of one rank's block of the input.
        of_result: those of the result.
    """
    moved = (parts - 1) / parts * BYTE_S
    both_ways = 2 * (EXCHANGE_S + of_result * moved)
    between = of_result * BETWEEN_S
    seconds: dict[ChannelForm, float] = {
        "sum": 2 * EXCHANGE_S + 4 * of_result * moved + between,
        "scatter": 2 * both_ways + between / parts,
        "gather": 2 * (EXCHANGE_S + of_input * moved) + both_ways + between / parts,
    }  # the first of equals: unlike "gather", "scatter" saves only a part of the input
    return min(seconds, key=seconds.__getitem__)


def _bytes(layout: Layout, shape: tuple[int, ...]) -> float:
    """Returns the size of all channels of one rank's block of a tensor."""
    n = 1 if layout.mesh.data_size > 1 else max(1, shape[0])
    cuts: list[Split] = [s for d, s in enumerate(layout.splits) if s is not None and d != 1]
    return ELEMENT_BYTES * n * math.prod(shape[1:]) / math.prod(s.partition.parts for s in cuts)
