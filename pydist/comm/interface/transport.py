"""The interface that every transport implements to exchange tensors between ranks.

The public methods check their arguments and handle the trivial cases (one rank, derived
operations) once, here and in `collectives`; a transport implements `primitives`, the methods with a
leading underscore. All tensors are contiguous, but those of `send`, and in host memory, and every
rank of a collective passes the same dtype and count. Collectives match by the order in which each
rank calls them, point-to-point messages by (sender, receiver, tag) in the order of sending. Only
`nccl`, `ipc`, `cuda-mpi` and `staged` accept CUDA tensors as well; for these, "complete" means that
work which the caller enqueues on its current stream from then on runs after the operation.

Results are bit-identical on all ranks of the transport: replicas that differ in the last bit
diverge permanently. float16 and bfloat16 are summed in float32 and rounded once.
"""

from __future__ import annotations

import json
import re
import struct
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pydist.comm.interface.checks import check_peer, check_tag
from pydist.comm.interface.collectives import Collectives
from pydist.comm.interface.handles import Channel
from pydist.errors import UsageError

_NO_MORE = re.compile("too many (open files|communicators)", re.IGNORECASE)


class Transport(Collectives):
    """Group of ranks that can exchange tensors; `Primitives` documents its attributes."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank={self.rank}, size={self.size})"

    # -- groups -----------------------------------------------------------------------------

    def split(self, color: int, key: int) -> Transport:
        """Creates one new transport for each color. Collective over this transport.

        Args:
            color: ranks with equal colors form a group.
            key: orders the ranks within the group; ties are broken by the rank in this group.

        Returns:
            The transport of this rank's group.

        Raises:
            UsageError: the job has as many groups as the process or MPI can have.
        """
        mine = struct.pack("<qq", color, key)
        pairs = [struct.unpack("<qq", each) for each in self.all_gather_bytes(mine)]
        members = sorted(
            (rank for rank in range(self.size) if pairs[rank][0] == color),
            key=lambda rank: (pairs[rank][1], rank),
        )
        try:
            group = self._subgroup(members)
        except RuntimeError as error:
            if not (found := _NO_MORE.search(str(error))):
                raise
            raise UsageError(
                f"no further group of ranks can be made ({found[0].lower()}): each mesh keeps "
                "groups until the program ends, so make one, and parallelize all models on it"
            ) from error
        group.ledger.job_ranks = [self.ledger.name(member) for member in members]
        group.watcher = self.watcher
        group.ledger.open(group)
        return group

    @abstractmethod
    def _subgroup(self, members: Sequence[int]) -> Transport:
        """Creates the transport of `members`: ranks of this group, in order, including this one.

        All ranks call it at the same point, each with its own group.
        """

    # -- point to point ---------------------------------------------------------------------

    def channel(
        self,
        sends: Sequence[tuple[int, Tensor]],
        recvs: Sequence[tuple[int, Tensor]],
        tag: int,
    ) -> Channel:
        """Binds buffers to peers for a repeated exchange. Not collective.

        Messages from one sender to one receiver match in the order of the lists. Two channels
        that are in flight at the same time need different tags.

        Args:
            sends: pairs of receiver and buffer.
            recvs: pairs of sender and buffer; the byte counts equal the sender's.
            tag: 0 <= tag < 2**15.

        Raises:
            UsageError: a peer is outside the group, or a buffer is not contiguous.
        """
        for what, pairs in (("send", sends), ("receive", recvs)):
            for peer, buffer in pairs:
                check_peer(peer, self.size)
                self._check(f"channel ({what} buffer of rank {peer})", buffer)
        check_tag(tag)
        return self._channel(sends, recvs, tag)

    def send(
        self, tensor: Tensor, dest: int, tag: int = 0, *, lender: Tensor | None = None
    ) -> None:
        """Sends a tensor, buffered: returns without waiting for the receiver.

        Args:
            tensor: any shape and strides; may be changed as soon as the call returns.
            dest: the receiver; may be this rank.
            tag: 0 <= tag < 2**15.
            lender: a tensor with the memory of `tensor`, whose values do not change until the
                receiver has them. If all of the memory is sent, it is not copied; the transport
                holds the lender meanwhile, as autograd changes no gradient that others hold.
        """
        self._check("send", tensor, strided=True)
        check_peer(dest, self.size)
        check_tag(tag)
        fills = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
        if lender is not None and fills:
            self._lend(tensor.detach(), lender, dest, tag)
        else:
            self._send(tensor.detach(), dest, tag)

    def recv(self, tensor: Tensor, source: int, tag: int = 0) -> None:
        """Receives into a tensor with the byte count that was sent. Blocks until it has arrived.

        Args:
            tensor: dense, of any shape; it is overwritten.
            source: the sender; may be this rank.
            tag: of the message, 0 <= tag < 2**15.
        """
        self._check("recv", tensor)
        check_peer(source, self.size)
        check_tag(tag)
        self._recv(tensor.detach(), source, tag)

    # -- byte strings ------------------------------------------------------------------------

    def broadcast_bytes(self, data: bytes | None, root: int = 0) -> bytes:
        """Sends a byte string of any length from `root` to all ranks.

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
        """Collects a byte string of any length from every rank, in rank order."""
        lengths = self.all_gather(torch.tensor([len(data)], device="cpu")).flatten().tolist()
        padded = torch.zeros(max(lengths), dtype=torch.uint8, device="cpu")
        padded[: len(data)] = _as_tensor(data)
        rows = self.all_gather(padded)
        return [_as_bytes(row[:length]) for row, length in zip(rows, lengths, strict=True)]

    def all_gather_json(self, value: object) -> list[Any]:
        """Collects a value from every rank, in rank order, as JSON holds it."""
        return [json.loads(each) for each in self.all_gather_bytes(json.dumps(value).encode())]

    def broadcast_json(self, value: object, root: int = 0) -> Any:
        """Sends a value from `root` to all ranks, as JSON holds it; it is ignored elsewhere."""
        data = json.dumps(value).encode() if self.rank == root else None
        return json.loads(self.broadcast_bytes(data, root))


def _as_tensor(data: bytes) -> Tensor:
    # frombuffer refuses empty buffers, and warns about read-only ones.
    return (
        torch.frombuffer(bytearray(data), dtype=torch.uint8)
        if data
        else torch.empty(0, dtype=torch.uint8, device="cpu")
    )


def _as_bytes(tensor: Tensor) -> bytes:
    return tensor.numpy().tobytes()
