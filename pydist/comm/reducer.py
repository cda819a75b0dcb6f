"""The gradient reducer: the mean of every parameter's gradient over all ranks, during backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from pydist.comm.adjoints import mean_ranks
from pydist.errors import NotSupported

if TYPE_CHECKING:
    from pydist.comm.handles import Work
    from pydist.comm.transport import Transport
    from pydist.mesh import Mesh

# Large enough that latency is nothing beside the transfer, small enough that the first bucket
# leaves while most of backward is still to run.
BUCKET_BYTES = 8 << 20


class _Bucket:
    """Some parameters whose gradients travel in one all-reduce."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        self.missing = len(parameters)
        self.flat: Tensor | None = None
        self.work: Work | None = None

    def start(self, transport: Transport) -> None:
        """Copies the gradients together and starts their sum; a missing one counts as zero."""
        first = self.parameters[0]
        if self.flat is None or self.flat.dtype != first.dtype:
            elements = sum(p.numel() for p in self.parameters)
            self.flat = torch.empty(elements, dtype=first.dtype, device=first.device)
        for parameter, piece in self._pieces():
            if parameter.grad is None:
                piece.zero_()
            else:
                piece.copy_(parameter.grad.detach())
        self.work = transport.all_reduce_async(self.flat)

    def finish(self, ranks: int, has_gradient: Callable[[nn.Parameter], bool]) -> None:
        """Waits, and writes the mean into the gradients."""
        assert self.work is not None
        self.work.wait()
        self.work = None
        assert self.flat is not None
        self.flat /= ranks
        for parameter, piece in self._pieces():
            if parameter.grad is None:
                if has_gradient(parameter):
                    parameter.grad = piece.clone()
            elif not parameter.grad.requires_grad:
                # One with a graph (create_graph) was reduced on its way, differentiably.
                parameter.grad.copy_(piece)

    def _pieces(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        assert self.flat is not None
        start = 0
        for parameter in self.parameters:
            stop = start + parameter.numel()
            yield parameter, self.flat[start:stop].view(parameter.shape)
            start = stop


class Reducer:
    """Reduces the gradients of a model's parameters to their mean over all ranks.

    What each rank accumulates has the true gradient as its mean over all ranks (see
    `pydist.comm.adjoints`), whatever mixture of sharded and plain uses a parameter has. Buckets
    fill in the reverse order of the parameters and start, in one fixed order, as soon as they are
    full; the rest starts at the end of backward. Gradients are final when `backward()` returns. A
    gradient that is `None` on all ranks stays `None`.

    A mean is idempotent: parameters that were reduced before (a second backward without
    `zero_grad`) come out right.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], mesh: Mesh) -> None:
        self._mesh = mesh
        self.enabled = True
        """Whether gradients are reduced at the end of a backward."""
        self._queued = False
        self._next = 0
        used = [p for p in parameters if p.requires_grad]
        self._buckets = _make_buckets(used)
        self._bucket_of = {id(p): b for b in self._buckets for p in b.parameters}
        self._order = [p for b in self._buckets for p in b.parameters]
        self._index = {id(p): i for i, p in enumerate(self._order)}
        # The nodes are kept: a parameter's AccumulateGrad dies with its last user.
        self._nodes = [torch.autograd.graph.get_gradient_edge(p).node for p in self._order]
        me = weakref.ref(self)
        self._hooks = [h for i, p in enumerate(self._order) for h in _register_hooks(p, i, me)]
        mesh.reducers[:] = [*(r for r in mesh.reducers if r() is not None), me]

    def release(self) -> None:
        """Takes the hooks off the parameters."""
        for hook in self._hooks:
            hook.remove()
        self._mesh.reducers[:] = [r for r in self._mesh.reducers if r() is not self]

    def forget_unfinished(self) -> None:
        """Starts afresh after a backward that raised."""
        if self._queued:
            self._reset()

    def expect_end_of_backward(self) -> None:
        """Asks the engine, once, to call when the running backward is over."""
        if self._queued or not self.enabled:
            return
        if any(_fate(node) == "accumulated" for node in self._nodes):
            self._queued = True
            Variable._execution_engine.queue_callback(self._finish)

    def _before_accumulation(self, grad: Tensor, index: int) -> Tensor | None:
        if torch.is_grad_enabled() or _fate(self._nodes[index]) == "returned":
            return mean_ranks(grad, self._mesh.world)
        return None

    def _after_accumulation(self, parameter: nn.Parameter) -> None:
        if not self.enabled:
            return
        if parameter.grad is not None and parameter.grad.layout != torch.strided:
            raise NotSupported(f"a gradient of layout {parameter.grad.layout}; dense is possible")
        self.expect_end_of_backward()
        bucket = self._bucket_of[id(parameter)]
        bucket.missing -= 1
        while self._next < len(self._buckets) and self._buckets[self._next].missing <= 0:
            self._start_next()

    def _start_next(self) -> None:
        with torch.no_grad():
            self._buckets[self._next].start(self._mesh.world)
        self._next += 1

    @torch.no_grad()
    def _finish(self) -> None:
        try:
            with self._mesh.timers.measure("gradients"):
                while self._next < len(self._buckets):
                    self._start_next()
                held = torch.tensor([p.grad is not None for p in self._order], dtype=torch.int32)
                self._mesh.world.all_reduce(held, "max")
                for bucket in self._buckets:
                    bucket.finish(self._mesh.size, lambda p: bool(held[self._index[id(p)]]))
        finally:
            self._reset()

    def _reset(self) -> None:
        self._queued = False
        self._next = 0
        for bucket in self._buckets:
            bucket.missing = len(bucket.parameters)


def _make_buckets(parameters: list[nn.Parameter]) -> list[_Bucket]:
    buckets: list[list[nn.Parameter]] = []
    size = 0
    for parameter in reversed(parameters):
        nbytes = parameter.numel() * parameter.element_size()
        last = buckets[-1][-1] if buckets else None
        fits = (
            last is not None
            and (last.dtype, last.device) == (parameter.dtype, parameter.device)
            and size + nbytes <= BUCKET_BYTES
        )
        if fits:
            buckets[-1].append(parameter)
            size += nbytes
        else:
            buckets.append([parameter])
            size = nbytes
    return [_Bucket(b) for b in buckets]


def _fate(node: Any) -> str:
    """What the running backward does with a parameter's gradient, by its AccumulateGrad node.

    Returns:
        "accumulated" into `.grad`, "returned" by `autograd.grad`, or "none" where the parameter
        takes no part.
    """
    try:
        return "accumulated" if torch._C._will_engine_execute_node(node) else "none"
    except RuntimeError:
        # The engine refuses the question for what it captures.
        return "returned"


def _register_hooks(
    parameter: nn.Parameter, index: int, reducer: weakref.ref[Reducer]
) -> list[Any]:
    """Hooks that hold neither the reducer nor the parameter: that would keep both alive."""

    def before(grad: Tensor) -> Tensor | None:
        alive = reducer()
        return None if alive is None else alive._before_accumulation(grad, index)

    def after(p: Tensor) -> None:
        alive = reducer()
        if alive is not None:
            alive._after_accumulation(p)  # type: ignore[arg-type]

    return [
        parameter.register_hook(before),
        parameter.register_post_accumulate_grad_hook(after),
    ]
