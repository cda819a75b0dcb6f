"""Slow NumPy definitions of pack, unpack and unpack_add."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Bounds = tuple[Sequence[int], Sequence[int]]  # lo, hi


def _index(bounds: Bounds) -> tuple[slice, ...]:
    return tuple(slice(lo, hi) for lo, hi in zip(*bounds, strict=True))


def pack(view: np.ndarray, boxes: Sequence[Bounds]) -> np.ndarray:
    """Returns the boxes' elements, each box in C order, one box after another."""
    pieces = [view[_index(box)].reshape(-1) for box in boxes]
    return np.concatenate([np.empty(0, view.dtype), *pieces])


def unpack(buffer: np.ndarray, boxes: Sequence[Bounds], view: np.ndarray) -> None:
    """Inverts `pack`, box after box."""
    start = 0
    for box in boxes:
        target = view[_index(box)]
        target[...] = buffer[start : start + target.size].reshape(target.shape)
        start += target.size


def unpack_add(buffer: np.ndarray, boxes: Sequence[Bounds], view: np.ndarray) -> None:
    """Applies the adjoint of `pack`, box after box, with NumPy's rules for overflow and bool."""
    start = 0
    for box in boxes:
        target = view[_index(box)]
        target += buffer[start : start + target.size].reshape(target.shape)
        start += target.size
