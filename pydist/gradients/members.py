"""The members of a reducer: parameters whose gradients it averages, and their lanes."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Container, Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from pydist.errors import NotSupported
from pydist.exchange.adjoints import mean_ranks
from pydist.exchange.consistency import consistency_of
from pydist.exchange.own_slice import own_slice
from pydist.gradients import graph, step_check
from pydist.gradients.forms.stateful import SteppedForm
from pydist.gradients.lane import Lane, LaneGroups, make_lane
from pydist.gradients.leaf import NEW, Leaf, LeafReducer, leaf_of
from pydist.gradients.newcomers import compare_newcomers
from pydist.gradients.partitioned_bucket import ParameterPartition, PartitionedBucket
from pydist.grid import AXES

if TYPE_CHECKING:
    from pydist.gradients.forms.settings import Gradients
    from pydist.mesh import Mesh


class Members:
    """The parameters whose gradients a reducer averages, each in a lane.

    Members are parameters, not models: those of models given to `parallelize`, and any other that a
    sharded call uses or that follows one. The latter are newcomers, until a backward pass gives
    them a gradient: then all ranks compare them, and they get a lane.

    Attributes:
        lanes: members that are sent together: one lane per model, one for members found later.
        found: the lanes of members that no parallelized model had, by the axes of their copies.
        newcomers: registered parameters without a lane, in the order of their registration. Not by
            ids, which new parameters take over from freed ones at other times on each rank.
        parts: the parts of each partitioned parameter, by its id. A new dict whenever buckets are
            remade.
    """

    def __init__(self, reducer: LeafReducer) -> None:
        """Starts without members, for a reducer that keeps this object."""
        self._reducer = weakref.ref(reducer)
        self.lanes: list[Lane] = []
        self.found: dict[tuple[str, ...], Lane] = {}
        self.newcomers: dict[Leaf, None] = {}
        self.parts: dict[int, ParameterPartition] = {}
        self._lane_of: dict[Leaf, Lane] = {}
        self._groups: list[LaneGroups] = []  # of dropped lanes, which all ranks drop together

    @property
    def reducer(self) -> LeafReducer:
        """The reducer, which all leaves refer to."""
        reducer = self._reducer()
        assert reducer is not None
        return reducer

    @property
    def mesh(self) -> Mesh:
        """Mesh that the reducer belongs to."""
        return self.reducer.mesh

    @property
    def partitioned(self) -> list[PartitionedBucket]:
        """The buckets of partitioned gradients, in the order in which backward completes them."""
        return [bucket for lane in self.lanes for bucket in lane.partitioned]

    @property
    def found_leaves(self) -> Sequence[Leaf]:
        """The members that no parallelized model had."""
        return [leaf for lane in self.found.values() for leaf in lane.leaves]

    def lane_of(self, leaf: Leaf) -> Lane | None:
        """Returns the lane of a member; None for a newcomer."""
        return self._lane_of.get(leaf)

    def has(self, parameter: Tensor) -> bool:
        """Returns whether a parameter is a member."""
        leaf = leaf_of(own_slice(parameter))
        return leaf is not None and leaf in self._lane_of

    def part_of(self, parameter: Tensor) -> ParameterPartition | None:
        """Returns the parts of a parameter; None if its gradient is not partitioned."""
        # Not by the id alone, which a freed parameter may have had.
        leaf = leaf_of(own_slice(parameter))
        lane = None if leaf is None else self.lane_of(leaf)
        if leaf is None or lane is None:
            return None
        is_partitioned = isinstance(lane.bucket_of[leaf], PartitionedBucket)
        return self.parts[leaf.key] if is_partitioned else None

    # -- models ---------------------------------------------------------------------------------

    def add_lanes(
        self, parameters: Iterable[tuple[str, Tensor]], gradients: Gradients | None = None
    ) -> list[Lane]:
        """Adds named parameters, whose gradients are reduced in a form. Collective.

        Returns:
            A lane of those that all ranks hold, and one of those in slices, if there are any.
        """
        reducer = self.reducer
        found: dict[tuple[str, ...], list[Leaf]] = {AXES: []}
        for name, given in parameters:
            parameter = own_slice(given)
            known = leaf_of(parameter)
            if parameter.requires_grad and (known is None or known.reducer() is not reducer):
                leaf = self._made(parameter, repr(name))
                self.newcomers[leaf] = None  # as which it stays if making the lane fails
            elif known is not None and known in self.newcomers:
                leaf = known
                leaf.name = repr(name)  # a call before `parallelize` knew its shape only
            else:
                continue
            found.setdefault(leaf.axes, []).append(leaf)
        lanes = []
        for axes, leaves in found.items():
            lanes.append(self._make_lane(axes, leaves, gradients))
            self.plan(lanes[-1], leaves)
            for leaf in leaves:
                del self.newcomers[leaf]
        return lanes

    def release(self, lane: Lane, parameters: Iterable[Tensor]) -> None:
        """Ends memberships; a parameter that gets a gradient becomes a new member. Collective."""
        keys = {id(own_slice(parameter)) for parameter in parameters}
        self._drop(lane, {i for i, leaf in enumerate(lane.leaves) if leaf.key in keys})

    def partitionable(self, parameters: Iterable[Tensor]) -> list[Leaf]:
        """Returns the members among parameters, whose gradients are to be partitioned.

        Raises:
            NotSupported: a parameter has hooks, which would need the full gradient, or a lane with
                another form than the dense one.
        """
        leaves = (leaf_of(own_slice(p)) for p in parameters)
        found = [leaf for leaf in leaves if leaf in self._lane_of]
        for leaf in found:
            self._lane_of[leaf].refuse_parts()
            leaf.refuse_hooks()
        return found

    def partition(self, leaves: Collection[Leaf]) -> None:
        """Partitions gradients, which `gather_gradients` has gathered, from now on. Collective."""
        for leaf in leaves:
            leaf.is_partitioned = True
        for lane in self.lanes:
            if any(self._lane_of[leaf] is lane for leaf in leaves):
                self.plan(lane, lane.leaves)

    @torch.no_grad()
    def gather_gradients(self) -> None:
        """Converts partitioned gradients to ordinary ones, equal on all ranks. Collective."""
        with self.mesh.session.timers.measure("gradients"):
            for bucket in self.partitioned:
                bucket.gather_gradients()

    def plan(self, lane: Lane, leaves: Sequence[Leaf]) -> None:
        """Makes the buckets of a lane, with these members. Collective."""
        lane.plan(leaves)
        self._lane_of = {leaf: lane for lane in self.lanes for leaf in lane.leaves}
        parts = (each for bucket in self.partitioned for each in bucket.parts())
        self.parts = {leaf.key: part for leaf, part in parts if leaf.parameter() is not None}

    # -- newcomers ------------------------------------------------------------------------------

    def register(self, tensor: Tensor) -> None:
        """Registers a leaf that feeds or follows a sharded call."""
        if not isinstance(tensor, nn.Parameter):
            step_check.note_plain(tensor, self.mesh)
            return
        known = leaf_of(tensor)
        if known is not None and known.reducer() is self.reducer:
            return
        if tensor.layout != torch.strided:
            raise NotSupported(
                f"a parameter of layout {tensor.layout} with sharded tensors: its gradient can't "
                "be reduced; a dense one can"
            )
        name = f"of shape {list(tensor.shape)}" if known is None else known.name
        self.newcomers[self._made(tensor, name)] = None

    def _made(self, parameter: Tensor, name: str) -> Leaf:
        """Returns a new leaf of this reducer for a parameter that another one may know."""
        known = leaf_of(parameter)
        other = None if known is None else known.reducer()
        leaf = Leaf(parameter, name, self.reducer)
        if known is not None and other is not None:
            if not known.is_partitioned:  # an optimizer knows its parts
                known.make_void()  # else two reducers would sum in the memory of one gradient
            leaf.has_moved = True
            graph.note_move(parameter, other.mesh)
        return leaf

    def follow(self, tensor: Tensor) -> None:
        """Registers a plain operand, or the parameters that it was computed from."""
        if tensor.grad_fn is None:
            self.register(tensor)
            return
        leaves = graph.walk([tensor.grad_fn], self.mesh)[1]
        for leaf in leaves:
            self.register(leaf)

    def current(self, leaf: Leaf, parameter: Tensor) -> Leaf:
        """Returns the parameter's leaf; a new one if its dtype, shape or strides changed."""
        if leaf.describes(parameter):
            return leaf
        if isinstance(getattr(self.lane_of(leaf), "form", None), SteppedForm):
            raise NotSupported(
                f"the parameter {leaf.name} has another dtype or memory format since parallelize("
                'gradients=...), whose form keeps state of it: change it before, or use "dense", '
                '"fp16", "bf16", "torus" or "hierarchical"'
            )
        fresh = leaf.renewed(parameter)
        if leaf in self.newcomers:
            each = (fresh if other is leaf else other for other in self.newcomers)
            self.newcomers = dict.fromkeys(each)
        else:
            self.newcomers[fresh] = None
        return fresh

    def arrived(self, unused: Container[Leaf]) -> list[Leaf]:
        """Returns newcomers at which a gradient has arrived, in the same order on all ranks.

        Args:
            unused: frozen parameters at which one has arrived.
        """
        found = [(leaf, leaf.parameter()) for leaf in self._in_order()]
        self.newcomers = dict.fromkeys(leaf for leaf, p in found if p is not None)
        return [
            leaf
            for leaf, p in found
            if p is not None and (leaf in unused or (leaf.fired and p.grad is not None))
        ]

    def adopt(
        self, news: list[Leaf], proposals: list[list[int]], unused: dict[Leaf, Tensor]
    ) -> None:
        """Adds newcomers to a lane, and reduces their first gradients. Collective.

        Args:
            news: from `arrived`.
            proposals: for each lane, the leaves that no longer need a place on this rank.
            unused: gradients that arrived at frozen parameters; replaced by their means.
        """
        lanes = list(self.lanes)
        dropped = compare_newcomers(
            self.mesh.world, news, lanes, proposals, unused, self.found_leaves
        )
        self.gather_gradients()  # new buckets may have other parts
        for lane, gone, proposal in zip(lanes, dropped, proposals, strict=True):
            if gone:
                self._drop(lane, gone)
            lane.dropped = [] if gone else proposal
        for axes in dict.fromkeys(leaf.axes for leaf in news):
            found = self.found.get(axes)
            if found is None:
                found = self.found[axes] = self._make_lane(axes)
            arrived = [leaf for leaf in news if leaf.axes == axes]
            for leaf in arrived:
                del self.newcomers[leaf]
            known = found.leaves
            self.plan(found, arrived)  # alone at first: the others were already sent
            found.start_rest()
            found.finish(lambda leaf: 0 if leaf in unused else NEW)
            for leaf in arrived:
                if leaf in unused:
                    unused[leaf] = mean_ranks(unused[leaf], self.mesh, axes, "gradients")
            for bucket in found.partitioned:
                bucket.gather_gradients()  # the next ones have other parts
            self.plan(found, [*known, *arrived])
        over = [e for e in self.lanes if not e.leaves and e not in self.found.values()]
        self.lanes = [lane for lane in self.lanes if lane not in over]
        self._groups += [lane.groups for lane in over]

    def _make_lane(
        self,
        axes: tuple[str, ...],
        leaves: Sequence[Leaf] = (),
        gradients: Gradients | None = None,
    ) -> Lane:
        """Adds a lane without buckets, with the groups of a dropped one if possible. Collective.

        A transport keeps its sockets or communicators until the program ends, and their number is
        limited.
        """
        kinds = [each[:2] for each in self._groups]
        kind = axes, gradients
        groups = self._groups.pop(kinds.index(kind)) if kind in kinds else None
        self.lanes.append(make_lane(self.mesh, axes, leaves, gradients, groups))
        return self.lanes[-1]

    def _in_order(self) -> list[Leaf]:
        """Returns the newcomers, in the same order on all ranks.

        Walks of the graph find them in an order that may differ between ranks, as their graphs
        differ. So members of models are in the order of the models; others in the order of walks.
        """
        newcomers = list(self.newcomers)
        if len(newcomers) > 1:
            places = consistency_of(self.mesh).parameters.places()
            newcomers.sort(key=lambda leaf: places.get(leaf.key, len(places)))
        return newcomers

    def _drop(self, lane: Lane, gone: Collection[int]) -> None:
        """Ends memberships; a parameter that is trained again becomes a new member."""
        for index in gone:
            leaf = lane.leaves[index]
            if leaf.parameter() is not None:
                self.newcomers[leaf] = None
                leaf.idle = 0
        self.plan(lane, [leaf for i, leaf in enumerate(lane.leaves) if i not in gone])
