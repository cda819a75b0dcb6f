"""Partitions an optimizer (ZeRO-1): each rank steps its own part of the parameters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pydist.entry_hook import EntryHook, entry_hook_of
from pydist.errors import NotSupported, UsageError
from pydist.exchange.own_slice import is_sharded_weight, own_slice, slicing_of
from pydist.gradients.forms.form import DenseForm
from pydist.gradients.members import Members
from pydist.gradients.partitioned import PartitionedGradient, refuse_pending
from pydist.gradients.partitioned_bucket import ParameterPartition, PartitionedBucket
from pydist.gradients.reducer import Reducer
from pydist.gradients.rows import in_memory_order_of, memory_of
from pydist.mesh import Mesh
from pydist.optim.compared_settings import ComparedSettings
from pydist.optim.layerwise import LayerwiseOptimizer
from pydist.optim.whole_state import ParameterState, gather_state, state_of_all
from pydist.slices.steps import (
    ELEMENTWISE,
    gather_in_state_dict,
    has_hooks,
    own_part_of_state,
    step_obstacle,
    step_without_hooks,
)
from pydist.watchdog import SPAN, phase

Use = Literal["auto", "always", "never"]

_OF_HOOKS = "its step hooks would see parts; register them on what pydist.optim.sharded returns"
WORTHWHILE = 1 << 20
"""Number of elements from which "auto" partitions the step. Adam takes 4.5 ns per element on one
core, so two ranks save at least 2.4 ms: the possible cost of each bucket's second message."""


def sharded(optimizer: Optimizer, model: nn.Module, use: Use = "auto") -> Optimizer:
    """Partitions the optimizer's step and state over the ranks (ZeRO-1).

    All ranks hold equal parameters, and without partitioning each rank steps all of them. With it,
    each rank gets the mean gradient of its own part only (reduce-scatter), keeps the optimizer's
    state for it, steps it, and sends it to the others (all-gather). Both messages together are as
    large as the all-reduce of gradients; the step takes 1/ranks of the time, and the state 1/ranks
    of the memory. The resulting parameters are the same. The slices of a sharded weight (see
    `pydist.parallelize`) are partitioned over the ranks that hold the same slice. In stages (see
    `pydist.pipeline`) each stage partitions the parameters that it uses over the ranks of its mesh.

    The training loop stays the same, with the returned optimizer: schedulers, closures, `no_sync`,
    `GradScaler`, `nn.utils.clip_grad_norm_`, `zero_grad` and `autograd.grad` work unchanged. But
    between `backward()` and `zero_grad()`, the values of `p.grad` are partitioned over the ranks
    and can't be read; `gather_gradients(model)` gathers them. `state_dict()` is collective and is
    that of the plain optimizer, which loads on any number of ranks, also without pydist.

    Args:
        optimizer: over parameters of the model: one of torch's element-wise optimizers, a
            `LayerwiseOptimizer`, or one whose class has ``elementwise = True``. Give the returned
            one to schedulers, and register hooks there. Existing state is kept.
        model: the parallelized model.
        use: "always", "never", or "auto": if it is estimated to be faster, that is on two ranks or
            more, from a million parameters on, with a supported optimizer. The estimate depends on
            counts alone, not on measured time: a rerun decides the same. Gradients of another form
            than "dense" are never partitioned. Ranks on unequal devices always partition, so that
            each number is computed on one of them, and copies stay equal.

    Returns:
        A `ShardedOptimizer`, or the unchanged optimizer, as on a stage of one rank.

    Raises:
        UsageError: the model is not parallelized, or "always" with an unsupported optimizer.
        NotSupported: "always", and the model's gradients have another form than "dense".
    """
    if use not in get_args(Use):
        raise UsageError(f"use={use!r}; possible are {', '.join(get_args(Use))}")
    entry = entry_hook_of(model)
    if use == "never" or entry.mesh.size == 1:
        return optimizer
    if use == "auto":
        if not all(isinstance(form, DenseForm) for form in entry.forms):
            return optimizer
        parameters = (own_slice(p) for g in optimizer.param_groups for p in g["params"])
        elements = sum(p.numel() for p in parameters if p.requires_grad and _has_copies(p, entry))
        is_faster = elements >= WORTHWHILE and _obstacle(optimizer) is None
        if not (is_faster or entry.mesh.world.mixes):
            return optimizer
    return ShardedOptimizer(optimizer, model)


def _obstacle(optimizer: Optimizer) -> str | None:
    """Returns why an optimizer can't be partitioned, or `None`."""
    return _OF_HOOKS if has_hooks(optimizer) else step_obstacle(optimizer)


