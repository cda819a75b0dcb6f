"""Cuts the inputs of a parallelized model at its entry, and counts its passes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from pydist.arguments import is_container, leaves, mapped
from pydist.batches import Batches, batch_of, refuse_pickling
from pydist.checkpointed import CheckpointedPasses
from pydist.comm import Transport
from pydist.errors import NotSupported, UsageError
from pydist.exchange.consistency import consistency_of
from pydist.exchange.history import history_of_input
from pydist.gradients.forms.form import Form
from pydist.gradients.forms.settings import Dense, Gradients, check_form
from pydist.gradients.lane import Lane
from pydist.gradients.reducer import Reducer
from pydist.gradients.registration import reducer_of
from pydist.group_sizes import GroupSizes
from pydist.interop import as_tensor, is_array
from pydist.mesh import Mesh
from pydist.ops.pointwise.keyed import draws_of
from pydist.slices.cut import shard_weights
from pydist.tensor import Origin, ShardedTensor, local_of
from pydist.tensor.aliasing import view_at
from pydist.tensor.operands import distribute_tensor
from pydist.tensor.refusals import refuse_compiled

ENTRY = "_pydist_entry"
"""Attribute of a parallelized model that holds its `EntryHook`."""

_NO_SCRIPT = (
    "torch.{} of a parallelized model: exchanges between ranks can't be recorded; load its "
    "state_dict() into a model that is not parallelized, and give that one"
)
_NO_FUNC = (
    "a parallelized model within torch.func or vmap: their tensors have no memory that could be "
    "exchanged; use torch.autograd.grad, torch.autograd.functional or a loop"
)


def dims_of_network(model: nn.Module) -> int:
    """Returns the number of spatial dims of a network, the most of its convolutions; 3 without."""
    found = {len(m.kernel_size) for m in model.modules() if isinstance(m, _ConvNd)}
    return max(found, default=3)


def entry_hook_of(model: nn.Module) -> EntryHook:
    """Returns the entry hook that `parallelize` has added to a model.

    Raises:
        UsageError: the model is not parallelized.
    """
    entry = model.__dict__.get(ENTRY)
    if not isinstance(entry, EntryHook):
        raise UsageError(
            f"this {type(model).__name__} is not parallelized: call pydist.parallelize first"
        )
    return entry


class _Pass(NamedTuple):
    """Pass that a model makes in training.

    Attributes:
        forward: its number in the session; -1 for none.
        sizes: of its batch.
    """

    forward: int
    sizes: GroupSizes | None


class EntryHook:
    """The hook at a model's entry, which counts forward passes and wraps the inputs."""

    def __init__(self, mesh: Mesh, statistics: str, group_weight: str) -> None:
        self.mesh, self.statistics = mesh, statistics
        self.batches = Batches(mesh, group_weight == "samples")
        self._lanes: list[Lane] = []
        self.dims = mesh.grid.batch_dims(3)
        """Number of dims of plain tensors that are cut on entry."""
        self.gradients: Gradients = Dense()
        self.continues: bool | None = None
        """Whether the next batch is a further part of the last one, so that it draws the numbers of
        its samples in the same step; `None`: if it accumulates gradients with it (`no_sync`)."""
        self._pauses = 0  # open `no_sync` blocks
        self._sizes: GroupSizes | None = None
        """Sizes of the last call's batch, where its place in the step matters."""
        self._passed: GroupSizes | None = None  # of the last pass of a step that goes on
        self._checkpointed = CheckpointedPasses[_Pass]()

    def __deepcopy__(self, memo: dict[int, Any]) -> EntryHook:
        # A copy of the model (such as an average of its weights) runs on the same mesh; its
        # parameters become members of the reducer if they are ever trained.
        copy = memo[id(self)] = EntryHook(self.mesh, self.statistics, "samples")
        copy.batches = deepcopy(self.batches, memo)
        copy.dims = self.dims
        return copy

    __reduce_ex__ = refuse_pickling

    def refuse_script(self) -> NoReturn:
        """Refuses torch.jit.script, which calls this instead of the model."""
        raise NotSupported(_NO_SCRIPT.format("jit.script"))

    @property
    def forms(self) -> list[Form]:
        """How the gradients of the model's parameters are averaged, for each lane."""
        return [lane.form for lane in self._lanes]

    def sent(self) -> dict[str, int]:
        """Returns the bytes that this rank has sent for gradients, by the kind of group."""
        total: dict[str, int] = {}
        for form in self.forms:
            for kind, count in form.sent().items():
                total[kind] = total.get(kind, 0) + count
        return total

    @property
    def reducer(self) -> Reducer:
        """The gradient reducer, which is shared by all models on the mesh."""
        return reducer_of(self.mesh)

    def adopt(
        self,
        module: nn.Module,
        *,
        sharded_weights: bool = False,
        gradients: Gradients | None = None,
    ) -> None:
        """Broadcasts parameters and buffers from rank 0, and adds the module to the reducer.

        Args:
            module: the model.
            sharded_weights: whether ranks along the channel axis store slices of wide layers'
                weights.
            gradients: how gradients are averaged; by default by a dense all-reduce.
        """
        self.gradients = gradients or Dense()
        self.dims = self.mesh.grid.batch_dims(dims_of_network(module))
        if self.mesh.size > 1:
            check_form(self.gradients, self.mesh, module.named_parameters())
            broadcast_state(module, self.mesh.world)
            _ = self.reducer  # installs its checks before the hooks of sharded weights
            if sharded_weights:
                shard_weights(module, self.mesh, self.statistics)
            self._lanes = self.reducer.members.add_lanes(module.named_parameters(), gradients)
            consistency_of(self.mesh).parameters.hold(module, self.mesh.session.forwards)

    def release(self, parameters: Iterable[Tensor]) -> None:
        """Takes parameters out of the reducer that no call on this mesh uses. Collective."""
        released = list(parameters)
        for lane in self._lanes:
            self.reducer.members.release(lane, released)

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Prepares the arguments of the model; a forward pre-hook."""
        _refuse_transforms()
        args = tuple(self._cut(a) for a in args)
        kwargs = {name: self._cut(a) for name, a in kwargs.items()}
        if not any(isinstance(each, ShardedTensor) for each in (*args, *kwargs.values())):
            args = tuple(mapped(self._cut_nested, a) for a in args)
            kwargs = {name: mapped(self._cut_nested, a) for name, a in kwargs.items()}
        given = list(leaves((*args, *kwargs.values())))
        trains = module.training and torch.is_grad_enabled()
        again = trains and torch._C._current_graph_task_id() != -1
        if trains and not again:
            self._begin_pass()
        if any(isinstance(each, ShardedTensor) for each in given):
            consistency_of(self.mesh).called(module, self.mesh, trains)
        if again:
            forward, known = self._checkpointed.repeated() or _Pass(-1, None)
            sizes = self.batches.enter(module, given, known)
        else:
            forward, sizes = self.mesh.session.forwards, self.batches.enter(module, given)
            self._sizes = sizes = sizes or self._sizes_of_one_group(batch_of(given))
        if trains and not again:
            self._checkpointed.add(_Pass(forward, sizes))
            if self.continues is None:
                self._expect_more(module)
        return (
            tuple(self._enter(a, sizes, forward) for a in args),
            {name: self._enter(a, sizes, forward) for name, a in kwargs.items()},
        )

    def _begin_pass(self) -> None:
        """Counts a training pass; one that accumulates with earlier ones belongs to their step."""
        session = self.mesh.session
        if self.continues is None and session.accumulates is self:
            assert self._passed is not None
            session.part += sum(self._passed.counts)
        elif self.continues:
            draws_of(self.mesh).forget(session.forwards)
        else:
            session.forwards += 1

    def _expect_more(self, module: nn.Module) -> None:
        """Records under `no_sync` that the next training pass belongs to the same step."""
        # A frozen network exchanges no sizes: its group may be alone.
        trains = self._pauses and any(p.requires_grad for p in module.parameters())
        self._passed = self._sizes if trains else None
        self.mesh.session.accumulates = None if self._passed is None else self

    def _sizes_of_one_group(self, batch: Tensor | None) -> GroupSizes | None:
        """Returns the sizes of a batch of the only group, if its place in the step matters."""
        if batch is None or self.mesh.data_size > 1:
            return None
        known = batch._origin.sizes if isinstance(batch, ShardedTensor) else None
        given = None if known is None else known.given_first
        after = self.mesh.session.part
        if not (given or after or self._pauses or (known is not None and known.part)):
            return None
        return GroupSizes(self.mesh, batch.shape[0], given, after=after)

    def enter_part(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Prepares the arguments of a part that is called separately; a forward pre-hook."""
        if self.batches.is_inside(module):
            return None
        self.batches.note_replaced(module)
        args = tuple(self._cut(a) for a in args)
        kwargs = {name: self._cut(a) for name, a in kwargs.items()}
        batch = batch_of(leaves((*args, *kwargs.values())))
        if not isinstance(batch, ShardedTensor):
            return None
        sizes = self.batches.enter_part(module, batch)
        return (
            tuple(self._enter(a, sizes) for a in args),
            {name: self._enter(a, sizes) for name, a in kwargs.items()},
        )

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulates gradients without reduction; the next backward outside reduces the sum.

        Training passes in the block and the next one are parts of one step: they draw the random
        numbers that one pass over all of their samples draws.
        """
        self._pauses += 1
        try:
            with nullcontext() if self.mesh.size == 1 else self.reducer.paused(self._lanes):
                yield
        # An error does not end the step: one rank alone may catch it, and must go on as the others.
        finally:
            self._pauses -= 1

    @property
    def accumulates(self) -> bool:
        """Whether this is a `no_sync` block."""
        return self._pauses > 0

    @contextmanager
    def normed_by_group(self) -> Iterator[None]:
        """Restricts the statistics of batch norm to the sample group, in the block."""
        given, self.statistics = self.statistics, "group"
        try:
            yield
        finally:
            self.statistics = given

    def reduce(self) -> None:
        """Reduces the gradients accumulated under `no_sync` now. Collective."""
        if self.mesh.session.accumulates is self:
            self.mesh.session.accumulates = None
        if self.mesh.size > 1:
            self.reducer.reduce()

    def of_batch(self, x: Tensor, sizes: GroupSizes | None = None) -> ShardedTensor:
        """Wraps a plain tensor of a batch, by default the running one, as a sharded, uncut one."""
        whole = distribute_tensor(x, self.mesh, {})
        running = self._sizes if self.mesh.data_size == 1 else self.batches.running
        entered: ShardedTensor = self._enter(whole, sizes or running)
        return entered

    def _cut(self, x: Any) -> Any:
        if isinstance(x, ShardedTensor) or not is_array(x):
            return x
        whole = as_tensor(x)
        return distribute_tensor(whole, self.mesh) if whole.dim() == self.dims else x

    def _cut_nested(self, x: Any) -> Any:
        # Kernels are 5-D too, and passed in lists: tensors that require gradients are not cut, and
        # no nested tensor is if a direct argument is a volume.
        return self._cut(x) if isinstance(x, Tensor) and not x.requires_grad else x

    def _enter(self, x: Any, sizes: GroupSizes | None, forward: int | None = None) -> Any:
        if is_container(x):
            # In place: a model may write into a dict argument for its caller to read.
            for each in leaves((x,)):
                if isinstance(each, ShardedTensor):
                    origin = self._origin_of(each, sizes, forward)
                    each._history = history_of_input(
                        each._history, each._origin.forward, origin.forward
                    )
                    each._origin = origin
            return x
        if not isinstance(x, ShardedTensor):
            return x
        origin = self._origin_of(x, sizes, forward)
        if origin == x._origin:
            return x
        shown = ShardedTensor(local_of(x), x.layout, origin)
        shown._history = history_of_input(x._history, x._origin.forward, origin.forward)
        shown._view = view_at(x)
        return shown

    def _origin_of(self, x: ShardedTensor, sizes: GroupSizes | None, forward: int | None) -> Origin:
        # Not by the number of samples or rows of `x`: by chance one group may have as many as the
        # batch, and would exchange nothing where the others do.
        known = x._origin
        forward = known.forward if forward is None else forward
        return Origin(forward, sizes or known.sizes, self.statistics)


def _refuse_transforms() -> None:
    """Refuses calls through torch.func, torch.compile, torch.jit.trace or torch.export."""
    if torch._C._are_functorch_transforms_active():
        raise NotSupported(_NO_FUNC)
    if torch._C._get_tracing_state() is not None:
        raise NotSupported(_NO_SCRIPT.format("jit.trace"))
    if torch.compiler.is_exporting():
        raise NotSupported(_NO_SCRIPT.format("export"))
    refuse_compiled("a parallelized model")


def _state(module: nn.Module) -> Iterator[Tensor]:
    """Yields parameters and buffers; shared ones once."""
    yield from module.parameters()
    yield from module.buffers()


def broadcast_state(module: nn.Module, world: Transport) -> None:
    """Broadcasts a module's parameters and buffers from rank 0. Collective."""
    with torch.no_grad():
        for tensor in _state(module):
            sent = tensor.detach().contiguous()
            world.broadcast(sent)
            if sent.data_ptr() != tensor.data_ptr():
                tensor.copy_(sent)
