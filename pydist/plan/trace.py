"""Traces a network's calls on shapes alone: what each computes, sends, and keeps for backward.

The network runs once on torch's meta device, where nothing is computed and no memory is used.
torch's own autograd tells which tensors its backward keeps; where pydist keeps fewer, by fused
calls and its own poolings, the trace follows pydist.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from pydist.arguments import mapped
from pydist.errors import NotSupported, PydistError, UsageError, out_of_memory
from pydist.ops.windows import Window, as_tuple, symmetric
from pydist.tensor.wrapper import tensors_of

SAMPLES = 2
"""Samples of a trace; of one alone batch norm after the last pool has no statistics."""

_T: Any = torch
_CONV = {F.conv1d: 1, F.conv2d: 2, F.conv3d: 3}
_TRANSPOSED = {F.conv_transpose1d: 1, F.conv_transpose2d: 2, F.conv_transpose3d: 3}
_AVERAGE = {F.avg_pool1d: 1, F.avg_pool2d: 2, F.avg_pool3d: 3}
_MAXIMUM: dict[Any, int] = {
    each: dims
    for dims in (1, 2, 3)
    for each in (getattr(F, f"max_pool{dims}d"), getattr(torch, f"max_pool{dims}d"))
}
_NORMS = {F.batch_norm, F.instance_norm, F.group_norm, F.layer_norm, F.rms_norm}
_RELUS = {F.relu, F.leaky_relu, F.relu_, F.leaky_relu_, _T.relu_, _T.Tensor.relu_}
_EXPONENTIALS = frozenset(
    "softmax log_softmax cross_entropy sigmoid logsigmoid tanh exp log gelu silu elu selu mish "
    "softplus binary_cross_entropy binary_cross_entropy_with_logits".split()
)
"""Names of calls that compute an exponential or logarithm of each element."""
_INDEXING = {_T.Tensor.__getitem__, _T.Tensor.__setitem__, _T.tensor_split, _T.Tensor.tensor_split}
"""Calls that read indices, which are constants."""
_PRELUS = {F.prelu, torch.prelu}
_OPTIONS: Mapping[str, Sequence[tuple[str, Any]]] = {
    "conv": (
        ("input", None), ("weight", None), ("bias", None), ("stride", 1), ("padding", 0),
        ("dilation", 1), ("groups", 1),
    ),
    "transposed": (
        ("input", None), ("weight", None), ("bias", None), ("stride", 1), ("padding", 0),
        ("output_padding", 0), ("groups", 1), ("dilation", 1),
    ),
    "average": (("input", None), ("kernel_size", None), ("stride", None), ("padding", 0)),
    "maximum": (
        ("input", None), ("kernel_size", None), ("stride", None), ("padding", 0), ("dilation", 1),
    ),
}  # fmt: skip
"""Arguments of calls with a window, in torch's order, with their defaults."""


@dataclass(frozen=True)
class TracedTensor:
    """Tensor that a traced pass reads or makes.

    Attributes:
        shape: of all samples.
        nbytes: of its elements.
        memory: number of the memory that it shares with other tensors of the pass.
        gradient: number of the gradient that backward computes for it; `None` if there is none.
            Views and fused calls hand over the same gradient.
    """

    shape: tuple[int, ...]
    nbytes: int
    memory: int
    gradient: int | None


@dataclass
class TracedCall:
    """Call of torch that a traced pass makes.

    Attributes:
        module: path of the module that makes it.
        name: of torch's function.
        kind: "conv", "transposed", "average", "maximum", "norm", "product", "view", or "other".
        inputs: numbers of the tensors that it reads, without parameters.
        outputs: numbers of the tensors that it makes.
        saved: memories that its backward needs.
        flops: of its forward pass, of all samples.
        backward: backward's flops relative to `flops`.
        has_wgrad: whether backward computes the gradient of `weight`.
        parameters: numbers of the trained parameters that it reads, and no call before it.
        held: bytes of the frozen parameters and the buffers that it reads, and no call before it;
            the first call has those that none reads.
        weight: shape of its largest parameter, of a convolution of its kernel; () without one.
        window: of a convolution or pool.
        groups: of a convolution's channels.
        passes: bytes that it reads and writes, forward and backward, relative to those of its
            largest tensor.
        has_exponentials: whether it computes one of each element of its largest tensor.
    """

    module: str
    name: str
    kind: str
    inputs: list[int]
    outputs: list[int]
    saved: list[int] = field(default_factory=list)
    flops: float = 0.0
    backward: float = 0.0
    has_wgrad: bool = False
    parameters: list[int] = field(default_factory=list)
    held: int = 0
    weight: tuple[int, ...] = ()
    window: Window | None = None
    groups: int = 1
    passes: float = 0.0
    has_exponentials: bool = False


