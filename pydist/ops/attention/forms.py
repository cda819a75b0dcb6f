"""Estimates the cost of attention over split keys: in which form the ranks exchange them."""

from __future__ import annotations

from typing import Literal, NamedTuple

from pydist.hardware import CPU
from pydist.ops.coarsening import BYTE_S, ELEMENT_BYTES, EXCHANGE_S, FLOP_S

AttentionForm = Literal["ring", "gather", "sum"]
"""What the ranks exchange where keys and values are split:

- "ring": blocks of keys and values, one after another, during the computation. No rank holds all.
- "gather": all keys and values, once; backward adds up the parts of their gradients.
- "sum": maxima and sums of the softmax, and partial results. Keys and values stay where they are.
"""

# Time per byte of an access to memory on one rank, as of a merged result.
MEMORY_S = 1 / CPU.bandwidth
# Exchanges of the written-out form, forward and backward, for the softmax and the product.
SUMS = 7


class Sizes(NamedTuple):
    """Extents that determine the cost of attention, the same on all ranks.

    Attributes:
        parts: ranks among which the keys are split.
        batch: samples times heads on a rank.
        queries: of all ranks.
        keys: of all ranks.
        channels: of a key and a value together.
        is_split: whether the queries are split over the same ranks as the keys.
    """

    parts: int
    batch: int
    queries: int
    keys: int
    channels: int
    is_split: bool


def attention_form(sizes: Sizes) -> AttentionForm:
    """Chooses the form with the least estimated time, forward and backward.

    The products take 3.5 times their forward time in total. "ring" is possible where queries are
    split like keys, "sum" where queries are whole.
    """
    rows = sizes.queries / (sizes.parts if sizes.is_split else 1)
    products = 3.5 * 2 * sizes.batch * rows * sizes.keys * sizes.channels * FLOP_S
    held = ELEMENT_BYTES * sizes.batch * sizes.keys * sizes.channels
    moved = held * (sizes.parts - 1) / sizes.parts * BYTE_S
    results = ELEMENT_BYTES * sizes.batch * rows * sizes.channels / 2
    seconds: dict[AttentionForm, float] = {
        "gather": 2 * (2 * EXCHANGE_S + moved + held * MEMORY_S) + products
    }
    if sizes.is_split:
        more = sizes.parts - 1
        merging = 4 * more * results * MEMORY_S
        # Keys and values travel twice, their gradients once; the products hide it.
        seconds["ring"] = 3 * more * EXCHANGE_S + merging + max(3 * moved, products)
    else:
        scores = ELEMENT_BYTES * sizes.batch * rows * sizes.keys / sizes.parts
        between = 12 * scores * MEMORY_S
        sums = SUMS * EXCHANGE_S + 4 * results * BYTE_S
        seconds["sum"] = sums + between + products / sizes.parts
    return min(seconds, key=seconds.__getitem__)
