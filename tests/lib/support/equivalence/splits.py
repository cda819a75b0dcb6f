"""Shape and split points that most tests of operators share."""

from __future__ import annotations

SHAPE = (2, 3, 5, 4, 3)

TWO_SPLITS: dict[str, list[list[int] | None]] = {
    "2x1x1": [[0, 2, 5], None, None],
    "2x2x2, half of them empty": [[0, 2, 5], [0, 1, 4], [0, 0, 3]],
}
"""Split points of the last three dims, by the number of blocks along each."""

THREE_SPLITS = {**TWO_SPLITS, "1x3x2": [None, [0, 1, 3, 4], [0, 2, 3]]}

EIGHT_BLOCKS = {**TWO_SPLITS, "8x1x1": [[0, 1, 1, 2, 3, 3, 4, 5, 5], None, None]}
"""Also more blocks than slices."""
