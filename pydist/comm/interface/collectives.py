"""Defines the public collectives of a transport: they check arguments and handle trivial cases.

Collectives match by the order in which each rank calls them. Every rank passes the same dtype and
count.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from pydist.comm.interface.checks import check_like, check_op, check_peer, real_view
from pydist.comm.interface.handles import Work
from pydist.comm.interface.primitives import Primitives
from pydist.comm.interface.reduction import ReduceOp, divide_
from pydist.errors import UsageError


class Collectives(Primitives):
    """Collective operations that all ranks of a group start together; see `Transport`."""

    def barrier(self) -> None:
        """Returns when every rank has called it."""
        if self.size > 1:
            self._note("barrier")
            self._barrier()

    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        """Overwrites the tensor on every rank with the tensor of `root`."""
        tensor = real_view(tensor)
        self._check("broadcast", tensor)
        check_peer(root, self.size)
        if self.size > 1:
            self._note("broadcast", tensor.dtype, tensor.numel(), root)
            self._broadcast(tensor.detach(), root)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Collects tensors of equal shape on every rank.

        Returns:
            A new tensor of shape [size, *tensor.shape], in rank order.
        """
        self._check("all_gather", tensor)
        out = torch.empty((self.size, *tensor.shape), dtype=tensor.dtype, device=tensor.device)
        if self.size == 1:
            out[0].copy_(tensor.detach())
        else:
            self._tell(tensor)
            self._note("all_gather", tensor.dtype, tensor.numel())
            self._all_gather(tensor.detach(), out)
        return out

    def all_gather_async(
        self, tensor: Tensor, out: Tensor, counts: Sequence[int] | None = None
    ) -> Work:
        """Starts an all-gather of one slice per rank, in rank order.

        Args:
            tensor: this rank's slice; may be its own slice of `out`.
            out: receives the slices one after the other, regardless of its shape.
            counts: elements of each rank's slice, >= 0; equal counts if None.

        Returns:
            A handle: `out` is complete when its `wait` has returned. All ranks start their
            collectives in the same order; they may wait in any order.
        """
        flat, parts = self._slices("all_gather_async", out, tensor, counts)
        mine, own = tensor.detach().view(-1), parts[self.rank]
        if mine.data_ptr() != own.data_ptr():
            own.copy_(mine)
        if self.size == 1:
            return Work()
        self._tell(tensor)
        self._note("all_gather_async", out.dtype, out.numel(), waits=False)
        return self._all_gather_async(own, parts, flat)

    def all_to_all(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Sends one tensor from every rank to every rank; sizes may differ and may be zero.

        Args:
            inputs: inputs[r] goes to rank r.
            outputs: outputs[r] receives the tensor of rank r; it has the same byte count.
        """
        for what, tensors in (("inputs", inputs), ("outputs", outputs)):
            if len(tensors) != self.size:
                raise UsageError(f"all_to_all: {len(tensors)} {what} for {self.size} ranks")
            for each in tensors:
                self._check(f"all_to_all {what}", each)
        check_like("all_to_all", inputs[self.rank], outputs[self.rank])
        outputs[self.rank].detach().copy_(inputs[self.rank].detach().view(outputs[self.rank].shape))
        if self.size > 1:
            self._note("all_to_all", inputs[0].dtype)
            self._all_to_all_async(
                [each.detach() for each in inputs], [each.detach() for each in outputs]
            ).wait()

    def reduce_scatter_async(
        self,
        tensor: Tensor,
        out: Tensor,
        counts: Sequence[int] | None = None,
        divisor: int = 1,
    ) -> Work:
        """Starts a reduce-scatter: each rank receives one slice of the sum over ranks.

        Args:
            tensor: one slice for each rank, one after the other, regardless of its shape.
            out: receives the sum over ranks of their slices for this rank. float16 and bfloat16
                are summed in float32, narrow integers in wider ones. It shares no memory with
                `tensor`.
            counts: elements of each rank's slice, >= 0; equal counts if None.
            divisor: floating-point sums are divided by it before they are rounded.

        Returns:
            A handle: `out` is complete, and `tensor` free, when its `wait` has returned. All ranks
            start their collectives in the same order; they may wait in any order.
        """
        flat, parts = self._slices("reduce_scatter_async", tensor, out, counts)
        if self.size == 1:
            divide_(out.detach().view(-1).copy_(flat), divisor)
            return Work()
        self._note("reduce_scatter_async", tensor.dtype, tensor.numel(), divisor, waits=False)
        return self._reduce_scatter_async(parts, out.detach().view(-1), divisor)

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> None:
        """Reduces over ranks in place, with bit-identical results on every rank.

        Args:
            tensor: any shape. For bool, "sum" and "max" mean "any", "min" means "all". Complex
                tensors can be summed.
            op: "sum", "max" or "min"; the latter two propagate NaN, as in torch.
        """
        check_op(op, tensor)
        tensor = real_view(tensor)
        self._check("all_reduce", tensor)
        if self.size > 1:
            self._tell(tensor)
            self._note("all_reduce", tensor.dtype, tensor.numel(), op)
            self._all_reduce(tensor.detach(), op)

    def all_reduce_async(self, tensor: Tensor, op: ReduceOp = "sum") -> Work:
        """Starts `all_reduce`; `tensor` has the result when the handle's `wait` has returned.

        All ranks start their collectives in the same order; they may wait in any order.
        """
        check_op(op, tensor)
        tensor = real_view(tensor)
        self._check("all_reduce", tensor)
        if self.size == 1:
            return Work()
        self._tell(tensor)
        self._note("all_reduce_async", tensor.dtype, tensor.numel(), op, waits=False)
        return self._all_reduce_async(tensor.detach(), op)

    def _note(self, *what: Hashable, waits: bool = True) -> None:
        self.ledger.note(self, what, waits=waits)

    def _tell(self, tensor: Tensor) -> None:
        if self.watcher is not None:
            self.watcher(tensor)

    def _slices(
        self, call: str, whole: Tensor, part: Tensor, counts: Sequence[int] | None
    ) -> tuple[Tensor, list[Tensor]]:
        """Returns `whole` flattened, and its slice of each rank; `part` must fit this rank's."""
        self._check(call, whole)
        self._check(call, part)
        if counts is None:
            counts = [part.numel()] * self.size
        fits = len(counts) == self.size and part.numel() == counts[self.rank]
        if not fits or whole.numel() != sum(counts) or whole.dtype != part.dtype:
            raise UsageError(
                f"{call}: {whole.numel()} elements of {whole.dtype} in all and {part.numel()} of "
                f"{part.dtype} here do not fit counts {list(counts)} for {self.size} ranks"
            )
        flat = whole.detach().view(-1)
        return flat, list(flat.split(list(counts)))
