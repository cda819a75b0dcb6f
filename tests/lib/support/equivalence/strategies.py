"""Defines Hypothesis strategies that draw windows and split points."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import strategies as st

GRIDS: dict[int, list[tuple[int, ...]]] = {
    1: [(2,), (3,), (4,), (8,)],
    2: [(2, 1), (1, 2), (3, 1), (2, 2), (1, 4), (2, 3)],
    3: [(2, 1, 1), (1, 2, 1), (1, 1, 3), (4, 1, 1), (2, 2, 1), (2, 1, 3), (2, 2, 2), (8, 1, 1)],
}
"""Spatial grids: ranks along the last dims."""


def points(extent: int, parts: int) -> st.SearchStrategy[list[int]]:
    """Draws split points of an extent: even, uneven, thin or empty blocks."""
    inner = st.lists(st.integers(0, extent), min_size=parts - 1, max_size=parts - 1)
    return inner.map(lambda drawn: [0, *sorted(drawn), extent])


@st.composite
def cuts(draw: st.DrawFn, extents: Sequence[int]) -> list[list[int]]:
    """Draws split points of all of one to three dims, for 2 to 8 ranks."""
    grid = draw(st.sampled_from(GRIDS[len(extents)]))
    return [draw(points(n, parts)) for n, parts in zip(extents, grid, strict=True)]


@dataclass(frozen=True)
class WindowCase:
    """A window operation and extents into which it fits."""

    extents: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    points: list[list[int]]

    @property
    def dims(self) -> int:
        return len(self.extents)


@st.composite
def windows(
    draw: st.DrawFn,
    *,
    dims: int,
    dilations: int = 2,
    pooling: bool = False,
) -> WindowCase:
    """Draws kernels 1-5, strides 1-3, dilations, padding.

    Pooling is limited to torch's range: padding at most half the kernel, and no input smaller than
    the window.
    """

    def each(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw(st.integers(low, high)) for _ in range(dims))

    kernel, stride, dilation = each(1, 5 if dims < 3 else 4), each(1, 3), each(1, dilations)
    most = [k // 2 for k in kernel] if pooling else [3] * dims
    padding = tuple(draw(st.integers(0, n)) for n in most)
    outputs, slack = each(1, 4 if dims < 3 else 3), each(0, 2)
    extents = tuple(
        max(d * (k - 1) + 1 if pooling else 1, (o - 1) * s + d * (k - 1) + 1 - 2 * p + extra)
        for o, s, d, k, p, extra in zip(
            outputs, stride, dilation, kernel, padding, slack, strict=True
        )
    )
    return WindowCase(extents, kernel, stride, padding, dilation, draw(cuts(extents)))
