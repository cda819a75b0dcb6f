"""Transfers tensors, and their gradients, between two stages.

A stage may be on any mesh: each rank of the receiving one gets the intersections of its box with
the boxes of the sending one. Where both have the same layout, this is one message from rank to
rank, without a copy. Two stages on one mesh hand over the tensor itself.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from pydist.errors import UsageError
from pydist.exchange.memory_formats import is_channels_last
from pydist.layout import Layout
from pydist.partition import Box
from pydist.stages.messages import (
    BACKWARD,
    FORWARD,
    MARK_BYTES,
    STOP,
    STOPPED,
    PassMark,
    Route,
    StageStopped,
    TensorSpec,
)
from pydist.stages.ranks import MeshRanks, Stages, device_of
from pydist.tensor import ShardedTensor, local_of

Queues = defaultdict[int, deque[Any]]
"""What is on its way between stages of one mesh, by the tag of its messages."""


class StageTransfer:
    """Messages that bring one tensor from this rank to another stage, or from there.

    Args:
        stages: the stages.
        route: the stage that has the tensor and the one that needs it.
        spec: of the tensor.
        kept: tensors and gradients on their way between stages of this mesh.
        owed: gradients of passes that raised, which may still come; see `Transfers.drop`.
    """

    def __init__(
        self, stages: Stages, route: Route, spec: TensorSpec, kept: Queues, owed: Queues
    ) -> None:
        self._stages, self.route, self.spec = stages, route, spec
        self._owed = owed[route.tag(BACKWARD)]
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
            self.splits = receiver.splits_like(sender, spec.shape, spec.splits)
            self._boxes = (
                sender.boxes(spec.shape, spec.splits),
                receiver.boxes(spec.shape, self.splits),
            )

    def send(self, local: Tensor) -> None:
        """Sends this rank's shard to the target."""
        if self.route.is_local:
            self._kept[FORWARD].append(local)
        else:
            self._send(local, FORWARD, self.spec.channels_last)

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
        mine, source = self._stages.mesh, self._stages.meshes[self.route.sender]
        if self.spec.splits is None:
            grad = self._averaged(grad)
        channels_last = grad is not None and self._keeps_format and is_channels_last(grad)
        found = torch.tensor([number, grad is not None, channels_last])
        tag = self.route.tag(BACKWARD)
        for index in range(source.sample_size):
            if index % mine.sample_size == mine.sample_index:
                self._stages.world.send(found, source.rank(mine.data_index, index), tag)
        if grad is not None:
            self._send(grad, BACKWARD, channels_last)

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
        mine, target = self._stages.mesh, self._stages.meshes[self.route.receiver]
        rank = target.rank(mine.data_index, mine.sample_index % target.sample_size)
        found = torch.empty(3, dtype=torch.int64)
        while True:
            with mine.session.timers.measure("transfer"):
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

    def _send(self, local: Tensor, direction: int, channels_last: bool) -> None:
        mine, start = self._stages.mesh, self._boxes[direction]
        tag, peers = self.route.tag(direction), self._stages.meshes[self._ends(direction)[1]]
        if self.splits is None:
            local = local.reshape(-1)
        for here, there, part in self._messages(direction):
            if here == mine.sample_index:
                lo = start[here].lo
                index = tuple(
                    slice(a - o, b - o) for a, b, o in zip(part.lo, part.hi, lo, strict=True)
                )
                peer = peers.rank(mine.data_index, there)
                block = _rows(local[index]) if channels_last else local[index].contiguous()
                self._stages.world.send(block, peer, tag)

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
                self._stages.world.recv(_rows(local) if channels_last else local, peer, tag)
                continue
            block = torch.empty(tuple(part.shape), **made)
            self._stages.world.recv(block, peer, tag)
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


