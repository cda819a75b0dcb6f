"""Dims as torch counts them."""

from __future__ import annotations

from collections.abc import Sequence


def canonical(dim: int, ndim: int) -> int:
    """A dim counted from the front.

    Raises:
        IndexError: the tensor has no such dim.
    """
    bound = max(1, ndim)
    if not -bound <= dim < bound:
        raise IndexError(
            f"Dimension out of range (expected to be in range of [{-bound}, {bound - 1}], "
            f"but got {dim})"
        )
    return dim % bound


def canonical_all(dims: Sequence[int], ndim: int) -> tuple[int, ...]:
    """Dims counted from the front, in the given order.

    Raises:
        IndexError: the tensor has no such dim.
        RuntimeError: one is named twice.
    """
    found = tuple(canonical(d, ndim) for d in dims)
    if len(set(found)) != len(found):
        raise RuntimeError(f"dim {next(d for d in found if found.count(d) > 1)} appears twice")
    return found
