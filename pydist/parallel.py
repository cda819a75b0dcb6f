"""`parallelize`, which trains an unmodified network on a mesh."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList

from pydist.arguments import is_container, leaves, mapped
from pydist.batch_layers import BatchLayers
from pydist.batches import Batches, batch_of, refuse_pickling
from pydist.comm import Transport
from pydist.comm.consensus import require_same
from pydist.errors import NotSupported, UsageError
from pydist.exchange.consistency import consistency_of
from pydist.exchange.history import history_of_input
from pydist.exchange.own_slice import is_sharded_weight
from pydist.global_loss import agree_on_closures_of
from pydist.gradients.forms.form import Form
from pydist.gradients.forms.settings import Dense, Gradients, check_groups, settings_of
from pydist.gradients.lane import Lane
from pydist.gradients.reducer import Reducer
from pydist.gradients.registration import reducer_of
from pydist.group_sizes import GroupSizes
from pydist.interop import as_tensor, is_array
from pydist.mesh import Mesh
from pydist.ops.norm.batch_norm import STATISTICS
from pydist.ops.pointwise.keyed import draws_of
from pydist.slices.cut import shard_weights
from pydist.structure import facts_of
from pydist.tensor import Origin, ShardedTensor, local_of
from pydist.tensor.aliasing import view_at
from pydist.tensor.distribute import distribute_tensor
from pydist.tensor.refusals import refuse_compiled
from pydist.watchdog import MODULE_PATH

_ENTRY = "_pydist_entry"

_NO_SCRIPT = (
    "torch.{} of a parallelized model: exchanges between ranks can't be recorded; load its "
    "state_dict() into a model that is not parallelized, and give that one"
)
_NO_FUNC = (
    "a parallelized model within torch.func or vmap: their tensors have no memory that could be "
    "exchanged; use torch.autograd.grad, torch.autograd.functional or a loop"
)

_M = TypeVar("_M", bound=nn.Module)


GROUP_WEIGHTS = ("samples", "equal")


def parallelize(
    model: _M,
    mesh: Mesh,
    batch_norm: str = "global",
    group_weight: str = "samples",
    sharded_weights: bool = False,
    gradients: str | Gradients = "dense",
) -> _M:
    """Prepares `model` for training on a mesh: on split samples, over several groups, or both.

    The model keeps its class, its hooks and its `state_dict` keys; only hooks are added. All ranks
    start from the parameters and buffers of rank 0. Inputs may be sharded (from a `Loader`) or
    plain 5-D tensors or arrays, equal on all ranks of a sample group, which are cut on entry; if no
    argument is such, those in lists, tuples, dicts and dataclasses are cut. Of networks whose
    convolutions have fewer dims, images [N, C, H, W] or lines [N, C, W] are cut instead, if the
    mesh has several parts along height or width. With several groups,
    parts of the model that are called separately accept the same inputs.

    After `backward()`, every gradient is the mean over the sample groups, weighted by their numbers
    of samples: if the loss is a mean over samples, the gradient of the global batch. For other
    losses see `pydist.sum_over_groups`. This holds for the model's parameters and any other
    `nn.Parameter` that feeds or follows a sharded call, or is trained on the outputs of a frozen
    model; not for one that only follows `detach()` or `no_grad()`. It also holds for plain tensors
    that replace parameters, as in `torch.func.functional_call`; any other plain tensor is data of
    its group, with the gradient of the group's own loss. Hooks on parameters see the mean.

    The optimizer may be made before or after; `pydist.optim.sharded` partitions its step over the
    ranks. `model.no_sync()` defers the reduction, and hooks, to accumulate gradients.

    Args:
        model: any `nn.Module`; its calls on sharded tensors must have handlers.
        mesh: the mesh, from `pydist.init`.
        batch_norm: the ranks over which batch norm forms its statistics in training: "global" (all;
            as one device with the global batch), "group" (the sample group) or "rank". Running
            statistics are the mean over the ranks in each case.
        group_weight: the weight of a sample group's loss: "samples" (its number of samples in dim 0
            of the model's first sharded, 5-D or other tensor argument; an extent of 1 counts only
            if all have it), or "equal" (all groups the same, as under DDP).
        sharded_weights: whether ranks along the channel axis store slices of the weights of wide
            layers, with gradients and optimizer state, instead of whole weights. A sharded weight
            shows its global shape, and `state_dict()` is that of the whole network, but collective;
            see `pydist.slices`.
        gradients: how the ranks average gradients: "dense", "fp16", "bf16", "torus",
            "hierarchical", "powersgd", "dgc", or settings such as
            `pydist.gradients.PowerSGD(rank=4)`. Compressed forms compress what is sent between
            sample groups only. Gradients that `torch.autograd.grad` returns, those with a graph,
            and those of parameters that belong to no model or are frozen at first are dense.

    Returns:
        The same object.

    Raises:
        UsageError: an argument is none of these, the model or a part of it is already parallelized,
            ranks have different models or (as threads) the same object, or can't send a parameter
            or buffer to each other.
        NotSupported: a part of the model is compiled, or reduces gradients itself; or weights are
            sharded, and the form of gradients keeps state.
    """
    _check(model, mesh, batch_norm, group_weight)
    form = settings_of(gradients)
    check_groups(form, mesh.data_size)
    if form.keeps and sharded_weights:
        raise NotSupported(
            f'gradients="{form.name}" with sharded_weights: its state would be that of slices; '
            'possible are "dense", "fp16", "bf16", "torus" and "hierarchical"'
        )
    given = {
        "batch_norm": batch_norm,
        "group_weight": group_weight,
        "sharded_weights": str(sharded_weights),
        "gradients": str(form),
    }
    entry = EntryHook(mesh, batch_norm, group_weight)
    if model.__dict__.setdefault(_ENTRY, entry) is not entry:  # one step, for all threads
        raise UsageError(
            f"another rank, a thread of this process, parallelizes this {type(model).__name__}; "
            "each rank needs a model of its own: make it in the function that the ranks run"
        )
    try:
        require_same(mesh.world, {**given, **facts_of(model, devices=not mesh.world.mixes)})
    except BaseException:
        del model.__dict__[_ENTRY]
        raise
    for path, module in model.named_modules():
        module.__dict__[MODULE_PATH] = path or type(model).__name__
    entry.adopt(model, sharded_weights=sharded_weights, gradients=form)
    model.register_forward_pre_hook(entry, with_kwargs=True)
    if mesh.data_size > 1:
        # First, so that other hooks get its result; also called when the forward pass raises.
        model.register_forward_hook(entry.batches.leave, prepend=True, always_call=True)
        agree_on_closures_of(model, mesh)
        parametrizations = {
            id(part)
            for module in model.modules()
            if isinstance(module, ParametrizationList)
            for part in module.modules()  # called when a parameter is read, without a batch
        }
        for layer in model.modules():
            if layer is not model and id(layer) not in parametrizations:
                layer.register_forward_pre_hook(entry.enter_part, with_kwargs=True)
                layer.register_forward_hook(entry.batches.leave, prepend=True, always_call=True)
    spans_ranks = mesh.size > 1 and batch_norm != "rank"
    BatchLayers(entry.of_batch, batch_norm=spans_ranks).adopt(model)
    model.__dict__["no_sync"] = entry.no_sync
    model.__dict__["__prepare_scriptable__"] = entry.refuse_script
    return model


def _check(model: nn.Module, mesh: Mesh, batch_norm: str, group_weight: str) -> None:
    """Checks the arguments of `parallelize`, before ranks compare anything."""
    if not isinstance(model, nn.Module) or not isinstance(mesh, Mesh):
        raise UsageError(
            f"parallelize({type(model).__name__}, {type(mesh).__name__}); possible are a "
            "torch.nn.Module and a mesh, from pydist.init()"
        )
    if batch_norm not in STATISTICS:
        raise UsageError(f"batch_norm={batch_norm!r}; possible are {', '.join(STATISTICS)}")
    if group_weight not in GROUP_WEIGHTS:
        raise UsageError(f"group_weight={group_weight!r}; possible are {', '.join(GROUP_WEIGHTS)}")
    for path, module in model.named_modules():
        if MODULE_PATH in module.__dict__:
            part = f"its part {path!r}" if path else f"this {type(model).__name__}"
            raise UsageError(f"{part} is parallelized already; parallelize the whole, once")
    refuse_kinds(model)
    if mesh.size > 1:
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if (why := obstacle(tensor)) is not None:
                raise UsageError(f"{name!r} of this {type(model).__name__} {why}")


def dims_of_network(model: nn.Module) -> int:
    """Returns the number of spatial dims of a network, the most of its convolutions; 3 without."""
    found = {len(m.kernel_size) for m in model.modules() if isinstance(m, _ConvNd)}
    return max(found, default=3)


def entry_hook_of(model: nn.Module) -> EntryHook:
    """Returns the entry hook that `parallelize` has added to a model.

    Raises:
        UsageError: the model is not parallelized.
    """
    entry = model.__dict__.get(_ENTRY)
    if not isinstance(entry, EntryHook):
        raise UsageError(
            f"this {type(model).__name__} is not parallelized: call pydist.parallelize first"
        )
    return entry


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
        if trains:
            self._begin_pass()
        if any(isinstance(each, ShardedTensor) for each in given):
            consistency_of(self.mesh).called(module, self.mesh, trains)
        sizes, forward = self.batches.enter(module, given), self.mesh.session.forwards
        self._sizes = sizes = sizes or self._sizes_of_one_group(batch_of(given))
        if trains and self.continues is None:
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

    def reduce(self) -> None:
        """Reduces the gradients accumulated under `no_sync` now. Collective."""
        if self.mesh.session.accumulates is self:
            self.mesh.session.accumulates = None
        if self.mesh.size > 1:
            self.reducer.reduce()

    def of_batch(self, x: Tensor) -> ShardedTensor:
        """Wraps a plain tensor of the running batch as a sharded one that is not cut."""
        whole = distribute_tensor(x, self.mesh, {})
        running = self._sizes if self.mesh.data_size == 1 else self.batches.running
        entered: ShardedTensor = self._enter(whole, running)
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


def refuse_kinds(model: nn.Module) -> None:
    """Refuses a model whose parts have a type or state that prevents splitting them.

    Raises:
        NotSupported: a part is compiled, or reduces gradients itself.
    """
    for path, module in model.named_modules():
        if (why := _obstacle_of_kind(module)) is not None:
            what = f"the part {path!r} of the model" if path else "the model"
            raise NotSupported(f"{what} {why}")


def _obstacle_of_kind(module: nn.Module) -> str | None:
    """Returns why the type or state of a part of a model prevents splitting it, or `None`."""
    compiler = sys.modules.get("torch._dynamo")  # nothing is compiled before its import, a slow one
    # Another thread may be importing it.
    compiled = getattr(compiler, "OptimizedModule", None)
    wrapped = compiled is not None and isinstance(module, compiled)
    if wrapped or module._compiled_call_impl is not None:
        return "is compiled: the compiler can't trace exchanges between ranks; leave it as it is"
    if isinstance(module, torch.jit.ScriptModule):
        return "is a torch.jit script, whose calls can't be split; give the module it was made from"
    if isinstance(module, nn.parallel.DistributedDataParallel):
        return "is in DistributedDataParallel, which reduces gradients too; give its .module"
    return None


def _state(module: nn.Module) -> Iterator[Tensor]:
    """Yields parameters and buffers; shared ones once."""
    yield from module.parameters()
    yield from module.buffers()


def obstacle(tensor: Tensor) -> str | None:
    """Returns why ranks can't send a parameter or buffer to each other, or `None`."""
    if is_lazy(tensor):
        return "has no shape yet: call the network once on a plain tensor before it is parallelized"
    if tensor.is_meta:
        return "has no values (device meta): give it some on rank 0, and memory on all ranks"
    if is_sharded_weight(tensor):
        return "is a sharded weight of another model: parallelize a model without its slices"
    if tensor.layout != torch.strided:
        return f"has the layout {tensor.layout}; dense is possible"
    return None


def broadcast_state(module: nn.Module, world: Transport) -> None:
    """Broadcasts a module's parameters and buffers from rank 0. Collective."""
    with torch.no_grad():
        for tensor in _state(module):
            sent = tensor.detach().contiguous()
            world.broadcast(sent)
            if sent.data_ptr() != tensor.data_ptr():
                tensor.copy_(sent)