def gather_gradients(model: nn.Module) -> None:
    """Gathers the full gradients as ordinary tensors, equal on all ranks. Collective.

    Needed only with a partitioned optimizer (see `sharded`), to read gradients between `backward()`
    and `step()`; otherwise it does nothing.
    """
    entry_hook_of(model).reducer.gather_gradients()


def optimizer_kind(optimizer: Optimizer) -> str:
    """Returns the name of an optimizer's class; of a partitioned one, that of the wrapped one."""
    plain = optimizer._inner if isinstance(optimizer, ShardedOptimizer) else optimizer
    return type(plain).__name__


class ShardedOptimizer(Optimizer):
    """Optimizer of torch that each rank applies to its own part of the parameters (ZeRO-1).

    See `sharded`. It shares the parameter groups of the wrapped optimizer; their settings may be
    changed on either. Parameters that the model does not have, or that are not dense in memory, are
    stepped in full by every rank; slices that no other rank holds by their rank.
    """

    steps_parts = True
    """Whether each rank steps its parts of parameters, or of slices of sharded weights."""

    def __init__(self, optimizer: Optimizer, model: nn.Module) -> None:
        """Wraps an optimizer.

        Args:
            optimizer: that can step parts, see `sharded`; must no longer be stepped directly.
            model: the parallelized model.

        Raises:
            UsageError: the optimizer is not supported, or the model is not parallelized.
        """
        obstacle = _obstacle(optimizer)
        if obstacle is not None:
            raise UsageError(f"{type(optimizer).__name__} can't be partitioned: {obstacle}")
        self._entry = entry_hook_of(model)
        self._inner = optimizer
        # Other classes may keep numbers in their groups or attributes, which change in each step.
        by_parameter = type(optimizer) in ELEMENTWISE or isinstance(optimizer, LayerwiseOptimizer)
        self._steps_once = not by_parameter
        self._settings = ComparedSettings(optimizer)
        self._parts: dict[Tensor, Tensor] = {}
        self._layout: dict[int, ParameterPartition] = {}
        self._source: Mapping[int, ParameterPartition] | None = (
            None  # the reducer's parts, for `_layout`
        )
        super().__init__(optimizer.param_groups, optimizer.defaults)
        optimizer.param_groups = self.param_groups
        self._reducer.partition(self._parameters())
        self._take(dict(optimizer.state))

    def __repr__(self) -> str:
        return f"Sharded{self._inner!r}"

    def __getstate__(self) -> dict[str, Any]:
        raise NotSupported("copying or pickling a partitioned optimizer: use state_dict()")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group, on all ranks, and partitions its gradients; see `torch.optim.Optimizer`.

        Raises:
            NotSupported: a parameter has hooks, or gradients of another form than "dense".
        """
        if self._source is None:  # the base class adds the optimizer's groups
            super().add_param_group(param_group)
            return
        before = len(self.param_groups)
        try:
            self._inner.add_param_group(param_group)  # to the same list; it may divide the group
            added = [p for group in self.param_groups[before:] for p in group["params"]]
            self._reducer.partition(added)
        except BaseException:
            del self.param_groups[before:]
            raise
        for parameter in added:
            self._parts.setdefault(parameter, parameter)  # whole, until the reducer assigns parts

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps all parameters. Collective.

        Args:
            closure: re-evaluates the loss, with gradients; called once.

        Returns:
            The result of the closure; None without one.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._settings.note(self._mesh)
        members = self._follow_members()
        rest = {id(p): p for p in map(own_slice, self._parameters())}
        for parameter in rest.values():
            if isinstance(parameter.grad, PartitionedGradient):
                refuse_pending(parameter.grad)  # before the first message is sent
        buckets = []
        for bucket in members.partitioned:
            alive = (p for leaf in bucket.leaves if (p := leaf.parameter()) is not None)
            if some := {id(p) for p in alive if rest.pop(id(p), None) is not None}:
                buckets.append((bucket, some))
        failure: Exception | None = None
        if self._steps_once:
            everything = {id(own_slice(p)) for p in self._parameters()}
            failure = self._step_some(everything, None, whole=True)
        for bucket, some in buckets:
            if not self._steps_once:
                failure = self._step_some(some, failure)
            # The values are in flight while the next bucket is stepped. They are sent after a
            # failure as well, as other ranks, which may own none of its parts, wait for them.
            self._start_gathering_values(bucket)
        if not self._steps_once:
            failure = failure or self._step_some(rest.keys(), None, whole=True)
        for bucket, some in buckets:
            self._finish_gathering_values(bucket, some)
        if failure is not None:
            raise failure
        return loss

    def _step_some(
        self, some: Collection[int], failure: Exception | None, *, whole: bool = False
    ) -> Exception | None:
        """Steps this rank's parts of some parameters, given by their ids.

        Args:
            some: the ids; of sharded weights, those of this rank's slices.
            failure: an earlier exception, after which nothing is stepped.
            whole: whether every rank steps all of them.

        Returns:
            The first exception.
        """
        norms = None
        if isinstance(self._inner, LayerwiseOptimizer) and not whole:
            norms = _Norms(self._mesh, _among(some, self._parameters()))
        with self._mesh.session.timers.measure("optimizer"), self._on_own_parts(some) as there_are:
            try:
                if (there_are or self._steps_once) and failure is None:
                    with self._with_norms(norms):
                        step_without_hooks(self._inner)
            except Exception as error:
                failure = error
            finally:
                if norms is not None:
                    norms.finish()
        if norms is not None:
            self._record(some, norms)
        return failure

    @torch.no_grad()
    def _start_gathering_values(self, bucket: PartitionedBucket) -> None:
        """Starts to gather a bucket's parameters after each rank has changed its part."""
        with self._mesh.session.timers.measure("gradients"):
            bucket.start_gathering_values()
            bucket.transport.progress()

    @torch.no_grad()
    def _finish_gathering_values(self, bucket: PartitionedBucket, changed: Collection[int]) -> None:
        """Waits until a bucket's parameters, changed ones given by ids, are complete."""
        with self._mesh.session.timers.measure("gradients"):
            bucket.finish_gathering_values(changed)

    def _record(self, some: Collection[int], norms: _Norms) -> None:
        """Records norms and ratios of whole parameters, also of those without a part here."""
        inner = self._inner
        assert isinstance(inner, LayerwiseOptimizer)
        if inner.recorded is None:
            return
        for group in self.param_groups:
            parameters = _among(some, group["params"])
            if group["adapt"] and parameters:
                weights, lengths = norms.of(parameters)
                slices = [own_slice(p) for p in parameters]
                inner.record(slices, weights, lengths, inner.ratios(group, weights, lengths))

    @contextmanager
    def _with_norms(self, norms: _Norms | None) -> Iterator[None]:
        """Lets the optimizer ask for norms of whole parameters in the `with` block."""
        if norms is None:
            yield
            return
        assert isinstance(self._inner, LayerwiseOptimizer)
        norms.parts = {id(own): p for p, own in self._parts.items()}
        with self._inner.summed_by(norms):
            yield

    def state_dict(self) -> dict[str, Any]:
        """Returns the plain optimizer's full state on every rank. Collective."""
        world = self._mesh.world
        with phase("state_dict(), to be called on all ranks", SPAN):
            if world.size > 1:  # named, for the error if one rank alone calls it
                world.ledger.note(world, ("state_dict() of a partitioned optimizer",), waits=True)
            self._follow_members()
            own = self.state
            if any(is_sharded_weight(p) for p in self._parameters()):
                gather_in_state_dict(self)
            self.state = defaultdict(dict, self._whole_state())
        try:
            return super().state_dict()
        finally:
            self.state = own

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads the state of a plain optimizer, or of a partitioned one on any number of ranks."""
        super().load_state_dict(state_dict)
        # The optimizer converts the state of its older versions.
        self._inner.__setstate__({"state": self.state, "param_groups": self.param_groups})
        self._take(dict(self._inner.state))

    @property
    def _mesh(self) -> Mesh:
        return self._entry.mesh

    @property
    def _reducer(self) -> Reducer:
        return self._entry.reducer

    def _parameters(self) -> list[nn.Parameter]:
        return [p for group in self.param_groups for p in group["params"]]

    def _follow_members(self) -> Members:
        """Returns the members, after redistributing the state if their buckets have changed."""
        members = self._reducer.members
        if members.parts is not self._source:
            self._take(self._whole_state())
        return members

    def _take(self, whole: dict[Any, ParameterState]) -> None:
        """Makes this rank's parts, as the reducer assigns them, with their state."""
        members = self._reducer.members
        self._source = members.parts
        parts = {id(p): members.part_of(p) for p in self._parameters()}
        self._layout = {key: part for key, part in parts.items() if part is not None}
        self._parts = {}
        state = defaultdict(dict, state_of_all(whole))
        for parameter in self._parameters():
            part = self._layout.get(id(parameter))
            if part is None:
                self._parts[parameter] = parameter
            elif part.stop > part.start or sum(part.counts) == 0:
                row = memory_of(own_slice(parameter).detach())
                self._parts[parameter] = row[part.start : part.stop].detach()
            own = self._parts.get(parameter)
            if own is not None and parameter in whole:
                state[own] = {
                    name: _own(value, parameter, part) for name, value in whole[parameter].items()
                }
        self.state = self._inner.state = state

    def _whole_state(self) -> dict[Any, ParameterState]:
        """Returns the full state by parameter, on every rank. Collective."""
        return gather_state(self._mesh, self._parameters(), self._parts, self._layout, self.state)

    @contextmanager
    def _on_own_parts(self, some: Collection[int]) -> Iterator[bool]:
        """Replaces the parameters by this rank's parts, with their gradients.

        Yields:
            Whether this rank has any parts.
        """
        given = [group["params"] for group in self.param_groups]
        own: list[Tensor] = []
        try:
            for group in self.param_groups:
                group["params"] = list(self._prepared(_among(some, group["params"])))
                own += group["params"]
            yield bool(own)
        finally:
            for group, parameters in zip(self.param_groups, given, strict=True):
                group["params"] = parameters
            for part in own:
                if id(own_slice(part)) not in some:  # else it is the parameter itself
                    part.grad = None

    def _prepared(self, parameters: Sequence[Tensor]) -> Iterator[Tensor]:
        for parameter in parameters:
            own = self._parts.get(parameter)
            if own is None:
                continue  # all of it belongs to other ranks
            if own is not parameter:
                part, slice_ = self._layout[id(parameter)], own_slice(parameter)
                own.data = memory_of(slice_.detach())[part.start : part.stop]
                grad = slice_.grad
                if isinstance(grad, PartitionedGradient):
                    own.grad = grad.piece
                elif grad is not None:
                    row = in_memory_order_of(slice_, grad.detach())
                    own.grad = row[part.start : part.stop]
            yield own