@dataclass
class Trace:
    """Trace that describes a network's forward pass on shapes.

    Attributes:
        tensors: of the pass, in the order of their creation; the first is the input.
        memories: bytes of each memory, and the number of a tensor with its extents.
        calls: in order.
        parameters: bytes of each parameter that is trained, in the order of the model.
        dtype: of the input.
    """

    tensors: list[TracedTensor]
    memories: list[tuple[int, int]]
    calls: list[TracedCall]
    parameters: list[int]
    dtype: torch.dtype

    @property
    def dims(self) -> int:
        """Number of spatial dims that samples have."""
        return len(self.tensors[0].shape) - 2


def trace_network(
    model: nn.Module,
    sample: Sequence[int],
    criterion: Callable[[Any], Tensor] | None = None,
    dtype: torch.dtype | None = None,
) -> Trace:
    """Traces the training step of a network, without computing it.

    Args:
        model: the plain network; unchanged.
        sample: shape of a sample, channels first.
        criterion: computes the loss from the output on the meta device; by default the mean.
        dtype: of the input; by default that of the network's first real parameter, or float32.

    Raises:
        NotSupported: the network reads values, as in `if x.max() > 0`, which shapes do not tell; it
            can't be copied; or its forward fails on shapes, or on a batch of `SAMPLES`.
        UsageError: a parameter has no shape yet, or the network computes nothing from its input.
    """
    kind = type(model).__name__
    state = (*model.named_parameters(), *model.named_buffers())
    if lazy := next((name for name, each in state if is_lazy(each)), None):
        raise UsageError(
            f"{lazy!r} of this {kind} has no shape yet (a lazy module): call the network once, on a"
            " plain tensor, where it is made"
        )
    if dtype is None:
        real = (p.dtype for p in model.parameters() if p.is_floating_point())
        dtype = next(real, torch.float32)
    try:
        with torch.device("meta"):
            network = copy.deepcopy(model).to("meta").train()
    except Exception as error:
        _refuse(error, f"{kind} can't be copied, so there is no plan")
    x = torch.empty(SAMPLES, *sample, dtype=dtype, device="meta")
    recorder = _Recorder(network)
    recorder.enter(x)
    counter = FlopCounterMode(display=False)
    try:
        with (
            torch.enable_grad(), torch.device("meta"), counter,
            saved_tensors_hooks(recorder.save, lambda kept: kept),
        ):  # fmt: skip
            recorder.count = counter.get_total_flops
            with recorder:
                out = network(x)
                if criterion is not None:
                    criterion(out)
    except Exception as error:
        place = recorder.failed or "its forward"
        # The latter from `numpy`.
        if isinstance(error, RuntimeError | TypeError) and "meta" in str(error).lower():
            reason = f"reads values of tensors in {place}, so shapes do not tell what it computes"
        else:
            reason = f"fails in {place} on shapes of {SAMPLES} samples: {type(error).__name__}"
        _refuse(error, f"{kind} {reason}")
    trace = recorder.trace()
    if not trace.calls:
        raise UsageError(f"{kind} computes nothing from its input: there is no step to plan")
    return trace


def _refuse(error: Exception, reason: str) -> NoReturn:
    """Raises that a network has no plan for a reason, unless the error tells more."""
    if isinstance(error, PydistError) or out_of_memory(error):
        raise error
    raise NotSupported(f"{reason}: {error}") from error


