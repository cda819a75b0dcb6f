"""Transfers of tensors, and of their gradients, between two stages.

A stage may be of any mesh: each rank of the receiving stage gets the intersections of its box with
the boxes of the sending one. Where both stages have the same layout, this is one message from rank
to rank, without a copy.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from pydist.errors import NotSupported, UsageError
from pydist.layout import Layout, Split
from pydist.partition import Box, Partition
from pydist.stages.ranks import Stages, device_of
from pydist.tensor import ShardedTensor, local_of

FORWARD, BACKWARD = 0, 1
"""Tags of tensors and of gradients."""


class Mark(NamedTuple):
    """What the stages must have in common when a tensor goes from one to another.

    Attributes:
        number: of the forward pass.
        batch: checksum of the beginnings of the batch's plain tensors.
        calls: running checksum of the calls of the pass. One rank alone may make another call, as
            to print a mean: from then on a call's number in its module is another one there.
    """

    number: int
    batch: int
    calls: int

    def after(self, call: str) -> Mark:
        """Returns the mark after a call."""
        return self._replace(calls=crc32(call.encode(), self.calls))

    def to_bytes(self) -> bytes:
        """Returns the mark as a message of `MARK_BYTES`."""
        return b"".join(each.to_bytes(8, "little") for each in self)

    @staticmethod
    def from_bytes(message: bytes) -> Mark:
        """Returns the mark that a message describes."""
        numbers = (message[i : i + 8] for i in range(0, MARK_BYTES, 8))
        return Mark(*(int.from_bytes(each, "little") for each in numbers))


MARK_BYTES = 24


class Kind(NamedTuple):
    """What a receiver must know of a tensor.

    Attributes:
        call: the call that uses it, for errors.
        shape: the global shape.
        dtype: the type of its elements.
        splits: of its layout on the sending stage; `None` if it is plain.
        needs_grad: whether its gradient is sent back.
    """

    call: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    splits: tuple[Split | None, ...] | None
    needs_grad: bool

    def to_bytes(self) -> bytes:
        """Returns the kind as a message."""
        splits = self.splits and [s and [s.axes, list(s.partition.points)] for s in self.splits]
        dtype = str(self.dtype).removeprefix("torch.")
        return json.dumps([self.call, self.shape, dtype, splits, self.needs_grad]).encode()

    @staticmethod
    def from_bytes(message: bytes) -> Kind:
        """Returns the kind that a message describes."""
        call, shape, dtype, splits, needs_grad = json.loads(message)
        found = None
        if splits is not None:
            found = tuple(s and Split(tuple(s[0]), Partition(s[1])) for s in splits)
        return Kind(call, tuple(shape), getattr(torch, dtype), found, needs_grad)


class Transfer:
    """The messages of one tensor between this rank and another stage.

    Args:
        stages: the stages.
        source: the stage that has the tensor.
        target: the stage that needs it.
        kind: the tensor.
    """

    def __init__(self, stages: Stages, source: int, target: int, kind: Kind) -> None:
        self._stages, self.kind = stages, kind
        self.source, self.target = source, target
        sender, receiver = stages.all[source], stages.all[target]
        self.splits: tuple[Split | None, ...] | None = None
        if kind.splits is None:
            if max(sender.sample_size, receiver.sample_size) > 1:
                raise NotSupported(
                    f"{kind.call}: a plain tensor of shape {list(kind.shape)} between stages of "
                    f"{sender.sample_size} and {receiver.sample_size} ranks a sample: a sharded "
                    "one is possible"
                )
            # It travels as a row, as a box has 1 to 8 dims.
            whole = [Box([0], [math.prod(kind.shape)])]
            self._boxes = whole, whole
        else:
            self.splits = receiver.splits_like(sender, kind.shape, kind.splits)
            self._boxes = (
                sender.boxes(kind.shape, kind.splits),
                receiver.boxes(kind.shape, self.splits),
            )

    def send(self, local: Tensor) -> None:
        """Sends this rank's shard to the target."""
        self._send(local, FORWARD)

    def receive(self) -> Tensor:
        """Returns this rank's shard, from the source."""
        return self._receive(FORWARD)

    def send_gradient(self, grad: Tensor | None) -> None:
        """Sends the gradient of this rank's shard to the source; `None` if none has come."""
        mine, source = self._stages.mesh, self._stages.all[self.source]
        exists = torch.tensor([grad is not None])
        for index in range(source.sample_size):
            if index % mine.sample_size == mine.sample_index:
                self._stages.world.send(exists, source.rank(mine.data_index, index), BACKWARD)
        if grad is not None:
            self._send(grad, BACKWARD)

    def receive_gradient(self) -> Tensor | None:
        """Returns the gradient of this rank's shard, from the target; `None` if it has none."""
        mine, target = self._stages.mesh, self._stages.all[self.target]
        exists = torch.empty(1, dtype=torch.bool)
        index = mine.sample_index % target.sample_size
        self._stages.world.recv(exists, target.rank(mine.data_index, index), BACKWARD)
        return self._receive(BACKWARD) if exists else None

    def _send(self, local: Tensor, tag: int) -> None:
        mine, start = self._stages.mesh, self._boxes[tag]
        if self.splits is None:
            local = local.reshape(-1)
        for here, there, part in self._messages(tag):
            if here == mine.sample_index:
                lo = start[here].lo
                index = tuple(
                    slice(a - o, b - o) for a, b, o in zip(part.lo, part.hi, lo, strict=True)
                )
                peer = self._stages.all[self._ends(tag)[1]].rank(mine.data_index, there)
                self._stages.world.send(local[index].contiguous(), peer, tag)

    def _receive(self, tag: int) -> Tensor:
        mine, end = self._stages.mesh, self._boxes[1 - tag]
        box = end[mine.sample_index]
        made: dict[str, Any] = {"dtype": self.kind.dtype, "device": device_of(mine)}
        local = torch.empty(tuple(box.shape), **made)
        for there, here, part in self._messages(tag):
            if here != mine.sample_index:
                continue
            peer = self._stages.all[self._ends(tag)[0]].rank(mine.data_index, there)
            if tuple(part.shape) == tuple(local.shape):
                self._stages.world.recv(local, peer, tag)
                continue
            block = torch.empty(tuple(part.shape), **made)
            self._stages.world.recv(block, peer, tag)
            index = (slice(a - o, b - o) for a, b, o in zip(part.lo, part.hi, box.lo, strict=True))
            local[tuple(index)] = block
        return local if self.splits is not None else local.view(self.kind.shape)

    def _ends(self, tag: int) -> tuple[int, int]:
        return (self.source, self.target) if tag == FORWARD else (self.target, self.source)

    def _messages(self, tag: int) -> Iterator[tuple[int, int, Box]]:
        """Yields sender, receiver (indices in their sample groups) and box of each message."""
        senders, receivers = self._boxes[tag], self._boxes[1 - tag]
        holders: dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = {}
        for index, box in enumerate(senders):
            holders.setdefault((tuple(box.lo), tuple(box.hi)), []).append(index)
        for there, needed in enumerate(receivers):
            for copies in holders.values():
                here = copies[there % len(copies)]  # of equal shards, each receiver reads another
                lo = [max(a, b) for a, b in zip(senders[here].lo, needed.lo, strict=True)]
                hi = [min(a, b) for a, b in zip(senders[here].hi, needed.hi, strict=True)]
                if all(a < b for a, b in zip(lo, hi, strict=True)):
                    yield here, there, Box(lo, hi)


