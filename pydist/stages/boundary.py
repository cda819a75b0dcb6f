"""The tensors that a micro-batch brings from stage to stage, and their gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from pydist.gradients.rows import is_dense
from pydist.stages.messages import PassMark, Route
from pydist.stages.ranks import Stages
from pydist.stages.transfer import StageTransfer
from pydist.stages.transfers import Transfers
from pydist.tensor import ShardedTensor, local_of


class _Sent(NamedTuple):
    """A tensor that was sent, as a place in the graph: the graph alone decides how long it lives.

    Attributes:
        transfer: its messages.
        edge: where its gradient enters the graph.
    """

    transfer: StageTransfer
    edge: GradientEdge


@dataclass
class _Received:
    """A tensor that was received, by its gradient: the graph alone keeps the tensor."""

    transfer: StageTransfer
    grad: Tensor | None = None


class _ReceivedResult(torch.autograd.Function):
    """Received tensor that is neither a leaf nor a view, so that it may be changed."""

    @staticmethod
    def forward(ctx: Any, start: Tensor, local: Tensor, received: _Received) -> Tensor:
        ctx.received = received
        return local.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.received.grad = grads[0]
        return None, None, None


class Boundary:
    """Boundary of a stage for one micro-batch: the tensors that it sends and receives.

    Args:
        stages: the stages.
        transfers: the messages between stages.
        repeats: the boundary of the forward pass that this one repeats, without messages.
        keeps: whether messages are kept, to repeat the forward pass.
    """

    def __init__(
        self, stages: Stages, transfers: Transfers, repeats: Boundary | None, *, keeps: bool
    ) -> None:
        self._stages, self._transfers, self._keeps = stages, transfers, keeps
        self.owed: list[StageTransfer] = [] if repeats is None else repeats.owed
        """Transfers whose gradients have not been received, in order."""
        self.sent: list[_Sent] = []
        """Tensors whose gradients the backward pass begins with."""
        self._received: list[_Received] = []
        self._messages: list[tuple[StageTransfer, Tensor | None]] = []  # all, in order
        self._known = iter(()) if repeats is None else iter(repeats._messages)
        self._repeats = repeats is not None

    def send(self, value: Tensor, route: Route, call: str, mark: PassMark) -> None:
        """Sends a tensor to the stage that needs it; see `Transfers.send`."""
        if self._repeats:
            transfer = next(self._known)[0]
        else:
            self._note(call, mark)
            transfer = self._transfers.send(value, route, call, mark)
            if self._keeps:
                self._messages.append((transfer, None))
        if transfer.spec.needs_grad:
            local = local_of(value) if isinstance(value, ShardedTensor) else value
            self.sent.append(_Sent(transfer, get_gradient_edge(local)))
            if not self._repeats:
                self.owed.append(transfer)

    def receive(self, route: Route, call: str, mark: PassMark, meta: Tensor, origin: Any) -> Tensor:
        """Receives a tensor from the stage that has it; see `Transfers.receive`.

        Args:
            route: from the other stage to this one.
            call: the call that needs it.
            mark: of the forward pass.
            meta: its shape and strides, as this stage knows them.
            origin: what the pass's tensors inherit; see `pydist.tensor.Origin`.
        """
        if self._repeats:
            transfer, kept = next(self._known)
            assert kept is not None
            local = kept
        else:
            self._note(call, mark)
            transfer, local = self._transfers.receive(route, call, mark, tuple(meta.shape))
            if transfer.splits is None:
                local = _in_order_of(local, meta)
            if self._keeps:
                self._messages.append((transfer, local.detach()))
        if transfer.spec.needs_grad:
            received = _Received(transfer)
            self._received.append(received)
            with torch.enable_grad():
                start = torch.empty(0, requires_grad=True)
                local = _ReceivedResult.apply(start, local.detach(), received)
        return self._transfers.sharded(transfer, local, origin)

    def run_backward(self, loss: Tensor | None, number: int) -> None:
        """Runs the backward pass between the tensors sent and received.

        Args:
            loss: the end of the graph on the last stage; elsewhere it ends in tensors sent.
            number: of the forward pass.
        """
        if loss is not None:
            loss.backward()
        else:
            pairs = [(each.edge, each.transfer.receive_gradient(number)) for each in self.sent]
            edges = [edge for edge, grad in pairs if grad is not None]
            grads = [grad for _, grad in pairs if grad is not None]
            del pairs
            if edges:
                torch.autograd.backward(edges, grads)
        for received in self._received:
            received.transfer.send_gradient(received.grad, number)
            received.grad = None
        self.forget()

    def forget(self) -> None:
        """Forgets the places of tensors in the graph."""
        self.sent.clear()
        self._received.clear()

    def _note(self, call: str, mark: PassMark) -> None:
        """Lets the ranks of the stage compare the calls that they have made before a message."""
        sample = self._stages.mesh.sample
        if sample.size > 1:
            calls = mark.to_bytes()
            sample.ledger.note(sample, ("message between stages", call, calls), waits=False)


def _in_order_of(local: Tensor, meta: Tensor) -> Tensor:
    """Returns a plain tensor with the strides that all stages know, as `view` depends on them."""
    if local.stride() == meta.stride() or not is_dense(meta):
        return local
    return torch.empty_strided(
        meta.shape, meta.stride(), dtype=local.dtype, device=local.device
    ).copy_(local)