class _Recorder(TorchFunctionMode):
    """Records the outermost calls of torch."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.count: Callable[[], int] = int
        # Of parameters and what is made of them alone, as by a spectral norm: the parameters.
        self._parameters = {id(p): {id(p)} for p in model.parameters()}
        trained = [p for p in model.parameters() if p.requires_grad]
        self._trained = [p.nbytes for p in trained]
        self._unread = {id(p): number for number, p in enumerate(trained)}
        state = (*model.parameters(), *model.buffers())
        self._held = {id(x): x.nbytes for x in state if id(x) not in self._unread}
        self._path: list[str] = []
        self.failed = ""  # path of the innermost module from which an exception comes
        for path, module in model.named_modules():
            module.register_forward_pre_hook(lambda *_, path=path: self._path.append(path))
            module.register_forward_hook(self._leave, always_call=True)
        self._weights = {p.untyped_storage()._cdata for p in model.parameters()}
        self._weights |= {b.untyped_storage()._cdata for b in model.buffers()}
        self._alive: list[Tensor] = []  # so that no other tensor has their ids
        self._numbers: dict[int, int] = {}
        self._memory_of: dict[int, int] = {}
        self._tensors: list[TracedTensor] = []
        self._memories: list[tuple[int, int]] = []
        self._calls: list[TracedCall] = []
        self._saved: list[Tensor] = []
        self._maker: dict[int, TracedCall] = {}  # by memory: the last call that wrote it

    @property
    def module(self) -> str:
        """Path of the innermost module that is being called."""
        return self._path[-1] if self._path else ""

    def _leave(self, module: nn.Module, args: Any, result: object) -> None:
        path = self._path.pop()
        # The innermost module that an exception leaves; an outer one may catch it.
        self.failed = (self.failed or path) if sys.exc_info()[0] else ""

    def enter(self, x: Tensor) -> None:
        """Adds the input."""
        self._number(x, None)
        self._dtype = x.dtype

    def save(self, x: Tensor) -> Tensor:
        """Is told a tensor that backward needs."""
        if x.untyped_storage()._cdata not in self._weights:
            self._saved.append(x)
        return x

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        before = self.count()
        self._saved = []
        operands = tensors_of((args, given))
        if func not in _INDEXING and any(x.is_meta for x in operands):
            args, given = mapped(_on_meta, (args, given))
            operands = tensors_of((args, given))
        inputs = [x for x in operands if id(x) in self._numbers]
        versions = [x._version for x in operands]
        result = func(*args, **given)
        changed = [x for x, old in zip(operands, versions, strict=True) if x._version != old]
        results = [x for x in tensors_of(result) or changed if x.is_meta]  # no result: x[0] = y
        if results and inputs:
            self._add(func, args, given, inputs, results, self.count() - before, bool(changed))
        elif of := set[int]().union(*(self._parameters.get(id(x), ()) for x in operands)):
            self._parameters.update({id(x): of for x in results})
            self._weights.update(x.untyped_storage()._cdata for x in results)
            self._alive += results
        return result

    def _add(
        self, func: Any, args: Any, kwargs: Any, inputs: list[Tensor], results: list[Tensor],
        flops: int, changes: bool,
    ) -> None:  # fmt: skip
        weights = [p for p in tensors_of((args, kwargs)) if id(p) in self._parameters]
        read = [self._numbers[id(x)] for x in inputs]
        known = {self._tensors[n].memory for n in read}
        memories = [self._memory_of.get(x.untyped_storage()._cdata) for x in results]
        kind, window, given = _kind_of(func, args, kwargs)
        largest = given.get("weight", max(weights, key=Tensor.numel, default=None))
        name = getattr(func, "__name__", str(func))
        call = TracedCall(self.module, name, kind, read, [])
        call.window, call.groups = window, given.get("groups", 1)
        call.weight = () if largest is None else tuple(largest.shape)
        of = {key for p in weights for key in self._parameters[id(p)]}
        call.parameters = sorted(self._unread.pop(key) for key in of & self._unread.keys())
        of |= {id(x) for x in tensors_of((args, kwargs))}
        call.held = sum(self._held.pop(key) for key in of & self._held.keys())
        call.flops = float(flops)
        if kind == "other" and flops:
            call.kind = "product"
        elif kind == "other" and not changes and known.issuperset(memories):
            call.kind = "view"
        if call.kind in ("conv", "transposed", "product"):
            is_input = any(x is largest for x in inputs)
            call.has_wgrad = largest is not None and largest.requires_grad
            call.backward = float(sum(x.requires_grad for x in inputs))
            call.backward += call.has_wgrad and not is_input
        call.has_exponentials = name.rstrip("_") in _EXPONENTIALS
        self._finish(call, func, inputs, results)
        self._calls.append(call)

    def _finish(
        self, call: TracedCall, func: Any, inputs: list[Tensor], results: list[Tensor]
    ) -> None:
        """Fills in what a call costs and keeps, as pydist runs it."""
        call.passes, hands_over = self._passes(call, func, results[0] is inputs[0])
        released = call.kind in ("average", "maximum") or (hands_over and func in _PRELUS)
        saved = [] if released else self._saved
        gradient = self._tensors[call.inputs[0]].gradient
        for x in results:
            number = self._number(x, gradient if hands_over else None, x.requires_grad)
            call.outputs.append(number)
            if call.kind != "view":
                self._maker[self._tensors[number].memory] = call
        if call.kind == "maximum" and results[0].requires_grad:
            # A byte for each output says which input was the largest.
            shape = self._tensors[call.outputs[0]].shape
            call.saved.append(self._memory(math.prod(shape), call.outputs[0]))
        for x in saved:
            found = self._memory_of.get(x.untyped_storage()._cdata)
            if found is None:
                self._alive.append(x)
                found = self._memory(x.nbytes, self._like(x, call))
                self._memory_of[x.untyped_storage()._cdata] = found
            call.saved.append(found)

    def _passes(self, call: TracedCall, func: Any, in_place: bool) -> tuple[float, bool]:
        """Returns a call's passes over memory, and whether it hands over the gradient it gets."""
        memory = self._tensors[call.inputs[0]].memory
        maker = self._maker.get(memory)
        if call.kind == "view":
            return 0.0, True
        if call.kind == "norm":
            return 8.0, False  # see pydist.ops.norm.norm
        if maker is not None and maker.kind == "norm":
            if func in _PRELUS:  # the norm's result is not written
                self._memories[memory] = (0, self._memories[memory][1])
                return 0.0, True
            if func in _RELUS and in_place:
                return 0.0, True
        if call.kind == "average":
            # It reads a convolution's outputs and applies a ReLU in place itself.
            if (
                maker is not None
                and maker.name in ("leaky_relu", "relu")
                and (self._tensors[maker.inputs[0]].memory == memory)
            ):
                maker.passes = 0.0
            return 3.25, False
        return 3.0, False  # read, write; backward reads dL/dy and a tensor, and writes dL/dx

    def _like(self, x: Tensor, call: TracedCall) -> int:
        """Returns the tensor of a call that is cut like a tensor saved by it alone."""
        numbers = (*call.outputs, *call.inputs)
        shape = tuple(x.shape)
        return next((n for n in numbers if self._tensors[n].shape == shape), call.outputs[0])

    def _number(self, x: Tensor, gradient: int | None, needs_grad: bool = False) -> int:
        number = len(self._tensors)
        memory = self._memory_of.get(x.untyped_storage()._cdata)
        if memory is None:
            memory = self._memory(x.untyped_storage().nbytes(), number)
            self._memory_of[x.untyped_storage()._cdata] = memory
        if needs_grad and gradient is None:
            gradient = number
        self._tensors.append(
            TracedTensor(tuple(x.shape), x.nbytes, memory, gradient if needs_grad else None)
        )
        self._numbers[id(x)] = number
        self._alive.append(x)
        return number

    def _memory(self, nbytes: int, like: int) -> int:
        self._memories.append((nbytes, like))
        return len(self._memories) - 1

    def trace(self) -> Trace:
        """Returns the trace."""
        if self._calls:
            self._calls[0].held += sum(self._held.values())
        return Trace(self._tensors, self._memories, self._calls, self._trained, self._dtype)


