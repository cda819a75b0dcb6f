"""The gradient reducer: the mean of every parameter's gradient over all ranks, during backward."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from pydist import memory
from pydist.comm.exchange.adjoints import mean_ranks
from pydist.comm.gradients.buckets import make_buckets
from pydist.comm.gradients.held import HeldGradients
from pydist.comm.gradients.scattered import Family, ScatteredGradient
from pydist.comm.gradients.scattered_bucket import Part, ScatteredBucket
from pydist.errors import NotSupported

if TYPE_CHECKING:
    from pydist.comm.interface.transport import Transport
    from pydist.mesh import Mesh


class Reducer:
    """Reduces the gradients of a model's parameters to their mean over all ranks.

    What each rank accumulates has the true gradient as its mean over all ranks (see
    `pydist.comm.exchange.adjoints`), whatever mixture of sharded and plain uses a parameter has.
    Buckets fill in the reverse order of the parameters and start, in one fixed order, as soon as
    they are full; the rest starts at the end of backward. Gradients are final when `backward()`
    returns; in between they are not to be touched, as large ones are summed where they lie. A
    gradient that is `None` on all ranks stays `None`.

    A mean is idempotent: parameters that were reduced before (a second backward without
    `zero_grad`) come out right.

    Parameters whose optimizer step is shared by the ranks (`pydist.optim.sharded`) are scattered:
    each rank gets the mean of its own part, and `.grad` becomes a `ScatteredGradient`. What it has
    accumulated for the other ranks is freed when they have it, if that is seen while backward runs.

    Args:
        parameters: of the model; those that require a gradient are taken up.
        mesh: the ranks.
        transport: over all ranks of the mesh, used by nothing else: a rank without work starts its
            buckets later than the others, behind exchanges that they start after theirs.
        is_scattered: which ones are.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        mesh: Mesh,
        transport: Transport,
        is_scattered: Callable[[nn.Parameter], bool] = lambda _: False,
    ) -> None:
        self._mesh = mesh
        self._transport = transport
        self.enabled = True
        """Whether gradients are reduced at the end of a backward."""
        self._queued = False
        self._next = self._released = 0  # of the buckets: the first that has not started, ...
        # One rank has the mean already.
        used = [p for p in parameters if p.requires_grad and mesh.size > 1]
        self._buckets = make_buckets(used, transport, is_scattered)
        self.scattered = [b for b in self._buckets if isinstance(b, ScatteredBucket)]
        """The buckets of scattered parameters, in the order in which backward completes them."""
        self.parts: dict[int, Part] = {id(p): part for b in self.scattered for p, part in b.parts()}
        """By the id of a scattered parameter: which part of it is whose."""
        self._bucket_of = {id(p): b for b in self._buckets for p in b.parameters}
        self._order = [p for b in self._buckets for p in b.parameters]
        self._index = {id(p): i for i, p in enumerate(self._order)}
        self._held = HeldGradients(transport)
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
            self._abandon(wait=True)

    def forget_capture(self) -> None:
        """Starts afresh after a capture that failed: see `Transport.forget_capture`."""
        self._transport.forget_capture()
        self._abandon(wait=False)

    def _abandon(self, *, wait: bool) -> None:
        for bucket in self._buckets:
            bucket.abandon(wait=wait)
        self._reset()

    def expect_end_of_backward(self) -> None:
        """Asks the engine, once, to call when the running backward is over."""
        if self._queued or not self.enabled:
            return
        if any(_fate(node) == "accumulated" for node in self._nodes):
            self._queued = True
            Variable._execution_engine.queue_callback(self._finish)

    @torch.no_grad()
    def gather_gradients(self) -> None:
        """Makes ordinary gradients, final and equal, of scattered ones. Collective."""
        with self._mesh.timers.measure("gradients"):
            for bucket in self.scattered:
                bucket.gather_gradients()

    @torch.no_grad()
    def start_gathering_values(self, bucket: ScatteredBucket) -> None:
        """Starts to collect a bucket's parameters, of which each rank has changed its part."""
        with self._mesh.timers.measure("gradients"):
            bucket.start_gathering_values()
            self._transport.progress()

    @torch.no_grad()
    def finish_gathering_values(self, bucket: ScatteredBucket, changed: Collection[int]) -> None:
        """Waits until a bucket's parameters are there. Collective.

        Args:
            bucket: the bucket.
            changed: ids of the parameters that may have new values.
        """
        with self._mesh.timers.measure("gradients"):
            bucket.finish_gathering_values(changed)

    def _before_accumulation(self, grad: Tensor, index: int) -> Tensor | None:
        returned = _fate(self._nodes[index]) == "returned"
        parameter = self._order[index]
        if not returned and isinstance(parameter.grad, ScatteredGradient):
            if torch.is_grad_enabled():
                self.gather_gradients()  # what is added to it is the mean as well
            else:
                self._bucket_of[id(parameter)].set_aside(parameter)
        if returned or torch.is_grad_enabled():
            return mean_ranks(grad, self._mesh, self._mesh.axes, "gradients")
        return None

    def _after_accumulation(self, parameter: nn.Parameter) -> None:
        self._transport.progress()
        bucket = self._bucket_of[id(parameter)]
        if not self.enabled:
            bucket.put_back(parameter)
            return
        if parameter.grad is not None and parameter.grad.layout != torch.strided:
            raise NotSupported(f"a gradient of layout {parameter.grad.layout}; dense is possible")
        self.expect_end_of_backward()
        # Before others start: hooks of the user on this parameter may still see its gradient.
        while self._released < self._next and self._buckets[self._released].release():
            self._released += 1
        memory.relieve()
        bucket.missing -= 1
        while self._next < len(self._buckets) and self._buckets[self._next].missing <= 0:
            self._start_next()

    def _start_next(self) -> None:
        with torch.no_grad(), self._mesh.timers.measure("gradients"):
            self._buckets[self._next].start(self._transport)
        self._next += 1

    @torch.no_grad()
    def _finish(self) -> None:
        try:
            with self._mesh.timers.measure("gradients"):
                while self._next < len(self._buckets):
                    self._start_next()
                own = [b.has_gradient(p) for b in self._buckets for p in b.parameters]
                agreed = self._held.start(own, self._order[0].device)
                for bucket in self._buckets:
                    bucket.wait()
                agreed.wait()
                family = Family(self._transport)
                for bucket in self._buckets:
                    bucket.finish(family, lambda p: self._held.anywhere(self._index[id(p)]))
        finally:
            self._reset()

    def _reset(self) -> None:
        self._queued = False
        self._next = self._released = 0
        for bucket in self._buckets:
            bucket.missing = len(bucket.parameters)


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