class _Norms:
    """Sums squares of parameters over the ranks that have parts of them.

    Args:
        mesh: the mesh.
        parameters: the same on all ranks.
    """

    def __init__(self, mesh: Mesh, parameters: Sequence[Tensor]) -> None:
        self._world = mesh.world
        self._places = {id(p): i for i, p in enumerate(parameters)}
        device = parameters[0].device if parameters else None
        self._all = torch.zeros(2, len(parameters), dtype=torch.float64, device=device)
        self._is_sent = False
        self.parts: dict[int, Tensor] = {}
        """The parameters, by the ids of this rank's parts."""

    def __call__(self, parts: Sequence[Tensor], squares: Tensor) -> Tensor:
        """Returns the sums for whole parameters, from the sums for this rank's parts."""
        places = [self._places[id(self.parts[id(part)])] for part in parts]
        self._all[:, places] = squares
        self.finish()
        return self._all[:, places]

    def of(self, parameters: Sequence[Tensor]) -> Tensor:
        """Returns the norms of whole parameters, [2, P], after `finish`."""
        return self._all[:, [self._places[id(p)] for p in parameters]].sqrt()

    def finish(self) -> None:
        """Takes part in the sum, once, also without parts or after a failure."""
        if not self._is_sent:
            self._is_sent = True
            self._world.all_reduce(self._all)


def _has_copies(parameter: Tensor, entry: EntryHook) -> bool:
    """Returns whether several ranks train a parameter, or this slice, so that it has parts."""
    is_member = entry.reducer.members.has(parameter)  # others belong to other stages
    return is_member and entry.mesh.grid.size(slicing_of(parameter).axes) > 1


def _among(some: Collection[int], parameters: Sequence[Tensor]) -> list[Tensor]:
    """Returns the parameters with these ids; sharded weights by the ids of this rank's slices."""
    return [p for p in parameters if id(own_slice(p)) in some]


def _own(value: Any, parameter: Tensor, part: ParameterPartition | None) -> Any:
    """Returns this rank's part of a value of the full state (moments, a count of steps)."""
    if not isinstance(value, Tensor):
        return value
    is_count = value.dim() == 0 and value.device != parameter.device
    if part is None or value.shape != parameter.shape or is_count:
        return value.clone()
    if is_sharded_weight(parameter):
        value = own_part_of_state(value, parameter)
    return in_memory_order_of(own_slice(parameter), value)[part.start : part.stop].clone()
