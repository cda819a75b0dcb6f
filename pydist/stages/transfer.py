"""Transfers tensors, and their gradients, between two stages.

A stage may be on any mesh: each rank of the receiving one gets the intersections of its box with
the boxes of the sending one. Where both have the same layout, this is one message from rank to
rank, without a copy. Two stages on one mesh hand over the tensor itself.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from pydist.comm.interface.checks import real_view
from pydist.errors import UsageError
from pydist.exchange.exchanger import in_memory
from pydist.exchange.memory_formats import is_channels_last
from pydist.partition import Box
from pydist.stages.messages import (
    BACKWARD,
    FORWARD,
    STOPPED,
    Route,
    StageStopped,
    TensorSpec,
)
from pydist.stages.ranks import MeshRanks, Stages, device_of

Queues = defaultdict[int, deque[Any]]
"""What is on its way between stages of one mesh, by the tag of its messages."""


class StageTransfer:
    """Messages that bring one tensor from this rank to another stage, or from there.

    Args:
        stages: the stages.
        route: the stage that has the tensor and the one that needs it.
        spec: of the tensor.
        kept: tensors and gradients on their way between stages of this mesh.
    """

    def __init__(self, stages: Stages, route: Route, spec: TensorSpec, kept: Queues) -> None:
        self._stages, self.route, self.spec = stages, route, spec
        self._owed = stages.owed[route.receiver, route.tag(BACKWARD)]
        self._kept = [kept[route.tag(direction)] for direction in (FORWARD, BACKWARD)]
        self.splits = spec.splits
        if route.is_local:
            return
        sender, receiver = stages.meshes[route.sender], stages.meshes[route.receiver]
        # Several ranks of a stage may have different formats.
        self._keeps_format = keeps_format(sender, receiver, spec.splits)
        if spec.splits is None:
            # Each rank has all of it. It travels as a row, as a box has 1 to 8 dims.
            whole = Box([0], [math.prod(spec.shape)])
            self._boxes = [whole] * sender.sample_size, [whole] * receiver.sample_size
        else:
            self.splits = receiver.splits_like(sender, spec.shape, spec.splits, spec.dims)
            self._boxes = (
                sender.boxes(spec.shape, spec.splits),
                receiver.boxes(spec.shape, self.splits),
            )

    @property
    def averages(self) -> bool:
        """Whether ranks of this stage have the whole tensor and average its gradient, together."""
        is_plain = self.spec.splits is None and not self.route.is_local
        return is_plain and self._stages.mesh.sample_size > 1

    def send(self, local: Tensor, *, lends: bool) -> None:
        """Sends this rank's shard to the target.

        Args:
            local: the shard.
            lends: whether it does not change until the target has it; see `Transport.send`.
        """
        if self.route.is_local:
            self._kept[FORWARD].append(local)
        else:
            self._send(local, FORWARD, self.spec.channels_last, lends=lends)

    def receive(self) -> Tensor:
        """Returns this rank's shard, from the source."""
        if self.route.is_local:
            kept: Tensor = self._kept[FORWARD].popleft()
            return kept
        return self._receive(FORWARD, self.spec.channels_last)

    def send_gradient(self, grad: Tensor | None, number: int) -> None:
        """Sends the gradient of this rank's shard to the source.

        Args:
            grad: the gradient; `None` if none has come.
            number: of the forward pass.
        """
        if self.route.is_local:
            self._kept[BACKWARD].append(grad)
            return
        if self.spec.splits is None:
            grad = self._averaged(grad)
        channels_last = grad is not None and self._keeps_format and is_channels_last(grad)
        found = torch.tensor([number, grad is not None, channels_last])
        tag = self.route.tag(BACKWARD)
        for rank in self._stages.fed(self.route.sender):
            self._stages.world.send(found, rank, tag)
        if grad is not None:
            self._send(grad, BACKWARD, channels_last, lends=True)  # nobody changes a gradient

    def _averaged(self, grad: Tensor | None) -> Tensor | None:
        """Returns the gradient of a plain tensor, which is the mean over a stage's ranks."""
        mine = self._stages.mesh
        if mine.sample_size == 1:
            return grad
        exists = torch.tensor([float(grad is not None)])
        mine.sample.all_reduce(exists)
        if not exists:
            return None
        if grad is None:
            grad = torch.zeros(self.spec.shape, dtype=self.spec.dtype, device=device_of(mine))
        mean = (grad / mine.sample_size).contiguous()  # before the sum, which may overflow
        mine.sample.all_reduce(mean)
        return mean

    def receive_gradient(self, number: int) -> Tensor | None:
        """Returns the gradient of this rank's shard, from the target; `None` if it has none.

        Args:
            number: of the forward pass.

        Raises:
            UsageError: the target sends the gradient of another one.
            StageStopped: the target has stopped the batch.
        """
        if self.route.is_local:
            kept: Tensor | None = self._kept[BACKWARD].popleft()
            return kept
        rank = self._stages.feeder(self.route.receiver)
        found = torch.empty(3, dtype=torch.int64)
        while True:
            with self._stages.mesh.session.timers.measure("transfer"):
                self._stages.world.recv(found, rank, self.route.tag(BACKWARD))
                theirs, exists, channels_last = found.tolist()
                if exists == STOPPED:
                    reason = self._stages.receive_bytes(rank, self.route.tag(BACKWARD))
                    if theirs >= number:
                        raise StageStopped(self.route.receiver, reason)
                    continue
                while self._owed and self._owed[0][0] < theirs:
                    self._owed.popleft()  # they were never sent
                is_stale = bool(self._owed) and self._owed[0][0] == theirs
                sent = self._owed.popleft()[1] if is_stale else self
                grad = sent._receive(BACKWARD, bool(channels_last)) if exists else None
            if theirs == number:
                return grad
            if not is_stale:
                raise UsageError(
                    f"stage {self.route.target} sends the gradient of forward pass {theirs}, and "
                    f"stage {self.route.source} needs that of forward pass {number}"
                )

    def _send(self, local: Tensor, direction: int, channels_last: bool, *, lends: bool) -> None:
        mine, start = self._stages.mesh, self._boxes[direction]
        tag, peers = self.route.tag(direction), self._stages.meshes[self._ends(direction)[1]]
        lender = local if lends else None
        if self.splits is None:
            local = local.reshape(-1)
        for here, there, part in self._messages(direction):
            if here == mine.sample_index:
                lo = start[here].lo
                index = tuple(
                    slice(a - o, b - o) for a, b, o in zip(part.lo, part.hi, lo, strict=True)
                )
                peer = peers.rank(mine.data_index, there)
                block = local[index]
                block = _rows(block) if channels_last else block
                self._stages.world.send(real_view(in_memory(block)), peer, tag, lender=lender)

    def _receive(self, direction: int, channels_last: bool) -> Tensor:
        mine, end = self._stages.mesh, self._boxes[1 - direction]
        tag, peers = self.route.tag(direction), self._stages.meshes[self._ends(direction)[0]]
        box = end[mine.sample_index]
        made: dict[str, Any] = {"dtype": self.spec.dtype, "device": device_of(mine)}
        shape = list(box.shape)
        if channels_last:
            local = torch.empty([shape[0], *shape[2:], shape[1]], **made).movedim(-1, 1)
        else:
            local = torch.empty(shape, **made)
        for there, here, part in self._messages(direction):
            if here != mine.sample_index:
                continue
            peer = peers.rank(mine.data_index, there)
            if tuple(part.shape) == tuple(local.shape):
                whole = _rows(local) if channels_last else local
                self._stages.world.recv(real_view(whole), peer, tag)
                continue
            block = torch.empty(tuple(part.shape), **made)
            self._stages.world.recv(real_view(block), peer, tag)
            index = (slice(a - o, b - o) for a, b, o in zip(part.lo, part.hi, box.lo, strict=True))
            local[tuple(index)] = block
        return local if self.splits is not None else local.view(self.spec.shape)

    def _ends(self, direction: int) -> tuple[int, int]:
        ends = self.route.sender, self.route.receiver
        return ends if direction == FORWARD else ends[::-1]

    def _messages(self, direction: int) -> Iterator[tuple[int, int, Box]]:
        """Yields sender, receiver (indices in their sample groups) and box of each message."""
        senders, receivers = self._boxes[direction], self._boxes[1 - direction]
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


def keeps_format(sender: MeshRanks, receiver: MeshRanks, splits: Any) -> bool:
    """Returns whether a tensor may stay channels-last: one rank has all of it, before and after.

    Then neither the transfer nor the convolutions beside it copy the tensor.

    Args:
        sender: ranks that have the tensor.
        receiver: ranks that need it.
        splits: of its layout; `None` for a plain tensor.
    """
    sizes = sender.sample_size, receiver.sample_size
    return splits is not None and len(splits) > 2 and max(sizes) == 1


def _rows(x: Tensor) -> Tensor:
    """Returns a channels-last tensor in the order of its memory."""
    return x.permute(0, *range(2, x.dim()), 1)
