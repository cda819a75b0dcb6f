"""Provides common parts of poolings: plan, exchanges, and tensor views for the kernels."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from pydist.exchange.memory_formats import all_channels_last, is_channels_last
from pydist.ops.dtypes import result_dtype
from pydist.ops.windows import Exchanges, Window, WindowPlan
from pydist.partition import Box, Footprint
from pydist.tensor import ShardedTensor, local_of, refusal, wrap

Pair = tuple[ShardedTensor, ShardedTensor]
"""A result and its indices."""


class PoolPlan:
    """Plan that holds a pooling's inputs and outputs on this rank, and its exchanges.

    Args:
        plan: the window plan.
        alone: whether to exchange no halo; the outputs are then partial.
    """

    def __init__(self, plan: WindowPlan, alone: bool = False) -> None:
        self.plan = plan
        self.mesh = plan.layout.mesh
        self.own, self.out = plan.layout.box, plan.out.box
        self.footprints = footprints_of(plan.window)
        self.has_halo = not alone and any(plan.halos)
        self._exchanges: Exchanges | None = None

    def exchanges(self, x: Tensor) -> Exchanges:
        """Returns the exchanges of input slabs, and of dL/dy slabs this rank contributed to.

        The first call is collective: the messages are channels-last if the shards of all ranks are.
        Tensors in the other format are packed to that order.
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
    """Returns the three footprints that the kernels expect; missing dims are first."""
    dims = len(window.kernel)
    return [Footprint(1)] * (3 - dims) + [window.footprint(dim) for dim in range(dims)]


def empty(box: Box, like: Tensor) -> Tensor:
    """Allocates a tensor for a box, in the memory format of `like`."""
    if not is_channels_last(like):
        return like.new_empty(box.shape)
    # Not a view: torch refuses in-place changes of an autograd function's result that is a view.
    return like.new_empty_strided(box.shape, _channels_last_strides(box))


@lru_cache(maxsize=1024)
def _channels_last_strides(box: Box) -> list[int]:
    n, channels, *spatial = box.shape
    shape, order = (n, *spatial, channels), (0, len(spatial) + 1, *range(1, len(spatial) + 1))
    strides = [math.prod(max(1, extent) for extent in shape[i + 1 :]) for i in range(len(shape))]
    return [strides[i] for i in order]


def in_3d(x: Tensor) -> Tensor:
    """Returns a view with three spatial dims; missing dims are first."""
    for _ in range(5 - x.dim()):
        x = x.unsqueeze(2)
    return x


@lru_cache(maxsize=1024)
def lo_of(box: Box) -> tuple[int, ...]:
    """Returns the lower ends of a box in three spatial dims."""
    return (0,) * (5 - len(box.lo)) + tuple(box.lo[2:])


def batched(x: ShardedTensor) -> ShardedTensor:
    """Returns one sample as a batch."""
    return x.unsqueeze(0)  # type: ignore[return-value]


def unbatched(result: Any) -> Any:
    """Returns the only sample of a result's batch, or of each result in a tuple."""
    if isinstance(result, tuple):
        return tuple(unbatched(each) for each in result)
    return result.squeeze(0)


def refuse_integers(function: Callable[..., Any], x: ShardedTensor) -> None:
    """Raises an error for dtypes that the kernels do not support."""
    if not x.dtype.is_floating_point:
        raise refusal(function, (x,), {}, f"{x.dtype}: convert it to a type of float first")


def widened(
    function: Callable[..., Any], dims: int, x: ShardedTensor, *arguments: Any
) -> ShardedTensor:
    """Converts the input to the dtype in which torch pools it under autocast.

    Args:
        function: the pooling.
        dims: number of its spatial dims.
        x: the input.
        arguments: what `function` gets after a window, or a result, of size 1.
    """
    if x.dtype.itemsize != 2 or not torch.is_autocast_enabled(x.device.type):
        return x
    try:
        dtype = result_dtype(function, ((1,) * (dims + 2), x), arguments=(1, *arguments))
    except NotImplementedError:  # torch has no kernel for the dtype here, as on a simulated device
        return x
    return x if dtype == x.dtype else wrap(local_of(x).to(dtype), x.layout, x)


def with_indices(handler: Callable[..., Any], positional: int, *args: Any, **kwargs: Any) -> Any:
    """Calls a handler with `return_indices`, its last argument, always true."""
    return handler(*args[:positional], **{**kwargs, "return_indices": True})
