"""A lane: parameters whose buckets are sent in one fixed order, on a separate transport."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from pydist import memory
from pydist.comm.interface.ledger import IN_BACKWARD
from pydist.errors import NotSupported
from pydist.exchange.exchanger import order_streams
from pydist.gradients.bucket import Bucket, Remnant
from pydist.gradients.buckets import make_buckets
from pydist.gradients.forms.form import DenseForm
from pydist.gradients.forms.levels import Levels
from pydist.gradients.forms.settings import make_form
from pydist.gradients.graph import is_reached
from pydist.gradients.leaf import NEW, Leaf
from pydist.gradients.partitioned import GradientSet
from pydist.gradients.partitioned_bucket import PartitionedBucket
from pydist.grid import AXES

if TYPE_CHECKING:
    from pydist.comm.interface.transport import Transport
    from pydist.gradients.forms.form import Form
    from pydist.gradients.forms.messages import Messages
    from pydist.gradients.forms.settings import Gradients
    from pydist.mesh import Mesh
    from pydist.timers import Timers


class LaneGroups(NamedTuple):
    """Groups that a lane has made, and the next one of its kind uses when it is dropped."""

    axes: tuple[str, ...]
    gradients: Gradients | None
    transport: Transport
    levels: tuple[Messages, Messages] | None
    """Those of a form in two levels."""


class Lane:
    """Parameters whose gradients are sent together: of a model, or found later.

    Each lane has a separate transport, so a backward that uses one of two models sends that model's
    gradients as soon as they are complete. The parameters of a lane and their order are the same on
    all ranks that hold them.

    Attributes:
        axes: axes of the mesh along which the ranks hold the parameters.
        transport: connects these ranks, for this lane only: a rank without work starts its buckets
            late, after exchanges that other ranks start after their buckets.
        holders: connects all ranks that hold parts of partitioned gradients: of slices, also those
            with other slices.
        transports: all groups whose collectives the lane uses.
        form: says how these ranks average a bucket.
        gradients: the settings of the form; None for the dense one.
        leaves: the parameters, in the order of registration.
        bucket_of: the bucket of each parameter.
        pauses: number of open `no_sync` blocks.
        pending: whether unreduced gradients were accumulated in a `no_sync` block, or in a backward
            that raised.
        touched: whether the running backward has accumulated one of the gradients.
        dropped: indices of the leaves that this rank has last proposed to drop.
    """

    def __init__(
        self,
        axes: Sequence[str],
        transport: Transport,
        holders: Transport,
        timers: Timers,
        form: Form | None = None,
        gradients: Gradients | None = None,
    ) -> None:
        self.axes, self.transport, self._timers = tuple(axes), transport, timers
        self.holders = holders
        self.form: Form = form or DenseForm(transport)
        self.gradients = gradients
        self.transports = list(dict.fromkeys([transport, *self.form.transports]))
        self.leaves: list[Leaf] = []
        self.buckets: list[Bucket] = []
        self.bucket_of: dict[Leaf, Bucket] = {}
        self.pauses = 0
        self.pending = self.touched = False
        self.dropped: list[int] = []
        self._arrived: set[Leaf] = set()
        self._streams: set[torch.cuda.Stream] = set()  # on which gradients have arrived
        self._next = self._released = 0  # of the buckets: the first that has not started, ...

    @property
    def groups(self) -> LaneGroups:
        """The groups that the lane has made."""
        form = self.form
        levels = (form.within, form.between) if isinstance(form, Levels) else None
        return LaneGroups(self.axes, self.gradients, self.transport, levels)

    @property
    def started(self) -> int:
        """Number of buckets that were sent."""
        return self._next

    @property
    def equal_axes(self) -> tuple[str, ...]:
        """Axes along which parameters, and the gradients of this pass, are equal."""
        if not self.form.is_local:
            return self.axes
        return tuple(axis for axis in self.axes if axis != "data")

    @property
    def wanted(self) -> bool:
        """Whether this rank has gradients to be reduced now."""
        return self.touched or (self.pending and not self.pauses)

    @property
    def partitioned(self) -> list[PartitionedBucket]:
        """The buckets of partitioned gradients, in the order in which backward completes them."""
        return [b for b in self.buckets if isinstance(b, PartitionedBucket)]

    def plan(self, leaves: Sequence[Leaf]) -> None:
        """Makes the buckets of these parameters. On all ranks, while none is in flight."""
        self.leaves = list(leaves)
        self.buckets = make_buckets(self.leaves, self.transport, self.holders, self.form)
        self.bucket_of = {leaf: bucket for bucket in self.buckets for leaf in bucket.leaves}
        self.dropped = []
        self.reset()

    def refuse_parts(self) -> None:
        """Raises if the form does not suit gradients that are partitioned over the ranks.

        Raises:
            NotSupported: it is not the dense one.
        """
        if not isinstance(self.form, DenseForm):
            raise NotSupported(
                f'gradients="{self.form.name}" with pydist.optim.sharded: possible are '
                'gradients="dense", or use="never"'
            )

    def arrive(self, leaf: Leaf) -> None:
        """Records a gradient, and starts the buckets that are complete.

        Raises:
            NotSupported: another part of this gradient was already sent.
        """
        bucket = self.bucket_of[leaf]
        if leaf in self._arrived:
            # torch gives a parameter another node when its memory is replaced, as by `set_`.
            if self.buckets.index(bucket) < self._next:
                raise NotSupported(
                    f"the parameter {leaf.name} got other memory between two uses that one "
                    "backward() reaches: its gradient comes in two parts, and the first is on its "
                    "way; change it before the forward pass or after backward()"
                )
            return
        self._arrived.add(leaf)
        if leaf.kind.device.type == "cuda":
            self._streams.add(torch.cuda.current_stream(leaf.kind.device))
        while self._released < self._next and self.buckets[self._released].release():
            self._released += 1
        memory.relieve()
        # A frozen parameter may arrive unexpectedly: `set_` hides its node.
        bucket.expected.discard(leaf)
        while self._next < len(self.buckets) and not self.buckets[self._next].expected:
            self._start_next()

    def begin(self) -> None:
        """Joins the running backward: buckets wait for gradients that may arrive."""
        if self.touched:
            return
        self.touched = True
        for bucket in self.buckets:
            bucket.expected = {leaf for leaf in bucket.leaves if _may_come(leaf)}

    def start_rest(self) -> None:
        """Starts the remaining buckets; a missing gradient counts as zero."""
        self.touched = True
        while self._next < len(self.buckets):
            self._start_next()

    def finish(self, flag: Callable[[Leaf], int]) -> None:
        """Waits for the means and stores them in the gradients; see `Bucket.finish`."""
        for bucket in self.buckets:
            bucket.wait()
        gradient_set = GradientSet(self.holders)
        for bucket in self.buckets:
            bucket.finish(gradient_set, flag)
        # What a form keeps of an older gradient would be lost with its mean.
        self.form.conclude(lambda leaf: flag(leaf) == NEW)
        self.pending = False
        for leaf in self.leaves:
            if flag(leaf) == NEW:
                leaf.remember_mean()
            leaf.fired = leaf.paused = leaf.keeps_graph = False
        self.reset()

    def interrupt(self) -> None:
        """Separates the gradients from messages in flight, after a backward that raised."""
        for bucket in self.buckets:
            bucket.interrupt()

    def remnants(self) -> list[Remnant]:
        """Returns the location of this rank's part of each leaf, after a backward that raised."""
        return [self.bucket_of[leaf].remnant(leaf) for leaf in self.leaves]

    def resume(self, started: int, remnants: Mapping[Leaf, Remnant]) -> None:
        """Completes the messages of an interrupted backward. On all ranks.

        Args:
            started: the largest number of buckets that any rank has sent.
            remnants: see `Bucket.resume`.
        """
        ledgers = [each.ledger for each in self.transports]
        for ledger in ledgers:
            ledger.place = IN_BACKWARD  # as on the ranks that sent more
        try:
            for bucket in self.buckets[self._next : started]:
                bucket.start_blank()
            gradient_set = GradientSet(self.holders)
            for bucket in self.buckets:
                bucket.resume(gradient_set, remnants)
        finally:
            for ledger in ledgers:
                ledger.place = ""
        self.form.conclude(lambda leaf: remnants[leaf] is Remnant.SENT)
        self.reset()

    def abandon(self) -> None:
        """Forgets a step whose capture as a CUDA graph failed; see `Transport.forget_capture`."""
        for transport in self.transports:
            transport.forget_capture()
        for bucket in self.buckets:
            bucket.abandon()
        self.form.abandon()
        self.reset()

    def progress(self) -> None:
        """Lets messages in flight advance; see `Transport.progress` and `Form.progress`."""
        for transport in self.transports:
            transport.progress()
        if not isinstance(self.form, DenseForm):
            with torch.no_grad(), self._timers.measure("gradients"):
                self.form.progress()

    def reset(self) -> None:
        """Prepares for another backward."""
        self.touched = False
        self._arrived.clear()
        self._streams.clear()
        self._next = self._released = 0

    def _start_next(self) -> None:
        with torch.no_grad(), self._timers.measure("gradients"):
            for stream in self._streams:  # gradients of this bucket may be written there
                order_streams(stream, torch.cuda.current_stream(stream.device))
            self.buckets[self._next].start()
        self._next += 1


