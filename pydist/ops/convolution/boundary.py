"""The boundary outputs of a convolution whose halo is still on its way.

They are completed when the shard is used: the slabs' part is added in the native kernel. Where an
in-place ReLU follows, the kernel applies it to what it has just added up, so the boundary planes
are read and written once; the interior has been through it by then. Only in place: otherwise the
linear values must be there as well.

By then the weight may have other values, changed in place or through any tensor that shares its
memory. So the slabs' part is computed from a copy made in the call. Where a copy would not be small
beside the outputs, the call itself completes them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pydist.backend.slab_library import leaky_relu_
from pydist.ops.convolution.deferred_relu import DeferredRelu, may_wait, with_relu
from pydist.ops.convolution.finish import finish_
from pydist.ops.convolution.slab_kernels import as_read
from pydist.partition import Box
from pydist.tensor import ShardedTensor, adopt_local

if TYPE_CHECKING:
    from pydist.exchange.exchanger import PendingExchange
    from pydist.ops.convolution.correction_plan import CorrectionPlan
    from pydist.ops.convolution.slab_kernels import SlabKernels


# Outputs per element of the weight from which on a copy of it costs little beside them.
_OUTPUTS = 8


class DeferredBoundary:
    """One convolution's halo under way, and the outputs that wait for it.

    Args:
        plan: of the convolution.
        channels_last: the memory format in which the halo travels.
        kernels: that add the slabs' parts.
        bias: [C], if it is added when all else is there: `finish_`. Of its own memory.

    Attributes:
        plan: of the convolution.
        kernels: that add the slabs' parts.
        bias: as given.
        is_deferrable: whether it may be completed after the call; known once the halo is under way.
        outputs: the shard of the result, but for what the halo adds to it; `None` where nobody
            can ask for it any more. Who has saved it for backward need not know of that.
        slabs: the halo, once complete.
    """

    def __init__(
        self,
        plan: CorrectionPlan,
        channels_last: bool,
        kernels: SlabKernels,
        bias: Tensor | None = None,
    ) -> None:
        self.plan, self.kernels, self.bias = plan, kernels, bias
        self.outputs: Tensor | None = None
        self.slabs: list[Tensor] = []
        self._exchanges = plan.plan.exchanges(channels_last)
        self._halo = self._exchanges.grad_halo if plan.is_adjoint else self._exchanges.halo
        self._layer = plan.mesh.session.timers.layer
        self._under_way: tuple[PendingExchange, Tensor] | None = None
        self.is_deferrable = True

    def start(self, x: Tensor, weight: Tensor) -> None:
        """Sends the halo off.

        Args:
            x: the shard that is convolved.
            weight: of the convolution.
        """
        halo = self._halo
        pending = halo.start(x)
        kernel = as_read(weight.detach())
        outputs = math.prod(self.plan.outputs.shape)
        self.is_deferrable = not halo.slots or weight.numel() * _OUTPUTS <= outputs
        if halo.slots and self.is_deferrable and kernel.data_ptr() == weight.data_ptr():
            kernel = kernel.clone()
        self._under_way = pending, kernel
        halo.transport.unfinished = self.complete

    @property
    def is_fusible(self) -> bool:
        """Whether a ReLU may still be applied along with the halo's part."""
        boundary = self.plan.boundary
        return self._under_way is not None and boundary is not None and boundary.pieces is not None

    def with_relu(self, shard: Tensor, negative_slope: float) -> tuple[Tensor, DeferredRelu] | None:
        """The outputs behind a ReLU in place, completed along with it; `None` if it is too late.

        Args:
            shard: the outputs.
            negative_slope: 0 for a ReLU; in [0, 1).

        Returns:
            the shard, and what is still to be done for it.
        """
        if not self.is_fusible or self.outputs is None:
            return None
        # Without a graph to be made, the shard's own would be lost.
        if shard.requires_grad and not torch.is_grad_enabled():
            return None
        pending = DeferredRelu(self.outputs, negative_slope, self)
        if not may_wait(shard):
            pending.complete()
        return with_relu(shard, negative_slope, pending.handover), pending

    def complete_now(self) -> None:
        """Completes the outputs within the call, but for the bias: it may still wait for a ReLU."""
        self.is_deferrable, self.bias = False, None
        self.complete()

    def complete(self, negative_slope: float = 1.0) -> None:
        """Waits for the halo and adds its part; does nothing when that has been done.

        Args:
            negative_slope: of a leaky ReLU that all outputs go through; 1 for none.
        """
        if self._under_way is None:
            return
        # First, as an exception on the way must not come again from everybody who asks later.
        (pending, kernel), self._under_way = self._under_way, None
        outputs, self.outputs = self.outputs, None
        halo, timers = self._halo, self.plan.mesh.session.timers
        halo.transport.unfinished = None
        # Together with the bias the ReLU comes last.
        at_once = negative_slope if self.bias is None else 1.0
        boundary = self.plan.boundary
        if at_once != 1.0 and outputs is not None and boundary is not None:
            with torch.no_grad(), timers.measure("compute", self._layer):
                for box in boundary.interior:
                    leaky_relu_(self._part(outputs, box), at_once)
        self.slabs = self._exchanges.receive(halo, pending, kernel, self._layer)
        if outputs is None:
            return
        with timers.measure("boundary", self._layer):
            for slab, part, lo, slope in self._steps(outputs, at_once):
                where = halo.slots[slab].lo[2:], lo
                received = self.slabs[slab]
                self.kernels.add(self.plan.roles[0], slab, received, kernel, part, *where, slope)
        if self.bias is not None:
            with timers.measure("compute", self._layer):
                finish_(outputs, self.bias, negative_slope)

    def _steps(
        self, outputs: Tensor, slope: float
    ) -> Iterator[tuple[int, Tensor, Sequence[int], float]]:
        """Calls of the kernel: slab, outputs and their place, slope."""
        boundary = self.plan.boundary
        if slope == 1.0 or boundary is None:
            lo = self.plan.outputs.lo[2:]
            for slab in range(len(self.slabs)):
                yield slab, outputs, lo, 1.0
            return
        for slab, box, is_last in boundary.pieces or []:
            yield slab, self._part(outputs, box), box.lo[2:], slope if is_last else 1.0

    def _part(self, outputs: Tensor, box: Box) -> Tensor:
        part = outputs.detach()
        own = self.plan.outputs
        for dim in range(2, part.dim()):
            part = part.narrow(dim, box.lo[dim] - own.lo[dim], box.hi[dim] - box.lo[dim])
        return part


def relu_in_place(x: ShardedTensor, negative_slope: float) -> ShardedTensor | None:
    """Applies a ReLU along with what is still to be done for `x`: a convolution's halo, a norm.

    Args:
        x: the tensor.
        negative_slope: 0 for a ReLU; in [0, 1).

    Returns:
        x; `None` if there is nothing to fuse with, and nothing was done.
    """
    if x._deferred is None or not 0.0 <= negative_slope < 1.0:
        return None
    done = x._deferred.with_relu(x._shard, negative_slope)
    if done is None:
        return None
    shard, x._deferred = done
    return adopt_local(x, shard)
