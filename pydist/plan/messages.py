"""Computes times of messages between ranks of a mesh, by latency and bandwidth.

Source: the alpha-beta model of DiHydrogen's perfmodel.py (R. Thakur, R. Rabenseifner, W. Gropp,
Int. J. High Perform. Comput. Appl. 19, 2005): recursive doubling for short messages, Rabenseifner's
algorithm for long ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from pydist.grid import AXES, Grid
from pydist.hardware import Hardware, Interconnect

_SHORT_BYTES = 512 * 4
"""Messages up to this size are reduced by recursive doubling."""


class MessageTimes:
    """Seconds that messages between the ranks of a mesh take on some hardware.

    Ranks with consecutive numbers share a node, and its connection to others.

    Args:
        grid: the mesh.
        hardware: of a rank.
    """

    def __init__(self, grid: Grid, hardware: Hardware) -> None:
        self._grid, self._hardware = grid, hardware

    def exchange(self, axes: Sequence[str], widths: Sequence[tuple[float, int]]) -> float:
        """Returns the seconds of an exchange with neighbors.

        Args:
            axes: along which the neighbors are.
            widths: of each axis, bytes that a rank receives and the neighbors they come from.
        """
        seconds, messages = 0.0, 1
        for axis, (nbytes, sides) in zip(axes, widths, strict=True):
            if sides:
                link = self._link((axis,))
                seconds += nbytes / link.bandwidth
                messages *= 1 + sides
        if messages == 1:
            return 0.0
        latency = max(self._link((axis,)).latency for axis in axes)
        return self._hardware.exchange + (messages - 1) * latency + seconds

    def all_reduce(self, axes: Sequence[str], nbytes: float) -> float:
        """Returns the seconds of a sum over the ranks along some axes, on all of them."""
        ranks = self._grid.size(tuple(axes))
        if ranks == 1 or not nbytes:
            return 0.0
        link, rounds = self._link(axes), math.ceil(math.log2(ranks))
        if nbytes <= _SHORT_BYTES:
            return self._hardware.exchange + rounds * (link.latency + nbytes / link.bandwidth)
        moving = (ranks - 1) / ranks * nbytes / link.bandwidth * self._hardware.reduction
        return self._hardware.exchange + 2 * (rounds * link.latency + moving)

    def gather(self, axes: Sequence[str], nbytes: float) -> float:
        """Returns the seconds in which each rank gets all parts of a tensor, or parts of a sum.

        Args:
            axes: along which the parts are.
            nbytes: of the whole tensor.
        """
        ranks = self._grid.size(tuple(axes))
        if ranks == 1 or not nbytes:
            return 0.0
        link = self._link(axes)
        rounds = math.ceil(math.log2(ranks))
        moved = (ranks - 1) / ranks * nbytes
        return self._hardware.exchange + rounds * link.latency + moved / link.bandwidth

    def _link(self, axes: Sequence[str]) -> Interconnect:
        """Returns the connection of a rank to the others along some axes."""
        grid, on_node = self._grid, self._hardware.ranks_per_node
        split = grid.split(tuple(axes))
        spans = [self._stride(axis) * grid.size((axis,)) for axis in split]
        if max(spans, default=1) <= on_node:
            return self._hardware.within
        # Groups side by side on a node share its connection.
        stride = min(self._stride(axis) for axis in split)
        sharing = min(stride, on_node)
        between = self._hardware.between
        return Interconnect(between.latency, between.bandwidth / sharing)

    def _stride(self, axis: str) -> int:
        """Returns the distance in rank numbers between neighbors along an axis."""
        return self._grid.size(AXES[AXES.index(axis) + 1 :])