def _on_meta(value: Any) -> Any:
    """Returns the shape of a constant that is neither a parameter nor a buffer."""
    if not isinstance(value, Tensor) or value.is_meta or not value.dim():
        return value
    return torch.empty_like(value, device="meta")


def _kind_of(func: Any, args: Any, kwargs: Any) -> tuple[str, Window | None, Mapping[str, Any]]:
    """Returns the kind of a call; with a window, that and the call's arguments by name."""
    tables = (("conv", _CONV), ("transposed", _TRANSPOSED), ("average", _AVERAGE))
    for kind, table in (*tables, ("maximum", _MAXIMUM)):
        if func in table:
            names = _OPTIONS[kind]
            given = dict(names) | dict(zip((n for n, _ in names), args, strict=False)) | kwargs
            return kind, _window_of(table[func], given), given
    return "norm" if func in _NORMS else "other", None, {}


def _window_of(dims: int, given: Mapping[str, Any]) -> Window:
    weight = given.get("weight")
    size = given.get("kernel_size") if weight is None else tuple(weight.shape[2:])
    kernel = as_tuple(size, dims)  # type: ignore[arg-type]
    stride = given["stride"]
    strides = kernel if stride in (None, (), []) else as_tuple(stride, dims)
    dilation = as_tuple(given.get("dilation", 1), dims)
    padding = given["padding"]
    if isinstance(padding, str):
        totals = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
        padding = 0 if padding == "valid" else [t // 2 for t in totals]
    return Window(kernel, strides, dilation, symmetric(as_tuple(padding, dims)))