class Transfers:
    """The transfers between this rank's stage and others, by the kind of tensor."""

    def __init__(self, stages: Stages) -> None:
        self._stages = stages
        self._known: dict[tuple[int, int, Kind], Transfer] = {}

    def send(self, value: Tensor, target: int, call: str, mark: Mark) -> Transfer:
        """Sends a sharded or plain tensor to another stage, for a call of a forward pass."""
        if isinstance(value, ShardedTensor):
            local, splits = local_of(value), tuple(value.layout.splits)
        else:
            local, splits = value, None
        # Whatever the mode of this call is: later ones on the other stage may have a gradient.
        needs_grad = local.requires_grad
        kind = Kind(call, tuple(value.shape), value.dtype, splits, needs_grad)
        transfer = self._find(self._stages.index, target, kind)
        mine, receiver = self._stages.mesh, self._stages.all[target]
        message = mark.to_bytes() + kind.to_bytes()
        for index in range(receiver.sample_size):
            if index % mine.sample_size == mine.sample_index:
                self._stages.send_bytes(message, receiver.rank(mine.data_index, index))
        transfer.send(local.detach())
        return transfer

    def receive(
        self, source: int, call: str, mark: Mark, shape: tuple[int, ...]
    ) -> tuple[Transfer, Tensor]:
        """Receives a tensor from another stage; returns this rank's shard.

        Args:
            source: the stage.
            call: the call that needs it.
            mark: of the forward pass.
            shape: of the tensor, as this stage knows it.

        Raises:
            UsageError: the other stage sends it for another call, or has another shape.
        """
        mine, sender = self._stages.mesh, self._stages.all[source]
        index = mine.sample_index % sender.sample_size
        message = self._stages.receive_bytes(sender.rank(mine.data_index, index))
        theirs = Mark.from_bytes(message)
        kind = Kind.from_bytes(message[MARK_BYTES:])
        here, there = f"stage {self._stages.index}", f"stage {source}"
        if (kind.call, theirs.number) != (call, mark.number):
            raise UsageError(
                f"the stages make different calls: {here} needs a tensor for {call} in forward "
                f"pass {mark.number}, and {there} sends one for {kind.call} in forward pass "
                f"{theirs.number}"
            )
        if theirs.calls != mark.calls:
            raise UsageError(
                f"the stages make different calls: before {call} ranks of {here} and of {there} "
                "have made other ones on tensors of the network, or one trains and one evaluates; "
                "what one rank alone prints or measures in a forward pass is such a call"
            )
        if (kind.shape, theirs.batch) != (shape, mark.batch):
            raise UsageError(
                f"the stages have different batches: for {call} {here} expects a tensor of shape "
                f"{list(shape)}, and {there} has {list(kind.shape)}, or their values differ; give "
                "all ranks of one data index the same inputs and targets"
            )
        transfer = self._find(source, self._stages.index, kind)
        return transfer, transfer.receive()

    def sharded(self, transfer: Transfer, local: Tensor, origin: Any) -> Tensor:
        """Returns a received shard as a tensor of this stage."""
        if transfer.splits is None:
            return local
        layout = Layout(self._stages.mesh, transfer.kind.shape, transfer.splits)
        if origin is None or transfer.kind.shape[:1] != (origin.sizes.own,):
            return ShardedTensor.of_shard(local, layout)
        return ShardedTensor(local, layout, origin)

    def _find(self, source: int, target: int, kind: Kind) -> Transfer:
        key = source, target, kind
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = Transfer(self._stages, source, target, kind)
        return found


def origin_of(values: Sequence[Any]) -> Any:
    """Returns the origin of the first sharded tensor, which a forward pass passes on."""
    return next((x._origin for x in values if isinstance(x, ShardedTensor)), None)