def _may_come(leaf: Leaf) -> bool:
    """Returns whether the running backward may call the leaf's hooks."""
    parameter = leaf.parameter()
    return parameter is not None and (parameter.requires_grad or is_reached(parameter))


def make_lane(
    mesh: Mesh,
    axes: tuple[str, ...],
    leaves: Sequence[Leaf] = (),
    gradients: Gradients | None = None,
    groups: LaneGroups | None = None,
) -> Lane:
    """Makes a lane without buckets. Collective over the mesh.

    Args:
        mesh: the mesh.
        axes: those along which the ranks hold the parameters.
        leaves: the parameters.
        gradients: how the ranks average gradients; dense by default.
        groups: those of a dropped lane with these axes and settings; by default new ones are made.
    """
    group = mesh.world if axes == AXES else mesh.group(axes)
    transport = group.split(0, group.rank) if groups is None else groups.transport
    levels = None
    if groups is not None and groups.levels is not None:
        levels = groups.levels[0].renewed(), groups.levels[1].renewed()
    form = None
    if gradients is not None:
        form = make_form(gradients, mesh, axes, group, leaves, levels)
    holders = transport if axes == AXES else mesh.world
    return Lane(axes, transport, holders, mesh.session.timers, form, gradients)


def is_capturing(lanes: Sequence[Lane]) -> bool:
    """Returns whether the running step is captured as a CUDA graph."""
    on_device = any(leaf.kind.device.type == "cuda" for lane in lanes for leaf in lane.leaves[:1])
    return on_device and torch.cuda.is_current_stream_capturing()
