"""Known faults of pydist, reintroduced one at a time: the hunter has to find each of them.

A mutation replaces functions of pydist by older or careless versions, in this process and in its
forks. It lists the ingredients of the programs that search for it, as a user who suspects that
part of pydist would.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from pydist.backend.statistics import Rows
from pydist.exchange.contents import Contents, TrainedParameters
from pydist.exchange.history import NO_HISTORY
from pydist.gradients import closures, replaced
from pydist.gradients.bucket import Bucket
from pydist.gradients.leaf import Leaf, leaf_of
from pydist.gradients.members import Members
from pydist.gradients.reducer import Reducer
from pydist.group_sizes import GroupSizes
from pydist.ops.fusion import norm, prelu
from pydist.ops.norm.norm import AppliedNorm
from pydist.ops.pool.average import AveragePlan
from pydist.ops.shaping import nonzero
from pydist.tensor import local_of, sharded
from pydist.tensor.aliasing import SharedStorage

Patches = Sequence[AbstractContextManager[Any]]


@dataclass(frozen=True)
class Mutation:
    """Known fault that can be put into pydist, so that the hunter has to find it.

    Attributes:
        name: the command-line name.
        point: number, in the issue, of the guarantee that the fault breaks.
        only: ingredients of the programs that search for the fault.
        fault: a sentence that describes it.
        patches: contexts in which pydist has the fault.
    """

    name: str
    point: int
    only: tuple[str, ...]
    fault: str
    patches: Callable[[], Patches]

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Applies the fault to pydist inside the context."""
        with ExitStack() as stack:
            for each in self.patches():
                stack.enter_context(each)
            yield


MUTATIONS: dict[str, Mutation] = {}


def _mutation(name: str, point: int, *only: str) -> Callable[[Callable[[], Patches]], Any]:
    def keep(patches: Callable[[], Patches]) -> Callable[[], Patches]:
        fault = inspect.getdoc(patches) or ""
        MUTATIONS[name] = Mutation(name, point, only, fault, patches)
        return patches

    return keep


# -- 1: rank-local inspection decides which messages are sent -----------------------------------


@_mutation("pool-looked-at", 1, "look")
def _pool_sends_before_the_relu() -> Patches:
    """Sends the halo of a fused pool before the ReLU; that of an unfused pool, after the ReLU."""

    def pool(self: AveragePlan, x: Tensor, negative_slope: float = 1.0) -> Tensor:
        exchanges, means = self.exchanges(x), self.averaging.means
        return exchanges.corrected(
            exchanges.halo,
            x,
            lambda: means(x, self.own, self.out, None, negative_slope),
            lambda y, _, slab, box: means(slab, box, self.out, y, negative_slope),
        )

    return [patch.object(AveragePlan, "pool", pool)]


# -- 2: gradients that the reducer does not see -------------------------------------------------


@_mutation("cast-unreduced", 2, "surgery")
def _ignores_other_dtypes() -> Patches:
    """Does not reduce gradients of parameters whose dtype changed after `parallelize`."""

    def forgotten(self: Members, leaf: Leaf, parameter: Tensor) -> Leaf:
        return leaf if leaf.describes(parameter) else leaf.renewed(parameter)

    return [patch.object(Members, "current", forgotten)]


@_mutation("hooks-local", 2, "hooks")
def _hooks_see_the_local_part() -> Patches:
    """Runs users' hooks on parameters before the mean is formed, on this rank's part."""
    before = Reducer.before

    def without_waiting(self: Reducer, leaf: Leaf, grad: Tensor | None) -> Tensor | None:
        found = before(self, leaf, grad)
        leaf.waits = False
        return found

    return [
        patch.object(Reducer, "before", without_waiting),
        patch.object(Leaf, "call_hooks", lambda *_: None),
    ]


@_mutation("outside-unreduced", 2, "outside")
def _ignores_parameters_outside_of_models() -> Patches:
    """Does not reduce a parameter outside of parallelized models, such as one of a criterion."""
    register = Members.register

    def only_plain(self: Members, tensor: Tensor) -> None:
        if not isinstance(tensor, nn.Parameter):
            register(self, tensor)

    return [patch.object(Members, "register", only_plain)]


@_mutation("graph-unreduced", 2, "penalty")
def _leaves_gradients_with_a_graph_alone() -> Patches:
    """Does not reduce additions to a gradient with a graph (create_graph)."""
    finish = Bucket.finish

    def without_graphs(self: Bucket, *given: Any) -> None:
        found = [p.grad for e in self.leaves if (p := e.parameter()) is not None]
        kept = [(g, g.detach().clone()) for g in found if g is not None and g.requires_grad]
        finish(self, *given)
        for grad, values in kept:
            grad.detach().copy_(values)

    return [patch.object(Bucket, "finish", without_graphs)]


