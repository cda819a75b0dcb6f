"""The tensors that a micro-batch brings from stage to stage, and their gradients."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pydist import marks
from pydist.gradients.rows import is_dense
from pydist.stages.messages import PassMark, Route
from pydist.stages.ranks import Stages
from pydist.stages.transfer import StageTransfer
from pydist.stages.transfers import Transfers
from pydist.tensor import ShardedTensor, local_of


@dataclass
class _Gradient:
    """The gradient of a tensor that was sent or received, on its way.

    Attributes:
        transfer: the tensor's messages.
        grad: the gradient, while it is here.
        has_come: whether it was here, or is known not to exist.
        is_sent: whether it was sent to the stage that has sent the tensor.
        act: called while a backward pass runs: receives the gradient of a tensor that was sent, or
            is told that the gradient of a received one has come.
    """

    transfer: StageTransfer
    grad: Tensor | None = None
    has_come: bool = False
    is_sent: bool = False
    act: Callable[[_Gradient], None] | None = None


class _Sent(NamedTuple):
    """A tensor that was sent, as a place in the graph: the graph alone decides how long it lives.

    Attributes:
        gradient: its gradient.
        end: the result of `_End` of the tensor.
    """

    gradient: _Gradient
    end: Tensor

    @property
    def transfer(self) -> StageTransfer:
        """Messages that bring the tensor."""
        return self.gradient.transfer


class _End(torch.autograd.Function):
    """Function whose empty result is the root of the backward pass through a sent tensor.

    Torch keeps the gradients with which a backward pass begins until its end. That of this end has
    no elements either, and the tensor's own is freed when it was used.
    """

    @staticmethod
    def forward(ctx: Any, local: Tensor, gradient: _Gradient) -> Tensor:
        ctx.gradient = gradient
        return local.new_empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        gradient: _Gradient = ctx.gradient
        if gradient.act is not None:
            gradient.act(gradient)
        found, gradient.grad = gradient.grad, None
        return found, None


class _ReceivedResult(torch.autograd.Function):
    """Received tensor that is neither a leaf nor a view, so that it may be changed."""

    @staticmethod
    def forward(ctx: Any, start: Tensor, local: Tensor, gradient: _Gradient) -> Tensor:
        ctx.gradient = gradient
        return local.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        gradient: _Gradient = ctx.gradient
        gradient.grad, gradient.has_come = grads[0], True
        del grads
        if gradient.act is not None:
            gradient.act(gradient)
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
        self._received: list[_Gradient] = []  # the graph alone keeps the tensors
        self._messages: list[tuple[StageTransfer, Tensor | None]] = []  # all, in order
        self._known = iter(()) if repeats is None else iter(repeats._messages)
        self._repeats = repeats is not None

    def send(self, value: Tensor, route: Route, call: str, mark: PassMark, *, lends: bool) -> None:
        """Sends a tensor to the stage that needs it; see `Transfers.send`."""
        if self._repeats:
            transfer = next(self._known)[0]
        else:
            self._note(call, mark)
            transfer = self._transfers.send(value, route, call, mark, lends=lends)
            if self._keeps:
                self._messages.append((transfer, None))
        if transfer.spec.needs_grad:
            local = local_of(value) if isinstance(value, ShardedTensor) else value
            gradient = _Gradient(transfer)
            with torch.enable_grad():
                self.sent.append(_Sent(gradient, _End.apply(local, gradient)))
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
            received = _Gradient(transfer)
            self._received.append(received)
            with torch.enable_grad():
                start = torch.empty(0, requires_grad=True)
                local = _ReceivedResult.apply(start, local.detach(), received)
        return self._transfers.sharded(transfer, local, origin)

    def run_backward(self, loss: Tensor | None, number: int) -> None:
        """Runs the backward pass between the tensors sent and received.

        A gradient is received when the pass needs it, and sent when it has come, so that it is not
        in memory meanwhile. Those of one route go in the order of the tensors.

        Args:
            loss: the end of the graph on the last stage; elsewhere it ends in tensors sent.
            number: of the forward pass.
        """
        returning, receiving = partial(self._return, number), partial(self._receive, number)
        for received in self._received:
            received.act = returning
        try:
            if loss is not None:
                loss.backward()
            else:
                self._run_from_sent(receiving)
        finally:
            for received in self._received:
                received.act = None
        returning(None)
        self.forget()

    def _run_from_sent(self, receive: Callable[[_Gradient], None]) -> None:
        """Runs the backward pass from the tensors sent.

        Args:
            receive: receives a gradient.
        """
        ends: list[Any] = [each.end.grad_fn for each in self.sent]
        places = [end.next_functions[0][0] for end in ends]
        # A pass that begins elsewhere reaches these. A GPU's passes, of all threads that are
        # ranks, run in one thread, which none of them may keep waiting.
        nexts = [n for p in places for n, _ in p.next_functions] if self._waits_in_backward else []
        later = {node for node, _ in marks.below(nexts)}
        for (gradient, _), place in zip(self.sent, places, strict=True):
            if place not in later:
                receive(gradient)
        if any(each.has_come and each.grad is None for each, _ in self.sent):
            for gradient, _ in self.sent:
                receive(gradient)
        roots = []
        for (gradient, root), end, place in zip(self.sent, ends, places, strict=True):
            if not gradient.has_come:
                # The engine runs nodes by descending number: this one after the calls that use the
                # tensor, as late as the call that made it.
                end._set_sequence_nr(place._sequence_nr())
                gradient.act = receive
            if not gradient.has_come or gradient.grad is not None:
                roots.append(root)
        try:
            if roots:
                torch.autograd.backward(roots, [torch.zeros_like(root) for root in roots])
        finally:
            for gradient, _ in self.sent:
                gradient.act = None

    @property
    def _waits_in_backward(self) -> bool:
        return len(self.sent) > 1 and all(each.end.device.type == "cpu" for each in self.sent)

    def _receive(self, number: int, wanted: _Gradient) -> None:
        """Receives a gradient, after those of tensors sent before it on its route."""
        for gradient, _ in self.sent:
            if wanted.has_come:
                break
            transfer = gradient.transfer
            if transfer.route == wanted.transfer.route and not gradient.has_come:
                gradient.grad = transfer.receive_gradient(number)
                gradient.has_come = True
                self.owed.remove(transfer)

    def _return(self, number: int, came: _Gradient | None) -> None:
        """Sends the gradients that have come, in the order of each route, or all at the end.

        Args:
            number: of the forward pass.
            came: the last one that has come; `None` at the end of the pass.
        """
        waiting = set[Route]()
        for each in self._received:
            if each.is_sent:
                continue
            may = each.has_come and not each.transfer.averages
            if came is None or (may and each.transfer.route not in waiting):
                each.transfer.send_gradient(each.grad, number)
                each.grad, each.is_sent = None, True
            else:
                waiting.add(each.transfer.route)

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