class Transfers:
    """Transfers that connect stages of this rank's mesh with others, by the spec of the tensor."""

    def __init__(self, stages: Stages) -> None:
        self._stages = stages
        self._known: dict[tuple[Route, TensorSpec], StageTransfer] = {}
        self._kept: Queues = defaultdict(deque)
        self._headers: Queues = defaultdict(deque)
        self._owed: Queues = defaultdict(deque)
        self._dropped = set[int]()
        self._seen: dict[Route, bool] = {}  # whether a gradient takes it back

    def see(self, route: Route, *, needs_grad: bool) -> None:
        """Records that a tensor takes a route; on all ranks, which all see all calls."""
        self._seen[route] = needs_grad or self._seen.get(route, False)

    def send(self, value: Tensor, route: Route, call: str, mark: PassMark) -> StageTransfer:
        """Sends a sharded or plain tensor to another stage, for a call of a forward pass.

        Args:
            value: the tensor; on this stage.
            route: from this stage to the other.
            call: names the call, for errors.
            mark: of the forward pass.
        """
        if isinstance(value, ShardedTensor):
            local, splits = local_of(value), tuple(value.layout.splits)
        else:
            local, splits = value, None
        # Whatever the mode of this call is: later ones on the other stage may have a gradient.
        needs_grad = local.requires_grad
        sender, receiver = self._stages.own, self._stages.meshes[route.receiver]
        in_format = keeps_format(sender, receiver, splits) and is_channels_last(local)
        spec = TensorSpec(call, tuple(value.shape), value.dtype, splits, needs_grad, in_format)
        transfer = self._find(route, spec)
        tag = route.tag(FORWARD)
        if route.is_local:
            self._headers[tag].append((mark, spec))
        else:
            mine, message = self._stages.mesh, mark.to_bytes() + spec.to_bytes()
            for index in range(receiver.sample_size):
                if index % mine.sample_size == mine.sample_index:
                    rank = receiver.rank(mine.data_index, index)
                    self._stages.send_bytes(message, rank, tag)
        transfer.send(local.detach())
        return transfer

    def receive(
        self, route: Route, call: str, mark: PassMark, shape: tuple[int, ...]
    ) -> tuple[StageTransfer, Tensor]:
        """Receives a tensor from another stage; returns this rank's shard.

        Args:
            route: from the other stage to this one.
            call: the call that needs it.
            mark: of the forward pass.
            shape: of the tensor, as this stage knows it.

        Raises:
            UsageError: the other stage sends it for another call, or has another shape.
        """
        tag = route.tag(FORWARD)
        if route.is_local and not self._headers[tag]:
            raise UsageError(
                f"the network makes different calls in two passes over one batch: stage "
                f"{route.target} needs a tensor for {call} that stage {route.source} has not made"
            )
        if route.is_local:
            theirs, spec = self._headers[tag].popleft()
        else:
            mine, sender = self._stages.mesh, self._stages.meshes[route.sender]
            rank = sender.rank(mine.data_index, mine.sample_index % sender.sample_size)
            while True:
                with mine.session.timers.measure("transfer"):
                    message = self._stages.receive_bytes(rank, tag)
                theirs = PassMark.from_bytes(message)
                if message.startswith(STOP, MARK_BYTES):
                    if theirs.number >= mark.number:
                        raise StageStopped(route.sender, message[MARK_BYTES + len(STOP) :])
                    continue
                spec = TensorSpec.from_bytes(message[MARK_BYTES:])
                if theirs.number not in self._dropped:
                    break
                self._find(route, spec).receive()
        here, there = f"stage {route.target}", f"stage {route.source}"
        if (spec.call, theirs.number) != (call, mark.number):
            raise UsageError(
                f"the stages make different calls: {here} needs a tensor for {call} in forward "
                f"pass {mark.number}, and {there} sends one for {spec.call} in forward pass "
                f"{theirs.number}"
            )
        if theirs.calls != mark.calls:
            raise UsageError(
                f"the stages make different calls: before {call} ranks of {here} and of {there} "
                "have made other ones on tensors of the network, or one trains and one evaluates; "
                "what one rank alone prints or measures in a forward pass is such a call"
            )
        if (spec.shape, theirs.batch) != (shape, mark.batch):
            raise UsageError(
                f"the stages have different batches: for {call} {here} expects a tensor of shape "
                f"{list(shape)}, and {there} has {list(spec.shape)}, or their values differ; give "
                "all ranks of one data index the same inputs and targets"
            )
        transfer = self._find(route, spec)
        with self._stages.mesh.session.timers.measure("transfer"):
            return transfer, transfer.receive()

    def sharded(self, transfer: StageTransfer, local: Tensor, origin: Any) -> Tensor:
        """Returns a received shard as a tensor of this stage.

        Args:
            transfer: what was received.
            local: this rank's shard, or the plain tensor.
            origin: what the pass's tensors inherit; see `pydist.tensor.Origin`.
        """
        if transfer.splits is None:
            return local
        layout = Layout(self._stages.mesh, transfer.spec.shape, transfer.splits)
        if origin is None or transfer.spec.shape[:1] != (origin.sizes.own,):
            return ShardedTensor.of_shard(local, layout)
        return ShardedTensor(local, layout, origin)

    def drop(self, first: int, last: int, owed: Sequence[tuple[int, StageTransfer]]) -> None:
        """Lets messages of these forward passes be dropped, after one of them has raised.

        Args:
            first: the first of them.
            last: the last.
            owed: the number and the transfer of each gradient that other stages may have sent.
        """
        self._dropped.update(range(first, last + 1))
        for number, transfer in owed:
            self._owed[transfer.route.tag(BACKWARD)].append((number, transfer))

    def stop(self, last: int, reason: str) -> None:
        """Tells all meshes that wait for this one that it sends no more of a batch.

        Args:
            last: the batch's last forward pass.
            reason: the error of this rank.
        """
        stages, mine, text = self._stages, self._stages.mesh, reason.encode()
        for route, returns in self._seen.items():
            ends = {FORWARD: (route.sender, route.receiver)}
            if returns and torch.is_grad_enabled():
                ends[BACKWARD] = route.receiver, route.sender
            for direction, (sender, receiver) in ends.items():
                if sender != stages.index or route.is_local:
                    continue
                peers, tag = stages.meshes[receiver], route.tag(direction)
                for index in range(peers.sample_size):
                    if index % mine.sample_size != mine.sample_index:
                        continue
                    rank = peers.rank(mine.data_index, index)
                    if direction == FORWARD:
                        message = PassMark(last, 0, 0).to_bytes() + STOP + text
                        stages.send_bytes(message, rank, tag)
                    else:
                        stages.world.send(torch.tensor([last, STOPPED, 0]), rank, tag)
                        stages.send_bytes(text, rank, tag)

    def forget(self) -> None:
        """Forgets what a failed batch has left between stages of this mesh."""
        for each in (*self._kept.values(), *self._headers.values()):
            each.clear()

    def _find(self, route: Route, spec: TensorSpec) -> StageTransfer:
        found = self._known.get((route, spec))
        if found is None:
            found = StageTransfer(self._stages, route, spec, self._kept, self._owed)
            self._known[route, spec] = found
        return found


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


def origin_of(values: Sequence[Any]) -> Any:
    """Returns the origin of the first sharded tensor, which a forward pass passes on."""
    return next((x._origin for x in values if isinstance(x, ShardedTensor)), None)
