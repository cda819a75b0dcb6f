"""What poolings share: the plan of one, its exchanges, and pieces of tensors for the kernels."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pydist.exchange.formats import all_channels_last, is_channels_last
from pydist.ops.windows import Exchanges, Window, WindowPlan
from pydist.partition import Box, Footprint
from pydist.tensor import ShardedTensor, local_of, refusal, wrap

Pair = tuple[ShardedTensor, ShardedTensor]
"""A result and the indices that belong to it."""


class PoolPlan:
    """Who pools what: this rank's inputs and outputs, and what it exchanges.

    Args:
        plan: who computes which outputs.
        alone: nothing is exchanged: outputs are parts that others complete.
    """

    def __init__(self, plan: WindowPlan, alone: bool = False) -> None:
        self.plan = plan
        self.mesh = plan.layout.mesh
        self.own, self.out = plan.layout.box, plan.out.box
        self.footprints = footprints_of(plan.window)
        self.has_halo = not alone and any(plan.halos)
        self._exchanges: Exchanges | None = None

    def exchanges(self, x: Tensor) -> Exchanges:
        """Brings slabs of the input, and slabs of dL/dy to which this rank's inputs contributed.

        Collective the first time: the ranks agree on the order in which elements travel, that of
        their memory if it is channels-last on all of them. Other tensors are packed as well.
        """
        if self._exchanges is None:
            self._exchanges = self.plan.exchanges(all_channels_last(x, self.mesh))
        return self._exchanges

    def timed(self, compute: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Wraps a function of the shard so that its time counts as computation."""

        def measured() -> Tensor:
            with self.mesh.session.timers.measure("compute"):
                return compute()

        return measured


def footprints_of(window: Window) -> list[Footprint]:
    """The three footprints that the kernels take; dims that are missing come first."""
    dims = len(window.kernel)
    return [Footprint(1)] * (3 - dims) + [window.footprint(dim) for dim in range(dims)]


def empty(box: Box, like: Tensor) -> Tensor:
    """A tensor for a box, in the memory format of `like`."""
    if not is_channels_last(like):
        return like.new_empty(box.shape)
    # Not a view: torch refuses changes in place of a function's result that is one.
    n, channels, *spatial = box.shape
    shape, order = (n, *spatial, channels), (0, len(spatial) + 1, *range(1, len(spatial) + 1))
    strides = [math.prod(max(1, extent) for extent in shape[i + 1 :]) for i in range(len(shape))]
    return like.new_empty_strided(box.shape, [strides[i] for i in order])


def in_3d(x: Tensor) -> Tensor:
    """The same elements with three spatial dims, those that are missing in front."""
    for _ in range(5 - x.dim()):
        x = x.unsqueeze(2)
    return x


def lo_of(box: Box) -> tuple[int, ...]:
    """Where the three spatial dims of a box begin."""
    return (0,) * (5 - len(box.lo)) + tuple(box.lo[2:])


def batched(x: ShardedTensor) -> ShardedTensor:
    """One sample as a batch."""
    return x.unsqueeze(0)  # type: ignore[return-value]


def unbatched(result: Any) -> Any:
    """The one sample of a batch, of a result or of each of several."""
    if isinstance(result, tuple):
        return tuple(unbatched(each) for each in result)
    return result.squeeze(0)


def refuse_integers(function: Callable[..., Any], x: ShardedTensor) -> None:
    """Refuses what the kernels have no type for."""
    if not x.dtype.is_floating_point:
        raise refusal(function, (x,), {}, f"{x.dtype}: convert it to a type of float first")


def widened(dims: int, x: ShardedTensor) -> ShardedTensor:
    """Autocast's rule for torch's calls with three dims: they are computed in fp32."""
    if dims < 3 or x.dtype.itemsize != 2 or not torch.is_autocast_enabled(x.device.type):
        return x
    return wrap(local_of(x).float(), x._layout, x)


def with_indices(handler: Callable[..., Any], positional: int, *args: Any, **kwargs: Any) -> Any:
    """Calls that return the indices, whatever they are told; it is their last argument."""
    return handler(*args[:positional], **{**kwargs, "return_indices": True})
