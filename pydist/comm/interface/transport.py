"""What carries bytes between ranks: the one interface that every transport implements.

The public methods check their arguments and treat the trivial cases (one rank, derived
operations) once, here; a transport implements the methods with a leading underscore. All tensors
are contiguous and lie in host memory, and every rank of a collective passes the same dtype and
count. Collectives match by the order in which each rank calls them, point-to-point messages by
(sender, receiver, tag) in the order in which they were sent. Only `nccl`, `ipc` and `cuda-mpi` take
tensors of a CUDA device as well; there "complete" means that what the caller puts on its current
stream from then on comes behind.

Results are bit-identical on all ranks of the transport: replicas that diverge in the last bit
diverge for good. float16 and bfloat16 are summed in float32 and rounded once.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar, Literal, get_args

import torch
from torch import Tensor

from pydist.comm.interface.handles import Channel, Work
from pydist.errors import NotSupported, UsageError

if TYPE_CHECKING:
    from pydist.comm.exchange.exchanger import Exchanger

ReduceOp = Literal["sum", "max", "min"]

_REDUCE_OPS = get_args(ReduceOp)

_DTYPES = frozenset(
    {
        torch.float16, torch.bfloat16, torch.float32, torch.float64,
        torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool,
    }
)  # fmt: skip

WIDER = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.int8: torch.int32,
    torch.int16: torch.int32,
    torch.bool: torch.uint8,
}
"""The dtype in which elements of a narrow one are reduced; the result is rounded once."""


class Transport(ABC):
    """A group of ranks that can exchange tensors.

    Attributes:
        name: what the transport is called in `pydist.init(transport=...)`.
        rank: this rank's index in the group, 0 <= rank < size.
        size: number of ranks in the group.
        unfinished: completes the exchange whose result nobody has asked for yet, if there is one;
            the next exchange calls it before it starts.
        watcher: is told of every exchanger that starts here, and of every tensor that is reduced
            or collected.
        concurrent: whether threads of a rank may call it at once; else they take turns.
        device: the CUDA device whose tensors it takes as well as those of host memory; None for
            most.
    """

    name: ClassVar[str]
    rank: int
    size: int
    unfinished: Callable[[], None] | None = None
    watcher: Callable[[Exchanger | Tensor], None] | None = None
    concurrent: bool = False
    device: torch.device | None = None

    def _tell(self, tensor: Tensor) -> None:
        if self.watcher is not None:
            self.watcher(tensor)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank={self.rank}, size={self.size})"

    # -- groups -----------------------------------------------------------------------------

    def split(self, color: int, key: int) -> Transport:
        """Make one new transport for each color. Collective over this transport.

        Args:
            color: ranks with equal colors form a group.
            key: orders the ranks within the group; ties are broken by the rank in this one.

        Returns:
            The transport of this rank's group.
        """
        mine = struct.pack("<qq", color, key)
        pairs = [struct.unpack("<qq", each) for each in self.all_gather_bytes(mine)]
        members = sorted(
            (rank for rank in range(self.size) if pairs[rank][0] == color),
            key=lambda rank: (pairs[rank][1], rank),
        )
        return self._subgroup(members)

    @abstractmethod
    def _subgroup(self, members: Sequence[int]) -> Transport:
        """The transport of `members` (ranks of this one, in order), of which this rank is one.

        Called by all ranks at the same point, each with its own group.
        """

    # -- point to point ---------------------------------------------------------------------

    def channel(
        self,
        sends: Sequence[tuple[int, Tensor]],
        recvs: Sequence[tuple[int, Tensor]],
        tag: int,
    ) -> Channel:
        """Bind buffers to peers for an exchange that is repeated. Not collective.

        Messages from one sender to one receiver match in the order of the lists. Two channels
        that are under way at the same time need different tags.

        Args:
            sends: pairs of receiver and buffer.
            recvs: pairs of sender and buffer; the byte counts equal the sender's.
            tag: 0 <= tag < 2**15.

        Raises:
            UsageError: a peer is outside the group, or a buffer is not contiguous.
        """
        for what, pairs in (("send", sends), ("receive", recvs)):
            for peer, buffer in pairs:
                self._check_peer(peer)
                self._check(f"channel ({what} buffer of rank {peer})", buffer)
        self._check_tag(tag)
        return self._channel(sends, recvs, tag)

    @abstractmethod
    def _channel(
        self,
        sends: Sequence[tuple[int, Tensor]],
        recvs: Sequence[tuple[int, Tensor]],
        tag: int,
    ) -> Channel: ...

    def send(self, tensor: Tensor, dest: int, tag: int = 0) -> None:
        """Send a tensor. Buffered: returns without waiting for the receiver.

        Args:
            tensor: any shape; may be changed as soon as the call returns.
            dest: the receiver; may be this rank.
            tag: 0 <= tag < 2**15.
        """
        self._check("send", tensor)
        self._check_peer(dest)
        self._check_tag(tag)
        self._send(tensor.detach(), dest, tag)

    @abstractmethod
    def _send(self, tensor: Tensor, dest: int, tag: int) -> None: ...

    def recv(self, tensor: Tensor, source: int, tag: int = 0) -> None:
        """Receive into a tensor with the byte count that was sent. Blocks until it is there."""
        self._check("recv", tensor)
        self._check_peer(source)
        self._check_tag(tag)
        self._recv(tensor.detach(), source, tag)

    @abstractmethod
    def _recv(self, tensor: Tensor, source: int, tag: int) -> None: ...

    # -- collectives ------------------------------------------------------------------------

    def barrier(self) -> None:
        """Return when every rank has called it."""
        if self.size > 1:
            self._barrier()

    @abstractmethod
    def _barrier(self) -> None: ...

    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        """Overwrite the tensor on every rank with that of `root`."""
        self._check("broadcast", tensor)
        self._check_peer(root)
        if self.size > 1:
            self._broadcast(tensor.detach(), root)

    @abstractmethod
    def _broadcast(self, tensor: Tensor, root: int) -> None: ...

    def gather(self, tensor: Tensor, root: int = 0) -> list[Tensor] | None:
        """Collect tensors of equal shape on `root`.

        Returns:
            On `root` one new tensor a rank, in rank order; None elsewhere.
        """
        self._check("gather", tensor)
        self._check_peer(root)
        if self.size == 1:
            return [tensor.detach().clone()]
        return self._gather(tensor.detach(), root)

    @abstractmethod
    def _gather(self, tensor: Tensor, root: int) -> list[Tensor] | None: ...

    def scatter(self, tensors: Sequence[Tensor] | None, out: Tensor, root: int = 0) -> None:
        """Hand out one tensor to each rank.

        Args:
            tensors: on `root` one tensor a rank, all of the shape of `out`; None elsewhere.
            out: overwritten with this rank's tensor.
            root: the rank that has the tensors.
        """
        self._check("scatter", out)
        self._check_peer(root)
        if self.rank == root:
            if tensors is None or len(tensors) != self.size:
                given = "None" if tensors is None else f"{len(tensors)} tensors"
                raise UsageError(
                    f"scatter: root needs {self.size} tensors, one a rank; got {given}"
                )
            for each in tensors:
                self._check_like("scatter", each, out)
            tensors = [each.detach() for each in tensors]
        if self.size == 1:
            assert tensors is not None
            out.detach().copy_(tensors[0])
            return
        self._scatter(tensors if self.rank == root else None, out.detach(), root)

    @abstractmethod
    def _scatter(self, tensors: Sequence[Tensor] | None, out: Tensor, root: int) -> None: ...

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Collect tensors of equal shape on every rank.

        Returns:
            A new tensor of shape [size, *tensor.shape], in rank order.
        """
        self._check("all_gather", tensor)
        out = torch.empty((self.size, *tensor.shape), dtype=tensor.dtype, device=tensor.device)
        if self.size == 1:
            out[0].copy_(tensor.detach())
        else:
            self._tell(tensor)
            self._all_gather(tensor.detach(), out)
        return out

    def _all_gather(self, tensor: Tensor, out: Tensor) -> None:
        flat = out.view(-1)
        parts = list(flat.split(tensor.numel())) if tensor.numel() else [flat] * self.size
        parts[self.rank].copy_(tensor.view(-1))
        self._all_gather_async(parts[self.rank], parts, flat).wait()

    def all_gather_async(
        self, tensor: Tensor, out: Tensor, counts: Sequence[int] | None = None
    ) -> Work:
        """Start collecting one slice a rank, in rank order.

        Args:
            tensor: this rank's slice; it may be its place in `out` itself.
            out: takes the slices, one behind the other, whatever its shape.
            counts: elements of each rank's slice, >= 0; equal ones if None.

        Returns:
            `out` is complete when its `wait` has returned. All ranks start their collectives in
            one order; they may wait in any.
        """
        flat, parts = self._slices("all_gather_async", out, tensor, counts)
        mine, own = tensor.detach().view(-1), parts[self.rank]
        if mine.data_ptr() != own.data_ptr():
            own.copy_(mine)
        if self.size == 1:
            return Work()
        self._tell(tensor)
        return self._all_gather_async(own, parts, flat)

    def _all_gather_async(self, tensor: Tensor, parts: Sequence[Tensor], out: Tensor) -> Work:
        """As `all_gather_async`: `out` consists of `parts`, `tensor` is this rank's."""
        del out
        return self._all_to_all_async([tensor] * self.size, parts)

    def all_to_all(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        """Every rank sends one tensor to every rank; sizes may differ and may be zero.

        Args:
            inputs: inputs[r] goes to rank r.
            outputs: outputs[r] is overwritten with what rank r sent here; of the same byte count.
        """
        for what, tensors in (("inputs", inputs), ("outputs", outputs)):
            if len(tensors) != self.size:
                raise UsageError(f"all_to_all: {len(tensors)} {what} for {self.size} ranks")
            for each in tensors:
                self._check(f"all_to_all {what}", each)
        self._check_like("all_to_all", inputs[self.rank], outputs[self.rank])
        outputs[self.rank].detach().copy_(inputs[self.rank].detach().view(outputs[self.rank].shape))
        if self.size > 1:
            self._all_to_all_async(
                [each.detach() for each in inputs], [each.detach() for each in outputs]
            ).wait()

    @abstractmethod
    def _all_to_all_async(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Work:
        """Start `all_to_all`; what this rank sends to itself is already in place."""

    def reduce_scatter(self, tensor: Tensor) -> Tensor:
        """Sum over ranks, and hand one slice of the sum to each.

        Args:
            tensor: [size, *shape]; slice r is this rank's contribution to rank r.

        Returns:
            A new tensor of `shape`: the sum over ranks of their slices for this rank.
        """
        self._check("reduce_scatter", tensor)
        if tensor.dim() < 1 or tensor.shape[0] != self.size:
            raise UsageError(
                f"reduce_scatter: shape {tuple(tensor.shape)} must begin with the number of ranks,"
                f" {self.size}"
            )
        out = torch.empty_like(tensor[0], requires_grad=False)
        self.reduce_scatter_async(tensor, out).wait()
        return out

    def reduce_scatter_async(
        self,
        tensor: Tensor,
        out: Tensor,
        counts: Sequence[int] | None = None,
        divisor: int = 1,
    ) -> Work:
        """Start summing over ranks; each gets one slice of the sum.

        Args:
            tensor: one slice for each rank, one behind the other, whatever its shape.
            out: takes the sum over ranks of their slices for this rank. float16 and bfloat16 are
                summed in float32, narrow integers in wider ones. It shares no memory with `tensor`.
            counts: elements of each rank's slice, >= 0; equal ones if None.
            divisor: sums of floats are divided by it, before they are rounded.

        Returns:
            `out` is complete, and `tensor` free, when its `wait` has returned. All ranks start
            their collectives in one order; they may wait in any.
        """
        flat, parts = self._slices("reduce_scatter_async", tensor, out, counts)
        if self.size == 1:
            divide(out.detach().view(-1).copy_(flat), divisor)
            return Work()
        return self._reduce_scatter_async(parts, out.detach().view(-1), divisor)

    def _reduce_scatter_async(self, parts: Sequence[Tensor], out: Tensor, divisor: int) -> Work:
        """As `reduce_scatter_async`: the tensor consists of `parts`."""
        received = [torch.empty_like(out) for _ in parts]
        received[self.rank] = parts[self.rank]
        return _SliceSum(self._all_to_all_async(parts, received), received, out, divisor)

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum") -> None:
        """Reduce over ranks, in place, with the same bits on every rank.

        Args:
            tensor: any shape. On bool, "sum" and "max" mean "any", "min" means "all".
            op: "sum", "max" or "min"; the latter two propagate NaN, as torch does.
        """
        self._check_reduce(tensor, op)
        if self.size > 1:
            self._tell(tensor)
            self._all_reduce(tensor.detach(), op)

    @abstractmethod
    def _all_reduce(self, tensor: Tensor, op: ReduceOp) -> None: ...

    def all_reduce_async(self, tensor: Tensor, op: ReduceOp = "sum") -> Work:
        """Start `all_reduce`. The result is in `tensor` when `wait` of the returned has returned.

        All ranks start their collectives in one order; they may wait in any.
        """
        self._check_reduce(tensor, op)
        if self.size == 1:
            return Work()
        self._tell(tensor)
        return self._all_reduce_async(tensor.detach(), op)

    @abstractmethod
    def _all_reduce_async(self, tensor: Tensor, op: ReduceOp) -> Work: ...

    def broadcast_bytes(self, data: bytes | None, root: int = 0) -> bytes:
        """Send a byte string of any length from `root` to all ranks.

        Args:
            data: the bytes on `root`; ignored elsewhere.
            root: the rank that has the bytes.

        Returns:
            The bytes of `root`.
        """
        if self.rank == root:
            if data is None:
                raise UsageError(f"broadcast_bytes: rank {root} is the root and has no data")
            content = _as_tensor(data)
        length = torch.tensor([content.numel() if self.rank == root else 0], device="cpu")
        self.broadcast(length, root)
        if self.rank != root:
            content = torch.empty(int(length), dtype=torch.uint8, device="cpu")
        self.broadcast(content, root)
        return _as_bytes(content)

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """Collect a byte string of any length from every rank, in rank order."""
        lengths = self.all_gather(torch.tensor([len(data)], device="cpu")).flatten().tolist()
        padded = torch.zeros(max(lengths), dtype=torch.uint8, device="cpu")
        padded[: len(data)] = _as_tensor(data)
        rows = self.all_gather(padded)
        return [_as_bytes(row[:length]) for row, length in zip(rows, lengths, strict=True)]

    def progress(self) -> None:  # noqa: B027  most transports move bytes on their own
        """Let what is under way advance. Not collective, and cheap.

        For libraries that move bytes only while they are called (MPI): called between long
        computations, it hides there what would else be waited for.
        """

    @abstractmethod
    def abort(self, reason: str, exit_code: int) -> None:
        """End the whole job, now.

        `local` makes every blocked or later call of the other ranks raise `RankFailed` and
        returns; the others end all processes with `exit_code` and do not return.

        Args:
            reason: one line, shown to the user.
            exit_code: see `pydist.errors`.
        """

    def captured_in(self, graph: torch.cuda.CUDAGraph) -> None:  # noqa: B027  only NCCL cares
        """Take note of a CUDA graph with operations of these ranks: it can't outlive the group.

        Args:
            graph: is reset before the group closes, if somebody still has it then.
        """

    def forget_capture(self) -> None:
        """After a capture that failed: nothing of what was started within it will ever happen."""
        self.unfinished = None

    def close(self) -> None:  # noqa: B027  a transport may hold nothing
        """Release what the transport holds. Collective, idempotent."""

    # -- checks -----------------------------------------------------------------------------

    def _check(self, call: str, tensor: Tensor) -> None:
        if tensor.device.type != "cpu" and tensor.device != self.device:
            where = f"rank {self.rank} works on {self.device}"
            if self.device is None:
                where = f"transport '{self.name}' carries host memory"
            raise NotSupported(f"{call}: tensor on {tensor.device}; {where}")
        self._check_elements(call, tensor)

    @staticmethod
    def _check_elements(call: str, tensor: Tensor) -> None:
        if not tensor.is_contiguous():
            raise UsageError(
                f"{call}: tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()}"
                " is not contiguous"
            )
        if tensor.dtype not in _DTYPES:
            raise UsageError(f"{call}: dtype {tensor.dtype} can't be sent")

    def _check_like(self, call: str, given: Tensor, wanted: Tensor) -> None:
        self._check(call, given)
        if given.numel() != wanted.numel() or given.dtype != wanted.dtype:
            raise UsageError(
                f"{call}: {given.dtype} of shape {tuple(given.shape)} does not match"
                f" {wanted.dtype} of shape {tuple(wanted.shape)}"
            )

    def _slices(
        self, call: str, whole: Tensor, part: Tensor, counts: Sequence[int] | None
    ) -> tuple[Tensor, list[Tensor]]:
        """`whole` as one row, and the slice of each rank in it; `part` fits that of this one."""
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

    def _check_reduce(self, tensor: Tensor, op: str) -> None:
        self._check("all_reduce", tensor)
        if op not in _REDUCE_OPS:
            raise UsageError(f"all_reduce: op '{op}' is none of {', '.join(_REDUCE_OPS)}")

    def _check_peer(self, rank: int) -> None:
        if not 0 <= rank < self.size:
            raise UsageError(f"rank {rank} is outside the group of {self.size} ranks")

    @staticmethod
    def _check_tag(tag: int) -> None:
        # The MPI standard promises tags up to 32767 and no more.
        if not 0 <= tag < 1 << 15:
            raise UsageError(f"tag {tag} is outside [0, {1 << 15})")


class _SliceSum(Work):
    """Slices of all ranks on their way here, to be summed in rank order, whoever is asked."""

    def __init__(self, work: Work, slices: Sequence[Tensor], out: Tensor, divisor: int) -> None:
        self._pending: tuple[Work, Sequence[Tensor], Tensor] | None = (work, slices, out)
        self._divisor = divisor

    def wait(self) -> None:
        if self._pending is None:
            return
        work, slices, out = self._pending
        self._pending = None
        work.wait()
        wide = WIDER.get(out.dtype, out.dtype)
        total = out if out.dtype == wide else torch.empty_like(out, dtype=wide)
        total.copy_(slices[0])
        for each in slices[1:]:
            total += each.to(wide)
        divide(total, self._divisor)
        if total is not out:
            out.copy_(total)


def divide(total: Tensor, divisor: int) -> None:
    """Divides in place."""
    if divisor & (divisor - 1):
        total.div_(divisor)
    elif divisor > 1:
        total.mul_(1 / divisor)  # the same bits, as a power of two has an exact inverse


def _as_tensor(data: bytes) -> Tensor:
    # frombuffer refuses empty buffers, and warns about ones that can't be written.
    return (
        torch.frombuffer(bytearray(data), dtype=torch.uint8)
        if data
        else torch.empty(0, dtype=torch.uint8, device="cpu")
    )


def _as_bytes(tensor: Tensor) -> bytes:
    return tensor.numpy().tobytes()