@_mutation("tied-twice", 2, "tied")
def _second_model_takes_members_again() -> Patches:
    """Makes a parameter of two parallelized models a member of both, and reduces it in both."""
    add_lanes = Members.add_lanes

    def anew(self: Members, parameters: Any, gradients: Any = None) -> Any:
        found = list(parameters)
        known = [leaf for _, p in found if (leaf := leaf_of(p)) is not None]
        with ExitStack() as stack:
            for leaf in known:
                stack.enter_context(patch.object(leaf, "reducer", lambda: None))
            return add_lanes(self, found, gradients)

    return [patch.object(Members, "add_lanes", anew)]


@_mutation("caught-forgotten", 2, "raise")
def _forgets_interrupted_passes() -> Patches:
    """Leaves buckets half filled for the next backward after one that raised and was caught."""

    def leave(self: Reducer, *, interrupted: bool) -> None:
        self._runs.pop()

    return [patch.object(Reducer, "leave", leave)]


# -- 3: deferred work ---------------------------------------------------------------------------


@_mutation("norm-reads-late", 3, "data")
def _norms_read_their_weights_late() -> Patches:
    """Computes the result of a norm from the weight and bias at the time of its use."""

    def late(method: Any) -> Any:
        def read(self: AppliedNorm, *given: Any) -> Any:
            x, scale, shift, statistics, values = self._operands
            rows = Rows(statistics, scale, self._call.eps, self._call.centered)
            values.copy_(rows.values(shift, values.shape[1], x.dtype)[:3])
            return method(self, *given)

        return read

    names = ("write", "with_relu", "parametric")
    return [patch.object(AppliedNorm, name, late(getattr(AppliedNorm, name))) for name in names]


# -- 4, 5: views and indices --------------------------------------------------------------------


@_mutation("views-stale", 4, "views")
def _stale_views_are_used() -> Patches:
    """Allows uses of a copy in place of a view after a change of its base."""
    return [patch.object(SharedStorage, "change_after", lambda self, memory, part: "")]


@_mutation("indices-local", 5, "indices")
def _indices_of_the_shard() -> Patches:
    """Returns indices into this rank's shard from `torch.where(condition)` and similar calls."""
    return [patch.object(nonzero, "_indices", lambda x: local_of(x).detach().nonzero())]


# -- 6: equal on all ranks ----------------------------------------------------------------------


@_mutation("checks-used-up", 6, "different")
def _three_checks_for_each_shape() -> Patches:
    """Compares plain operands three times per shape, and parameters never."""
    used: Counter[tuple[int, torch.Size]] = Counter()
    add = Contents.add

    def three_times(self: Contents, tensor: Tensor, *given: Any) -> Any:
        used[id(self), tensor.shape] += 1
        return add(self, tensor, *given) if used[id(self), tensor.shape] <= 3 else None

    return [
        patch.object(Contents, "add", three_times),
        patch.object(TrainedParameters, "share", lambda self, *_: ()),
    ]


@_mutation("numbers-unseen", 6, "different")
def _numbers_of_one_rank() -> Patches:
    """Does not compare calls on sharded tensors and their numbers."""
    return [patch.object(sharded, "history_of", lambda *_: NO_HISTORY)]


# -- 7: groups of unequal size ------------------------------------------------------------------


@_mutation("groups-equal", 7, "groups", "unequal")
def _groups_weigh_alike() -> Patches:
    """Weights all sample groups equally, independent of their number of samples."""
    shares = property(lambda self: (1,) * self._parts)
    return [patch.object(GroupSizes, "shares", shares)]


@_mutation("first-sample-equal", 7, "groups", "unequal", "dropout")
def _first_sample_as_of_equal_groups() -> Patches:
    """Computes the first sample of a group as if all groups had as many samples as this one."""

    def first_sample(self: GroupSizes) -> int:
        return self._index * self.own if self._first is None else self._first

    return [patch.object(GroupSizes, "first_sample", property(first_sample))]


@_mutation("closures-alone", 7, "groups", "lbfgs")
def _line_search_by_the_loss_of_a_group() -> Patches:
    """Compares the losses of each rank's own sample group in a line search, without a checksum."""
    return [
        patch.object(closures, "_agreed", lambda closure, *_: closure),
        patch.object(TrainedParameters, "share", lambda self, *_: ()),
    ]


@_mutation("fast-weights-alone", 7, "groups", "fast")
def _fast_weights_of_a_group() -> Patches:
    """Gives plain tensors in place of parameters the gradient of their group's own loss."""
    return [patch.object(replaced, "note_use", lambda *_: None)]


# -- 10: second derivatives in checkpoints ------------------------------------------------------


@_mutation("saved-read-twice", 10, "penalty", "checkpoint")
def _prelu_reads_saved_tensors_twice() -> Patches:
    """Reads saved tensors twice in the double backward of a PReLU in a checkpoint."""
    by_composition = prelu._by_composition

    def twice(ctx: Any, *given: Any) -> Any:
        _ = ctx.saved_tensors
        return by_composition(ctx, *given)

    return [
        patch.object(prelu, "_by_composition", twice),
        patch.object(norm, "hook_on_saved", lambda: None),
    ]
