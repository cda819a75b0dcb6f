"""The gradient reducer, which averages parameters' gradients over all ranks during backward."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import Variable

from pydist.errors import NotSupported
from pydist.exchange.consistency import consistency_of
from pydist.exchange.exchanger import in_memory
from pydist.gradients import graph
from pydist.gradients.aliases import Aliases
from pydist.gradients.bucket import fits
from pydist.gradients.engine_run import EngineRun, mean_of_member
from pydist.gradients.flags import Flags, own_flags, read_flags, refuse_frozen, show_unused
from pydist.gradients.interrupted import interrupt, settle
from pydist.gradients.lane import Lane, is_capturing
from pydist.gradients.leaf import NEW, Leaf
from pydist.gradients.members import Members
from pydist.gradients.partitioned import PartitionedGradient

if TYPE_CHECKING:
    from pydist.group_sizes import GroupSizes
    from pydist.mesh import Mesh


class Reducer:
    """The reducer of a mesh, which averages gradients over the ranks that hold the parameter.

    The mean of the ranks' accumulated gradients is the true gradient (see
    `pydist.exchange.adjoints`), for any mixture of sharded and plain uses of a parameter.

    Buckets fill in the reverse order of registration and start, in one fixed order for each lane,
    as soon as they are full; the rest starts at the end of backward. Gradients are final when
    `backward()` returns, and users' hooks on parameters are called just before, with the mean;
    until then gradients must not be changed, as large ones are summed in their own memory. A
    gradient that is `None` on all ranks stays `None`.

    A mean is idempotent: gradients that were reduced before (a second backward without
    `zero_grad`) stay correct.

    Gradients of parameters with a partitioned optimizer step (`pydist.optim.sharded`) are
    partitioned: each rank gets the mean of its own part, and `.grad` is a `PartitionedGradient`.
    The accumulated gradient is freed after the other ranks have received their parts, if this is
    detected while backward runs.
    """

    def __init__(self, mesh: Mesh) -> None:
        """Starts without members; created by `registration.reducer_of`."""
        self._mesh = weakref.ref(mesh)
        self.members = Members(self)
        """The parameters, and the lanes in which their gradients are sent."""
        self.aliases = Aliases()
        """Parts of leaves that sharded calls have used."""
        self._flags = Flags()
        self._pauses = 0  # open `no_sync` blocks, of any model
        self._runs: list[EngineRun] = []  # of the engine, possibly nested
        self._queued = self._interrupted = False
        self._unused: dict[Leaf, Tensor] = {}  # gradients that arrived at frozen parameters

    @property
    def mesh(self) -> Mesh:
        """Mesh that the reducer belongs to."""
        mesh = self._mesh()
        assert mesh is not None
        return mesh

    # -- between passes ---------------------------------------------------------------------

    def partition(self, parameters: Iterable[Tensor]) -> None:
        """Partitions these gradients over the ranks from now on. Collective.

        Raises:
            NotSupported: see `Members.partitionable`.
        """
        found = self.members.partitionable(parameters)
        self.gather_gradients()  # new buckets may have other parts
        self.members.partition(found)

    def gather_gradients(self) -> None:
        """Converts partitioned gradients to ordinary ones, final and equal. Collective."""
        if not self._runs:
            self.settle()
        self.members.gather_gradients()

    @contextmanager
    def paused(self, lanes: Iterable[Lane]) -> Iterator[None]:
        """Lets gradients of lanes, and of members found later, accumulate without reduction."""
        lanes = {id(each): each for each in (*lanes, *self.members.found.values())}.values()
        self._pauses += 1
        for each in lanes:
            each.pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1
            for each in lanes:
                each.pauses -= 1

    @torch.no_grad()
    def reduce(self) -> None:
        """Reduces what `no_sync` blocks have accumulated, without a backward pass. Collective."""
        self.settle()
        self._finish()

    # -- a backward pass --------------------------------------------------------------------

    def enter(
        self,
        roots: Sequence[Any],
        sizes: GroupSizes | None,
        *,
        accumulates: bool,
        create_graph: bool,
    ) -> None:
        """Begins a pass of the engine over a graph with members or sharded tensors.

        Args:
            roots: the nodes of the graph where the pass starts.
            sizes: of the last batch, if its outputs have no graph.
            accumulates: whether gradients go to `.grad`; else `autograd.grad` returns them.
            create_graph: whether the gradients have a graph.
        """
        if accumulates and not self._runs:
            self.settle()
        self.aliases.renew(create_graph)
        self._runs.append(EngineRun(self.mesh, roots, sizes, accumulates=accumulates))

    def leave(self, *, interrupted: bool) -> None:
        """Ends the pass that the engine began last.

        Args:
            interrupted: whether the pass raised.
        """
        run = self._runs.pop()
        if interrupted and run.accumulates and not run.complete and not self._runs:
            # Other ranks may have sent more, and the script may continue: the next pass settles it.
            self._interrupted, self._queued = True, False
            self._unused.clear()
            interrupt(self.members.lanes, run.added)

    def expect_end_of_backward(self) -> None:
        """Queues a callback of the engine, once, for the end of the running backward.

        Called by every exchange's backward, since a rank without work may reach no parameter.
        """
        run = self._runs[-1] if self._runs else None
        if self._queued or run is None or run.reaches_none or not run.accumulates:
            return
        lanes = [lane.leaves for lane in self.members.lanes if not lane.pauses]
        if not self._pauses:
            lanes.append(list(self.members.newcomers))
        parameters = (leaf.parameter() for leaf in chain.from_iterable(lanes))
        if any(p is not None and graph.is_reached(p) for p in parameters):
            self._queue()
        else:
            run.reaches_none = True

    @property
    def weight(self) -> float:
        """Weight that this rank's sample group has in the running pass."""
        return self._runs[-1].weight if self._runs else 1.0

    def before(self, leaf: Leaf, grad: Tensor | None) -> Tensor | None:
        """Handles an arriving gradient; returns a replacement, such as the mean, or `None`."""
        parameter = leaf.parameter()
        if parameter is not None:
            leaf = self.members.current(leaf, parameter)
            if leaf.has_moved:
                self._refuse_two_meshes(leaf, parameter)
        given, grad = grad, None if grad is None else in_memory(grad)
        accumulates = not self._runs or self._runs[-1].accumulates
        differentiable = torch.is_grad_enabled()
        if (
            accumulates
            and parameter is not None
            and isinstance(parameter.grad, PartitionedGradient)
        ):
            if differentiable:
                self.gather_gradients()  # the added gradient is already the mean
            elif (lane := self.members.lane_of(leaf)) is not None:
                lane.bucket_of[leaf].set_aside(parameter)
        weight = self.weight
        if not accumulates:
            self._runs[-1].arrived[leaf.key] = weight
            leaf.waits = leaf.has_hooks
            return None if grad is given else grad
        if differentiable:
            leaf.keeps_graph = parameter is not None and not leaf.has_part(parameter)
            result = mean_of_member(leaf, grad, self.mesh, weight)
            return None if grad is None else result
        leaf.keeps_graph = False
        if leaf.has_hooks and parameter is not None:
            leaf.waits = True
            leaf.remember_base(parameter)
        if weight != 1 and grad is not None:
            # The mean loss of an empty batch is NaN.
            grad = grad * weight if weight else torch.zeros_like(grad)
        is_frozen = parameter is not None and not parameter.requires_grad
        if is_frozen and grad is not None and not self._is_paused(leaf):
            self._unused[leaf] = grad  # torch calls hooks with it
        return None if grad is given else grad

    def returned(
        self, inputs: Sequence[Any], results: Sequence[Any], *, allow_unused: bool
    ) -> tuple[Any, ...]:
        """Returns results of `autograd.grad` with means; see `EngineRun.means`. Collective."""
        register = self.members.register
        return self._runs[-1].means(inputs, results, register, allow_unused=allow_unused)

    def after(self, leaf: Leaf, parameter: Tensor) -> None:
        """Handles a gradient that was accumulated."""
        own = self.members.lane_of(leaf)
        lane = own or self.members.found.get(leaf.axes)
        if lane is not None:
            lane.progress()
        if parameter.grad is not None and parameter.grad.layout != torch.strided:
            raise NotSupported(f"a gradient of layout {parameter.grad.layout}; dense is possible")
        current = self.members.current(leaf, parameter)
        if parameter.grad is not None and not fits(current, parameter.grad):
            raise NotSupported(
                f"a gradient of {parameter.grad.dtype} for the parameter {leaf.name}, which has "
                f"grad_dtype = None; possible: grad_dtype = {parameter.grad.dtype}, set before the "
                "forward pass"
            )
        paused = self._is_paused(leaf)
        if own is not None and not paused:
            own.begin()  # counts gradients that may arrive, including this one
        # For a parameter that was frozen after the forward pass, torch only calls the hooks.
        if parameter.grad is not None and parameter.requires_grad:
            current.fired = True
            if self._runs:
                self._runs[0].added.append(current)
        if paused:
            if own is not None:
                own.bucket_of[leaf].put_back(parameter)
            if lane is not None:
                lane.pending = True
            current.remember_pause(parameter)
            return
        self._queue()
        if torch.is_grad_enabled():  # hooks wait, as the message may use the gradient's own memory
            current.in_graph = current.waits = current.has_hooks
        if own is not None:
            own.arrive(leaf)

    def forget_capture(self) -> None:
        """Resets the reducer after a failed capture; see `Transport.forget_capture`."""
        for lane in self.members.lanes:
            lane.abandon()
        self._queued = self._interrupted = False

    def _is_paused(self, leaf: Leaf) -> bool:
        """Returns whether a member's gradient accumulates without reduction (`no_sync`)."""
        lane = self.members.lane_of(leaf)
        return bool(self._pauses if lane is None else lane.pauses)

    def _refuse_two_meshes(self, leaf: Leaf, parameter: Tensor) -> None:
        """Raises for a gradient that has a part of another mesh, whose sample groups differ.

        Raises:
            NotSupported: it has.
        """
        for other in graph.meshes_before(parameter):
            if other is self.mesh or other.data_size == self.mesh.data_size == 1:
                continue
            if not self._runs or self._runs[-1].leads_to(other):
                raise NotSupported(
                    f"the parameter {leaf.name} on two meshes in one backward pass, or on another "
                    "mesh between forward and backward: its gradient would have the weights of "
                    "one mesh's sample groups; use a copy on each, or call backward() for each "
                    "mesh before the next one uses it, and evaluate under torch.no_grad()"
                )

    def _queue(self) -> None:
        if not self._queued:
            self._queued = True
            Variable._execution_engine.queue_callback(self._finish)

    @torch.no_grad()
    def _finish(self) -> None:
        """Completes the reductions of the backward; then calls users' hooks."""
        mesh, members = self.mesh, self.members
        with mesh.session.timers.measure("gradients"):
            news = [] if self._pauses else members.arrived(self._unused)
            is_new = bool(news) or any(e.place and not e.is_placed for e in members.found_leaves)
            own, proposals = own_flags(members.lanes, is_new, self._unused)
            for lane in members.lanes:
                if lane.wanted:
                    lane.start_rest()
            captured = is_capturing(members.lanes)
            checks = consistency_of(mesh)
            proof = checks.proof(mesh)
            anywhere, total = self._flags.exchange(mesh.world, own, proof, captured=captured)
            agreed = read_flags(members.lanes, anywhere)
            leaves = (leaf for lane in members.lanes for leaf in lane.leaves)
            with_hooks = (e for e in (*leaves, *news) if e.has_hooks)
            hooked = {e: e.take_in_graph() for e in with_hooks if e.waits or not e.fired}
            # Not older gradients: one rank alone may keep a replaced parameter.
            held: dict[tuple[str, ...], list[Tensor]] = {}
            for axes, leaf in ((e.equal_axes, leaf) for e in agreed.used for leaf in e.leaves):
                if agreed.flags[leaf] == NEW and (parameter := leaf.parameter()) is not None:
                    held.setdefault(axes, []).append(parameter)
            for lane in agreed.used:
                lane.start_rest()
            checks.sum_parameters(mesh, held)
            for lane in agreed.used:
                lane.finish(agreed.flags.__getitem__)
            unused, self._unused = self._unused, {}
            show_unused(mesh, agreed, unused)
            self._queued = False
            if self._runs:
                self._runs[-1].complete = True
            refuse_frozen(agreed)
            checks.conclude(mesh, total)
            if agreed.news:
                members.adopt(news, proposals, unused)
        for leaf, in_graph in hooked.items():
            parameter = leaf.parameter()
            has_come = in_graph or leaf in unused or agreed.flags.get(leaf, NEW) == NEW
            if parameter is not None and has_come:
                leaf.call_hooks(parameter, unused.get(leaf), in_graph)

    def settle(self) -> None:
        """Completes the messages of passes that raised, so that messages match. Collective.

        Raises:
            NotSupported: see `interrupted.settle`.
        """
        if self._interrupted:
            self._queued = False
            settle(self.mesh.world, self.members.lanes)
            self._interrupted = False
