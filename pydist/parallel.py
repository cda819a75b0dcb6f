"""parallelize: an unmodified network on a mesh."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from types import FrameType
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList

from pydist.arguments import is_container, leaves, mapped
from pydist.batch_layers import BatchLayers
from pydist.batches import Batches, batch_of, refuse_pickling
from pydist.comm.consensus import require_same
from pydist.errors import NotSupported, UsageError
from pydist.exchange.consistency import consistency_of
from pydist.exchange.history import entered
from pydist.global_loss import agree_on_closures_of
from pydist.gradients.lane import Lane
from pydist.gradients.members import reducer_of
from pydist.gradients.reducer import Reducer
from pydist.group_sizes import GroupSizes
from pydist.interop import as_tensor, is_array
from pydist.mesh import Mesh
from pydist.ops.normalization.batch_norm import STATISTICS
from pydist.structure import facts_of
from pydist.tensor import Origin, ShardedTensor, local_of
from pydist.tensor.aliasing import view_at
from pydist.tensor.distribute import distribute_tensor

# Not all frames of that file: torch.utils.checkpoint has one that switches the compiler off.
_COMPILER = ("torch/_dynamo/eval_frame.py", "compile_wrapper")

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
    model: _M, mesh: Mesh, batch_norm: str = "global", group_weight: str = "samples"
) -> _M:
    """Trains `model` on a mesh: on split samples, over several groups, or both.

    The model keeps its class, its hooks and its `state_dict` keys; only hooks are added. All ranks
    start from the parameters and buffers of rank 0. Inputs may be sharded (as a `Loader` gives
    them) or plain 5-D tensors or arrays, equal on all ranks of a sample group, which are cut on
    entry; where no argument is one, those in lists, tuples, dicts and dataclasses are. With several
    groups parts of the model that are called by themselves take them too. After
    `backward()` every gradient is the mean over the sample groups, each weighted by its number of
    samples: where the loss is a mean over samples, that of the whole batch. For losses that are
    other means see `pydist.sum_over_groups`. This holds for these parameters and for any other
    `nn.Parameter` that feeds or follows a sharded call, or is trained on the outputs of a frozen
    model; not for one that follows `detach()` or `no_grad()` only. It holds as well for plain
    tensors in the place of parameters, as `torch.func.functional_call` puts them there; any other
    plain tensor is data of its group, with the gradient of the group's own loss. Hooks on
    parameters see that mean. The optimizer may be made before or after; `pydist.optim.sharded` lets
    the ranks share its step. `model.no_sync()` postpones the reduction, and hooks, to accumulate
    gradients.

    Args:
        model: any `nn.Module`; its calls on sharded tensors must have handlers.
        mesh: the mesh, from `pydist.init`.
        batch_norm: over which ranks batch norm forms its statistics in training: "global" (all;
            what one device with the whole batch computes), "group" (the sample group) or "rank".
            Running statistics are the mean over the ranks in each case.
        group_weight: what the loss of a sample group weighs: "samples" (its number of samples in
            dim 0 of the first sharded, 5-D or other tensor that the model is called with; an
            extent of 1 counts only where all have it), or "equal" (all groups the same, as under
            DDP).

    Returns:
        The same object.

    Raises:
        UsageError: an argument is none of these, the model or a part of it is parallelized already,
            ranks have different models, or can't send a parameter or buffer to each other.
        NotSupported: a part of the model is compiled, or reduces gradients itself.
    """
    _check(model, mesh, batch_norm, group_weight)
    given = {"batch_norm": batch_norm, "group_weight": group_weight}
    require_same(mesh.world, {**given, **facts_of(model)})
    for path, module in model.named_modules():
        module.__dict__["_pydist_path"] = path or type(model).__name__
    entry = Entry(mesh, batch_norm, group_weight)
    entry.adopt(model)
    model.register_forward_pre_hook(entry, with_kwargs=True)
    if mesh.data_size > 1:
        # First, so that other hooks are given what it returns, and when the forward pass raises.
        model.register_forward_hook(entry.batches.leave, prepend=True, always_call=True)
        agree_on_closures_of(model, mesh)
        parametrizations = {
            id(part)
            for module in model.modules()
            if isinstance(module, ParametrizationList)
            for part in module.modules()  # they run where a parameter is read, on no batch
        }
        for layer in model.modules():
            if layer is not model and id(layer) not in parametrizations:
                layer.register_forward_pre_hook(entry.enter_part, with_kwargs=True)
                layer.register_forward_hook(entry.batches.leave, prepend=True, always_call=True)
    spans_ranks = mesh.size > 1 and batch_norm != "rank"
    BatchLayers(entry.of_batch, batch_norm=spans_ranks).adopt(model)
    model.__dict__["no_sync"] = entry.no_sync
    model.__dict__["__prepare_scriptable__"] = entry.refuse_script
    model.__dict__[_ENTRY] = entry
    return model


def _check(model: nn.Module, mesh: Mesh, batch_norm: str, group_weight: str) -> None:
    """What `parallelize` raises before ranks compare anything."""
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
        if "_pydist_path" in module.__dict__:
            part = f"its part {path!r}" if path else f"this {type(model).__name__}"
            raise UsageError(f"{part} is parallelized already; parallelize the whole, once")
        if (why := _obstacle_of_kind(module)) is not None:
            what = f"the part {path!r} of the model" if path else "the model"
            raise NotSupported(f"{what} {why}")
    if mesh.size > 1:
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if (why := obstacle(tensor)) is not None:
                raise UsageError(f"{name!r} of this {type(model).__name__} {why}")


def entry_of(model: nn.Module) -> Entry:
    """What `parallelize` has added to a model.

    Raises:
        UsageError: nothing.
    """
    entry = model.__dict__.get(_ENTRY)
    if not isinstance(entry, Entry):
        raise UsageError(
            f"this {type(model).__name__} is not parallelized: call pydist.parallelize first"
        )
    return entry


class Entry:
    """The hook at the model's entry: counts the forward passes, and wraps the inputs."""

    def __init__(self, mesh: Mesh, statistics: str, group_weight: str) -> None:
        self.mesh, self.statistics = mesh, statistics
        self.batches = Batches(mesh, group_weight == "samples")
        self._lane: Lane | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Entry:
        # A copy of the model (an average of its weights, say) runs on the same mesh; its
        # parameters become the reducer's if they are ever trained.
        copy = memo[id(self)] = Entry(self.mesh, self.statistics, "samples")
        copy.batches = deepcopy(self.batches, memo)
        return copy

    __reduce_ex__ = refuse_pickling

    def refuse_script(self) -> NoReturn:
        """Stops torch.jit.script, which calls this instead of the model."""
        raise NotSupported(_NO_SCRIPT.format("jit.script"))

    @property
    def reducer(self) -> Reducer:
        """What reduces the gradients: one for all models on the mesh."""
        return reducer_of(self.mesh)

    def adopt(self, module: nn.Module) -> None:
        """Makes the module's parameters and buffers those of rank 0, and reduces gradients."""
        if self.mesh.size > 1:
            _broadcast(_state(module), self.mesh)
            self._lane = self.reducer.add_lane(module.named_parameters())
            consistency_of(self.mesh).parameters.hold(module, self.mesh.session.forwards)

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A forward pre-hook: arguments as the model takes them."""
        _refuse_transforms()
        args = tuple(self._cut(a) for a in args)
        kwargs = {name: self._cut(a) for name, a in kwargs.items()}
        if not any(isinstance(each, ShardedTensor) for each in (*args, *kwargs.values())):
            args = tuple(mapped(self._cut_nested, a) for a in args)
            kwargs = {name: mapped(self._cut_nested, a) for name, a in kwargs.items()}
        given = list(leaves((*args, *kwargs.values())))
        trains = module.training and torch.is_grad_enabled()
        if trains:
            self.mesh.session.forwards += 1
        if any(isinstance(each, ShardedTensor) for each in given):
            consistency_of(self.mesh).called(module, self.mesh, trains)
        sizes, forward = self.batches.enter(module, given), self.mesh.session.forwards
        return (
            tuple(self._enter(a, sizes, forward) for a in args),
            {name: self._enter(a, sizes, forward) for name, a in kwargs.items()},
        )

    def enter_part(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """A forward pre-hook of the parts: arguments as a part called by itself takes them."""
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
        """Gradients accumulate on each rank; the next backward outside reduces their sum."""
        with nullcontext() if self.mesh.size == 1 else self.reducer.paused(self._lane):
            yield

    def of_batch(self, x: Tensor) -> ShardedTensor:
        """A plain tensor of the running batch as a sharded one that is not cut."""
        entered: ShardedTensor = self._enter(
            distribute_tensor(x, self.mesh, {}), self.batches.running
        )
        return entered

    def _cut(self, x: Any) -> Any:
        if not isinstance(x, ShardedTensor) and is_array(x) and (whole := as_tensor(x)).dim() == 5:
            return distribute_tensor(whole, self.mesh)
        return x

    def _cut_nested(self, x: Any) -> Any:
        # Kernels are 5-D too, and come in lists: what learns is left as it is, and so is all beside
        # a volume that is an argument by itself.
        return self._cut(x) if isinstance(x, Tensor) and not x.requires_grad else x

    def _enter(self, x: Any, sizes: GroupSizes | None, forward: int | None = None) -> Any:
        if is_container(x):
            # In place: a model may write into a dict that it is given, for its caller to read.
            for each in leaves((x,)):
                if isinstance(each, ShardedTensor):
                    origin = self._origin_of(each, sizes, forward)
                    each._history = entered(each._history, each._origin.forward, origin.forward)
                    each._origin = origin
            return x
        if not isinstance(x, ShardedTensor):
            return x
        origin = self._origin_of(x, sizes, forward)
        if origin == x._origin:
            return x
        shown = ShardedTensor(local_of(x), x.layout, origin)
        shown._history = entered(x._history, x._origin.forward, origin.forward)
        shown._view = view_at(x)
        return shown

    def _origin_of(self, x: ShardedTensor, sizes: GroupSizes | None, forward: int | None) -> Origin:
        known = x._origin
        if sizes is None or x.shape[:1] != (sizes.own,):
            sizes = known.sizes
        return Origin(known.forward if forward is None else forward, sizes, self.statistics)


def _refuse_transforms() -> None:
    """Stops a call through torch.func, torch.compile, torch.jit.trace or torch.export.

    While the compiler traces, an error raised here only makes it fall back to running this call
    as it is, still inside of it: so its frames are looked for.
    """
    if torch._C._are_functorch_transforms_active():
        raise NotSupported(_NO_FUNC)
    if torch._C._get_tracing_state() is not None:
        raise NotSupported(_NO_SCRIPT.format("jit.trace"))
    if torch.compiler.is_exporting():
        raise NotSupported(_NO_SCRIPT.format("export"))
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file, function = frame.f_code.co_filename, frame.f_code.co_name
        if file.endswith(_COMPILER[0]) and function == _COMPILER[1]:
            raise NotSupported(
                "torch.compile of a parallelized model: the compiler can't trace exchanges "
                "between ranks; call the model without it"
            )
        frame = frame.f_back


def _obstacle_of_kind(module: nn.Module) -> str | None:
    """Why a part of a model can't be split because of what was made of it, if it can't."""
    compiler = sys.modules.get("torch._dynamo")  # nothing is compiled before its import, a slow one
    wrapped = compiler is not None and isinstance(module, compiler.OptimizedModule)
    if wrapped or module._compiled_call_impl is not None:
        return "is compiled: the compiler can't trace exchanges between ranks; leave it as it is"
    if isinstance(module, torch.jit.ScriptModule):
        return "is a torch.jit script, whose calls can't be split; give the module it was made from"
    if isinstance(module, nn.parallel.DistributedDataParallel):
        return "is in DistributedDataParallel, which reduces gradients too; give its .module"
    return None


def _state(module: nn.Module) -> Iterator[Tensor]:
    """Parameters and buffers; one that several modules share comes once."""
    yield from module.parameters()
    yield from module.buffers()


def obstacle(tensor: Tensor) -> str | None:
    """Why ranks can't send a parameter or buffer to each other, if they can't."""
    if is_lazy(tensor):
        return "has no shape yet: call the network once on a plain tensor before it is parallelized"
    if tensor.is_meta:
        return "has no values (device meta): give it some on rank 0, and memory on all ranks"
    if tensor.layout != torch.strided:
        return f"has the layout {tensor.layout}; dense is possible"
    if tensor.is_complex():
        return f"holds {tensor.dtype}; keep the parts of complex numbers apart (torch.view_as_real)"
    return None


def _broadcast(tensors: Iterable[Tensor], mesh: Mesh) -> None:
    """Overwrites tensors with those of rank 0."""
    if mesh.size == 1:
        return
    with torch.no_grad():
        for tensor in tensors:
            sent = tensor.detach().contiguous()
            mesh.world.broadcast(sent)
            if sent.data_ptr() != tensor.data_ptr():
                tensor.copy_(sent)
