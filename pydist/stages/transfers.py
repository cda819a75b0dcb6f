"""Transfers between this rank's mesh and others, and the messages of batches that failed."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from pydist.errors import UsageError
from pydist.exchange.memory_formats import is_channels_last
from pydist.layout import Layout
from pydist.stages.messages import (
    BACKWARD,
    END,
    FORWARD,
    MARK_BYTES,
    STOP,
    STOPPED,
    PassMark,
    Route,
    StageStopped,
    TensorSpec,
)
from pydist.stages.ranks import Stages
from pydist.stages.transfer import Queues, StageTransfer, keeps_format
from pydist.tensor import ShardedTensor, local_of


class Transfers:
    """Transfers that connect stages of this rank's mesh with others, by the spec of the tensor.

    Args:
        stages: the stages.
        dims: number of spatial dims of the network.
        routes: that tensors take according to the plan.
    """

    def __init__(self, stages: Stages, dims: int, routes: Iterable[Route]) -> None:
        self._stages, self._dims = stages, dims
        self._known: dict[tuple[Route, TensorSpec], StageTransfer] = {}
        self._kept: Queues = defaultdict(deque)
        self._headers: Queues = defaultdict(deque)
        self._planned = dict.fromkeys(routes, True)  # until passes have shown them all
        self._seen: dict[Route, bool] = {}  # whether a gradient takes it back

    def see(self, route: Route, *, needs_grad: bool) -> None:
        """Records that a tensor takes a route; on all ranks, which all see all calls."""
        self._seen[route] = needs_grad or self._seen.get(route, False)

    def send(
        self, value: Tensor, route: Route, call: str, mark: PassMark, *, lends: bool
    ) -> StageTransfer:
        """Sends a sharded or plain tensor to another stage, for a call of a forward pass.

        Args:
            value: the tensor; on this stage.
            route: from this stage to the other.
            call: names the call, for errors.
            mark: of the forward pass.
            lends: whether the value does not change until the other stage has it.
        """
        if isinstance(value, ShardedTensor):
            local, splits = local_of(value), tuple(value.layout.splits)
        else:
            local, splits = value, None
        # Whatever the mode of this call is: later ones on the other stage may have a gradient.
        needs_grad = local.requires_grad
        sender, receiver = self._stages.own, self._stages.meshes[route.receiver]
        in_format = keeps_format(sender, receiver, splits) and is_channels_last(local)
        spec = TensorSpec(
            call, tuple(value.shape), value.dtype, splits, needs_grad, in_format, self._dims
        )
        transfer = self._find(route, spec)
        tag = route.tag(FORWARD)
        if route.is_local:
            self._headers[tag].append((mark, spec))
        else:
            message = mark.to_bytes() + spec.to_bytes()
            for rank in self._stages.fed(route.receiver):
                self._stages.send_bytes(message, rank, tag)
        transfer.send(local.detach(), lends=lends)
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
            rank = self._stages.feeder(route.sender)
            while True:
                with self._stages.mesh.session.timers.measure("transfer"):
                    message = self._stages.receive_bytes(rank, tag)
                theirs = PassMark.from_bytes(message)
                if message.startswith(STOP, MARK_BYTES):
                    if theirs.number >= mark.number:
                        raise StageStopped(route.sender, message[MARK_BYTES + len(STOP) :])
                    continue
                spec = TensorSpec.from_bytes(message[MARK_BYTES:])
                if theirs.number not in self._stages.dropped:
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
                "have made other ones on tensors of the network, or one trains and one evaluates, "
                "or one alone has changed weights after pipe.gather(); what one rank alone prints "
                "or measures in a forward pass is such a call"
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
        if origin is None:
            return ShardedTensor.of_shard(local, layout)
        return ShardedTensor(local, layout, origin)

    def drop(self, first: int, last: int, owed: Sequence[tuple[int, StageTransfer]]) -> None:
        """Lets messages of these forward passes be dropped, after one of them has raised.

        Args:
            first: the first of them.
            last: the last.
            owed: the number and the transfer of each gradient that other stages may have sent.
        """
        self._stages.dropped.update(range(first, last + 1))
        for number, transfer in owed:
            route = transfer.route
            self._stages.owed[route.receiver, route.tag(BACKWARD)].append((number, transfer))

    def has_seen_all(self) -> None:
        """Notes that a batch was complete: its passes have taken all routes, and back."""
        self._planned.clear()

    def end(self, last: int, reason: str = "") -> None:
        """Tells all meshes that this one has made all passes of a batch, or has stopped it.

        Args:
            last: the batch's last forward pass.
            reason: the error of this rank.
        """
        stages, message = self._stages, PassMark(last, 0, 0).to_bytes() + reason.encode()
        for mesh in range(len(stages.meshes)):
            for rank in stages.fed(mesh) if mesh != stages.index else ():
                stages.send_bytes(message, rank, END)

    def await_ends(self, last: int) -> None:
        """Waits until all meshes have made all passes of a batch.

        Args:
            last: the batch's last forward pass.

        Raises:
            StageStopped: one of them has stopped it, perhaps after its last message to this one.
        """
        stages = self._stages
        for mesh in range(len(stages.meshes)):
            number = 0 if mesh != stages.index else last
            while number < last:  # of a batch that has failed
                message = stages.receive_bytes(stages.feeder(mesh), END)
                number = PassMark.from_bytes(message).number
                if number >= last and len(message) > MARK_BYTES:
                    raise StageStopped(mesh, message[MARK_BYTES:])

    def stop(self, last: int, reason: str) -> None:
        """Tells all meshes that wait for this one that it sends no more of a batch.

        Args:
            last: the batch's last forward pass.
            reason: the error of this rank.
        """
        stages, text = self._stages, reason.encode()
        planned, seen = self._planned, self._seen
        for route in planned | seen:
            returns = planned.get(route, False) or seen.get(route, False)
            ends = {FORWARD: (route.sender, route.receiver)}
            if returns and torch.is_grad_enabled():
                ends[BACKWARD] = route.receiver, route.sender
            for direction, (sender, receiver) in ends.items():
                if sender != stages.index or route.is_local:
                    continue
                tag = route.tag(direction)
                for rank in stages.fed(receiver):
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
            found = StageTransfer(self._stages, route, spec, self._kept)
            self._known[route, spec] = found
        return found


def origin_of(values: Sequence[Any]) -> Any:
    """Returns the origin of the first sharded tensor, which a forward pass passes on."""
    return next((x._origin for x in values if isinstance(x, ShardedTensor)), None)
