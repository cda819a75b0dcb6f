"""Views of parameters in the graph, which follow a parameter that gets other memory.

Autograd saves a parameter itself for backward, and so sees what `p.data = ...` puts into its place.
A sharded call uses a view of the parameter, with a node that scales the gradient. Before a backward
pass these views get the parameter's memory of then.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from pydist.comm.exchange.link import Link
from pydist.errors import UsageError

_FEW = 64


class Aliases:
    """The views that graphs hold; they are referred to weakly."""

    def __init__(self) -> None:
        self._views: list[tuple[Link, Any]] = []
        self._most = _FEW

    def note(self, view: Tensor, index: Any) -> None:
        """Remembers a view.

        Args:
            view: of a parameter, in the graph.
            index: which part of the parameter; `None` for all of it.
        """
        self._views.append((Link(view), index))
        if len(self._views) > self._most:  # forward passes without a backward
            self._views = [each for each in self._views if each[0]() is not None]
            self._most = 2 * len(self._views) + _FEW

    def renew(self) -> None:
        """Gives the views the memory that their parameters have now.

        Raises:
            UsageError: a parameter has changed its shape, dtype or device.
        """
        alive = []
        for each in self._views:
            link, index = each
            view = link()
            if view is None:
                continue
            alive.append(each)
            parameter = view._base
            assert parameter is not None
            now = parameter if index is None else parameter.data[index]
            if now.data_ptr() == view.data_ptr():
                continue
            if (now.shape, now.dtype, now.device) != (view.shape, view.dtype, view.device):
                raise UsageError(
                    f"a parameter of shape {list(view.shape)} and {view.dtype} has become one of "
                    f"shape {list(now.shape)} and {now.dtype} between forward and backward: change "
                    "it before the forward pass or after backward()"
                )
            view.data = now.data
        self._views = alive
