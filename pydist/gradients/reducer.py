"""The gradient reducer, which averages parameters' gradients over all ranks during backward."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable

from pydist.errors import NotSupported
from pydist.exchange.adjoints import mean_ranks
from pydist.exchange.consistency import consistency_of
from pydist.exchange.exchanger import in_memory
from pydist.exchange.own_slice import own_slice
from pydist.gradients import graph, step_check
from pydist.gradients.aliases import Aliases
from pydist.gradients.bucket import fits
from pydist.gradients.engine_run import EngineRun
from pydist.gradients.flags import (
    NEW,
    Flags,
    own_flags,
    read_flags,
    refuse_frozen,
    show_unused,
)
from pydist.gradients.forms.stateful import SteppedForm
from pydist.gradients.interrupted import interrupt, settle
from pydist.gradients.lane import Lane, is_capturing, make_lane
from pydist.gradients.leaf import Leaf, leaf_of
from pydist.gradients.newcomers import compare_newcomers
from pydist.gradients.partitioned import PartitionedGradient
from pydist.gradients.partitioned_bucket import ParameterPartition, PartitionedBucket
from pydist.grid import AXES

if TYPE_CHECKING:
    from pydist.gradients.forms.settings import Gradients
    from pydist.group_sizes import GroupSizes
    from pydist.mesh import Mesh


class Reducer:
    """The reducer of a mesh, which averages gradients over the ranks that hold the parameter.

    The mean of the ranks' accumulated gradients is the true gradient (see
    `pydist.exchange.adjoints`), for any mixture of sharded and plain uses of a parameter. Members
    are parameters, not models: those of models given to `parallelize`, and any other that a sharded
    call uses or that follows one. The latter are compared over all ranks in the first backward that
    gives them a gradient.

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
        """Starts without members; created by `members.reducer_of`."""
        self._mesh = weakref.ref(mesh)
        self.lanes: list[Lane] = []
        """Members that are sent together: one lane per model, one for members found later."""
        self._lane_of: dict[Leaf, Lane] = {}
        # Of parameters that no parallelized model had, by the axes of their copies.
        self._found: dict[tuple[str, ...], Lane] = {}
        self._newcomers: dict[int, Leaf] = {}  # registered, without a lane yet
        self._flags = Flags()
        self._pauses = 0  # open `no_sync` blocks, of any model
        self._runs: list[EngineRun] = []  # of the engine, possibly nested
        self.aliases = Aliases()
        """Parts of leaves that sharded calls have used."""
        self._queued = self._interrupted = False
        self._unused: dict[Leaf, Tensor] = {}  # gradients that arrived at frozen parameters
        self.parts: dict[int, ParameterPartition] = {}
        """The parts of each partitioned parameter, by its id. A new dict whenever buckets are
        remade."""

    @property
    def mesh(self) -> Mesh:
        """Mesh that the reducer belongs to."""
        mesh = self._mesh()
        assert mesh is not None
        return mesh

    @property
    def partitioned(self) -> list[PartitionedBucket]:
        """The buckets of partitioned gradients, in the order in which backward completes them."""
        return [bucket for lane in self.lanes for bucket in lane.partitioned]

    # -- members ----------------------------------------------------------------------------

    def add_lanes(
        self, parameters: Iterable[tuple[str, Tensor]], gradients: Gradients | None = None
    ) -> list[Lane]:
        """Adds named parameters, whose gradients are reduced in a form. Collective.

        Returns:
            A lane of those that all ranks hold, and one of those in slices, if there are any.
        """
        found: dict[tuple[str, ...], list[Leaf]] = {AXES: []}
        for name, given in parameters:
            parameter = own_slice(given)
            known = leaf_of(parameter)
            if parameter.requires_grad and (known is None or known.reducer() is not self):
                leaf = Leaf(parameter, repr(name), self)
            elif known is not None and known.key in self._newcomers:
                leaf = self._newcomers.pop(known.key)
                leaf.name = repr(name)  # a call before `parallelize` knew its shape only
            else:
                continue
            found.setdefault(leaf.axes, []).append(leaf)
        lanes = []
        for axes, leaves in found.items():
            lanes.append(make_lane(self.mesh, axes, leaves, gradients))
            self.lanes.append(lanes[-1])
            self._plan(lanes[-1], leaves)
        return lanes

    def release(self, lane: Lane, parameters: Iterable[Tensor]) -> None:
        """Ends memberships; a parameter that gets a gradient becomes a new member. Collective."""
        keys = {id(own_slice(parameter)) for parameter in parameters}
        self._drop(lane, {i for i, leaf in enumerate(lane.leaves) if leaf.key in keys})

    def register(self, tensor: Tensor) -> None:
        """Registers a leaf that feeds or follows a sharded call."""
        if not isinstance(tensor, nn.Parameter):
            step_check.note_plain(tensor, self.mesh)
            return
        known = leaf_of(tensor)
        if known is not None and known.reducer() is self:
            return
        if tensor.is_complex() or tensor.layout != torch.strided:
            raise NotSupported(
                f"a parameter of {tensor.dtype} and layout {tensor.layout} with sharded tensors: "
                "its gradient can't be reduced; real and dense ones can"
            )
        name = f"of shape {list(tensor.shape)}" if known is None else known.name
        self._newcomers[id(tensor)] = Leaf(tensor, name, self)

    def follow(self, tensor: Tensor) -> None:
        """Registers a plain operand, or the parameters that it was computed from."""
        if tensor.grad_fn is None:
            self.register(tensor)
            return
        leaves = graph.walk([tensor.grad_fn], self.mesh)[1]
        for leaf in leaves:
            self.register(leaf)

    def scatter(self, parameters: Iterable[Tensor]) -> None:
        """Partitions these gradients over the ranks from now on. Collective.

        Raises:
            NotSupported: a parameter has hooks, which would need the full gradient, or a lane with
                another form than the dense one.
        """
        leaves = (leaf_of(own_slice(p)) for p in parameters)
        found = [leaf for leaf in leaves if leaf in self._lane_of]
        for leaf in found:
            self._lane_of[leaf].refuse_parts()
            leaf.refuse_hooks()
        self.gather_gradients()  # new buckets may have other parts
        for leaf in found:
            leaf.is_partitioned = True
        for lane in self.lanes:
            if any(self._lane_of[leaf] is lane for leaf in found):
                self._plan(lane, lane.leaves)

    def part_of(self, parameter: Tensor) -> ParameterPartition | None:
        """Returns the parts of a parameter; None if its gradient is not partitioned."""
        # Not by the id alone, which a freed parameter may have had.
        leaf = leaf_of(own_slice(parameter))
        lane = None if leaf is None else self._lane_of.get(leaf)
        if leaf is None or lane is None:
            return None
        is_partitioned = isinstance(lane.bucket_of[leaf], PartitionedBucket)
        return self.parts[leaf.key] if is_partitioned else None

    @contextmanager
    def paused(self, lanes: Iterable[Lane]) -> Iterator[None]:
        """Lets gradients of lanes, and of members found later, accumulate without reduction."""
        lanes = {id(each): each for each in (*lanes, *self._found.values())}.values()
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

    # -- partitioned steps ------------------------------------------------------------------

    @torch.no_grad()
    def gather_gradients(self) -> None:
        """Converts partitioned gradients to ordinary ones, final and equal. Collective."""
        if not self._runs:
            self.settle()
        with self.mesh.session.timers.measure("gradients"):
            for bucket in self.partitioned:
                bucket.gather_gradients()

    @torch.no_grad()
    def start_gathering_values(self, bucket: PartitionedBucket) -> None:
        """Starts to gather a bucket's parameters after each rank has changed its part."""
        with self.mesh.session.timers.measure("gradients"):
            bucket.start_gathering_values()
            bucket.transport.progress()

    @torch.no_grad()
    def finish_gathering_values(self, bucket: PartitionedBucket, changed: Collection[int]) -> None:
        """Waits until a bucket's parameters are complete. Collective.

        Args:
            bucket: the bucket.
            changed: ids of the parameters that may have new values.
        """
        with self.mesh.session.timers.measure("gradients"):
            bucket.finish_gathering_values(changed)

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
            interrupt(self.lanes, run.added)

    def expect_end_of_backward(self) -> None:
        """Queues a callback of the engine, once, for the end of the running backward.

        Called by every exchange's backward, since a rank without work may reach no parameter.
        """
        run = self._runs[-1] if self._runs else None
        if self._queued or run is None or run.reaches_none or not run.accumulates:
            return
        lanes = [lane.leaves for lane in self.lanes if not lane.pauses]
        if not self._pauses:
            lanes.append(list(self._newcomers.values()))
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
            leaf = self._current(leaf, parameter)
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
            elif (lane := self._lane_of.get(leaf)) is not None:
                lane.bucket_of[leaf].set_aside(parameter)
        weight = self.weight
        if not accumulates:
            self._runs[-1].arrived[leaf.key] = weight
            leaf.waits = leaf.has_hooks
            return None if grad is given else grad
        if differentiable:
            leaf.keeps_graph = parameter is not None and not leaf.has_part(parameter)
            result = self._mean_of(leaf, grad, weight)
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

    def returned(self, inputs: Sequence[Any], results: Sequence[Any]) -> tuple[Any, ...]:
        """Replaces members' gradients in the results of `autograd.grad` by means. Collective.

        Not when they arrive, as hooks may change the order on a rank.

        Args:
            inputs: tensors, or edges of the graph, whose gradients the program requested.
            results: the gradients of this rank.
        """
        arrived, found = self._runs[-1].arrived, list(results)
        for index, each in enumerate(inputs):
            tensor = each if isinstance(each, Tensor) else getattr(each.node, "variable", None)
            leaf = None if tensor is None else leaf_of(tensor)
            if leaf is None or leaf.reducer() is not self or leaf.key not in arrived:
                continue
            mean = self._mean_of(leaf, found[index], arrived[leaf.key])
            if found[index] is not None:
                found[index] = leaf.seen_by_hooks(mean)
        if arrived:
            consistency_of(self.mesh).compare_histories(self.mesh)
        return tuple(found)

    def _mean_of(self, leaf: Leaf, grad: Tensor | None, weight: float) -> Tensor:
        own = leaf.kind.zeros() if grad is None else grad  # another rank may have one
        return graph.mean_of(own, self.mesh, leaf.axes, weight)

    def after(self, leaf: Leaf, parameter: Tensor) -> None:
        """Handles a gradient that was accumulated."""
        own = self._lane_of.get(leaf)
        lane = own or self._found.get(leaf.axes)
        if lane is not None:
            lane.progress()
        if parameter.grad is not None and parameter.grad.layout != torch.strided:
            raise NotSupported(f"a gradient of layout {parameter.grad.layout}; dense is possible")
        current = self._current(leaf, parameter)
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
        for lane in self.lanes:
            lane.forget_capture()
            lane.abandon(wait=False)
        self._queued = self._interrupted = False

    def _is_paused(self, leaf: Leaf) -> bool:
        """Returns whether a member's gradient accumulates without reduction (`no_sync`)."""
        lane = self._lane_of.get(leaf)
        return bool(self._pauses if lane is None else lane.pauses)

    def _current(self, leaf: Leaf, parameter: Tensor) -> Leaf:
        """Returns the parameter's leaf; a new one if its dtype, shape or strides changed."""
        if leaf.describes(parameter):
            return leaf
        if isinstance(getattr(self._lane_of.get(leaf), "form", None), SteppedForm):
            raise NotSupported(
                f"the parameter {leaf.name} has another dtype or memory format since parallelize("
                'gradients=...), whose form keeps state of it: change it before, or use "dense", '
                '"fp16", "bf16", "torus" or "hierarchical"'
            )
        fresh = leaf.renewed(parameter)
        self._newcomers[fresh.key] = fresh
        return fresh

    def _queue(self) -> None:
        if not self._queued:
            self._queued = True
            Variable._execution_engine.queue_callback(self._finish)

    @torch.no_grad()
    def _finish(self) -> None:
        """Completes the reductions of the backward; then calls users' hooks."""
        mesh = self.mesh
        with mesh.session.timers.measure("gradients"):
            news = self._found_news()
            is_new = bool(news) or any(e.place and not e.is_placed for e in self._found_leaves)
            own, proposals = own_flags(self.lanes, is_new, self._unused)
            for lane in self.lanes:
                if lane.wanted:
                    lane.start_rest()
            captured = is_capturing(self.lanes)
            checks = consistency_of(mesh)
            proof = checks.proof(mesh)
            anywhere, total = self._flags.exchange(mesh.world, own, proof, captured=captured)
            any_news, used, flags = read_flags(self.lanes, anywhere)
            members = (leaf for lane in self.lanes for leaf in lane.leaves)
            with_hooks = (e for e in (*members, *news) if e.has_hooks)
            hooked = {e: e.take_in_graph() for e in with_hooks if e.waits or not e.fired}
            taking_part = [lane for lane, u in zip(self.lanes, used, strict=True) if u]
            # Not older gradients: one rank alone may keep a replaced parameter.
            held: dict[tuple[str, ...], list[Tensor]] = {}
            for axes, leaf in ((e.equal_axes, leaf) for e in taking_part for leaf in e.leaves):
                if flags.get(leaf) == NEW and (parameter := leaf.parameter()) is not None:
                    held.setdefault(axes, []).append(parameter)
            for lane in taking_part:
                lane.start_rest()
            checks.sum_parameters(mesh, held)
            for lane in taking_part:
                lane.finish(lambda leaf: flags.get(leaf, 0) > 0)
            unused, self._unused = self._unused, {}
            show_unused(mesh, self.lanes, anywhere, unused)
            self._queued = False
            if self._runs:
                self._runs[-1].complete = True
            refuse_frozen(self.lanes, anywhere)
            checks.conclude(mesh, total)
            if any_news:
                self._adopt(news, proposals, unused)
        for leaf, in_graph in hooked.items():
            parameter = leaf.parameter()
            has_come = in_graph or leaf in unused or flags.get(leaf, NEW) == NEW
            if parameter is not None and has_come:
                leaf.call_hooks(parameter, unused.get(leaf), in_graph)

    def _in_order(self) -> list[Leaf]:
        """Returns the newcomers, in the same order on all ranks.

        Walks of the graph find them in an order that may differ between ranks, as their graphs
        differ. So members of models are in the order of the models; others in the order of walks.
        """
        newcomers = list(self._newcomers.values())
        if len(newcomers) > 1:
            places = consistency_of(self.mesh).parameters.places()
            newcomers.sort(key=lambda leaf: places.get(leaf.key, len(places)))
        return newcomers

    def _found_news(self) -> list[Leaf]:
        """Returns parameters without a lane at which a gradient has arrived."""
        if self._pauses:
            return []
        found = [(leaf, leaf.parameter()) for leaf in self._in_order()]
        self._newcomers = {leaf.key: leaf for leaf, p in found if p is not None}
        return [
            leaf
            for leaf, p in found
            if p is not None and (leaf in self._unused or (leaf.fired and p.grad is not None))
        ]

    def _adopt(
        self, news: list[Leaf], proposals: list[list[int]], unused: dict[Leaf, Tensor]
    ) -> None:
        """Adds new members to a lane, and reduces their first gradients. Collective."""
        lanes = list(self.lanes)
        dropped = compare_newcomers(
            self.mesh.world, news, lanes, proposals, unused, self._found_leaves
        )
        self.gather_gradients()  # new buckets may have other parts
        for lane, gone, proposal in zip(lanes, dropped, proposals, strict=True):
            if gone:
                self._drop(lane, gone)
            lane.dropped = [] if gone else proposal
        for axes in dict.fromkeys(leaf.axes for leaf in news):
            found = self._found.get(axes)
            if found is None:
                found = self._found[axes] = make_lane(self.mesh, axes)
                self.lanes.append(found)
            arrived = [leaf for leaf in news if leaf.axes == axes]
            for leaf in arrived:
                del self._newcomers[leaf.key]
            known = found.leaves
            self._plan(found, arrived)  # alone at first: the others were already sent
            found.start_rest()
            found.finish(lambda leaf: leaf not in unused)
            for leaf in arrived:
                if leaf in unused:
                    unused[leaf] = mean_ranks(unused[leaf], self.mesh, axes, "gradients")
            self._plan(found, [*known, *arrived])
        kept = self._found.values()
        self.lanes = [lane for lane in self.lanes if lane.leaves or lane in kept]

    @property
    def _found_leaves(self) -> Sequence[Leaf]:
        return [leaf for lane in self._found.values() for leaf in lane.leaves]

    def _drop(self, lane: Lane, gone: Collection[int]) -> None:
        """Ends memberships; a parameter that is trained again becomes a new member."""
        for index in gone:
            leaf = lane.leaves[index]
            if leaf.parameter() is not None:
                self._newcomers[leaf.key] = leaf
                leaf.idle = 0
        self._plan(lane, [leaf for i, leaf in enumerate(lane.leaves) if i not in gone])

    def settle(self) -> None:
        """Completes the messages of passes that raised, so that messages match. Collective.

        Raises:
            NotSupported: see `interrupted.settle`.
        """
        if self._interrupted:
            self._queued = False
            settle(self.mesh.world, self.lanes)
            self._interrupted = False

    def _plan(self, lane: Lane, leaves: Sequence[Leaf]) -> None:
        lane.plan(leaves)
        self._lane_of = {leaf: lane for lane in self.lanes for leaf in lane.leaves}
        parts = (each for bucket in self.partitioned for each in bucket.parts())
        self.parts = {leaf.key: part for leaf, part in parts if leaf.parameter() is not None}
