"""Handles the calls of a forward pass on stage tensors, for recorders and pipelines."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pydist.arguments import leaves
from pydist.comm.interface.ledger import calling_module
from pydist.errors import NotSupported
from pydist.stages.shapes import Shapes
from pydist.tensor import ShardedTensor
from pydist.tensor.refusals import name_of
from pydist.tensor.stage import StageTensor
from pydist.tensor.wrapper import replaced, tensors_of


class Key(NamedTuple):
    """Identifies a call in a forward pass, also if other calls come or go elsewhere."""

    module: str
    """Path of the module that makes the call; "" outside of the network."""
    number: int
    """Number of earlier calls that the module has made in this pass."""

    def __str__(self) -> str:
        return f"call {self.number} in {self.module or 'no module'}"


class Call(NamedTuple):
    """Torch call that a forward pass makes.

    Attributes:
        func: the function.
        args: its arguments.
        kwargs: its keyword arguments.
        key: the call.
        inputs: the stage tensors among the arguments.
        changed: the inputs that the call changes in place.
        meta: its result on meta tensors.
    """

    func: Callable[..., Any]
    args: Any
    kwargs: Mapping[str, Any]
    key: Key
    inputs: Sequence[StageTensor]
    changed: Sequence[StageTensor]
    meta: Any

    def __str__(self) -> str:
        return f"{name_of(self.func)} ({self.key})"

    @property
    def needs_grad(self) -> bool:
        """Whether gradients flow back through it, if its results can have one."""
        if not torch.is_grad_enabled() or self.func in _DETACHING:
            return False
        return any(_needs_grad(x) for x in tensors_of((self.args, self.kwargs)))

    @property
    def operands(self) -> list[Tensor]:
        """The plain tensors that it has as arguments, such as weights."""
        found = tensors_of((self.args, self.kwargs))
        return [x for x in found if not isinstance(x, StageTensor)]

    @property
    def statistics(self) -> Sequence[Tensor]:
        """The running statistics that the call updates, as a norm in training does."""
        if self.func not in _UPDATES:
            return ()
        given = self.named
        trains = given.get("training", given.get("use_input_stats", self.func is F.instance_norm))
        found = [given.get(name) for name in ("running_mean", "running_var")] if trains else []
        return [x for x in found if isinstance(x, Tensor) and not isinstance(x, StageTensor)]

    @property
    def is_batch_norm(self) -> bool:
        """Whether the call is a batch norm with the statistics of its input."""
        return self.func in _BATCH_NORMS and bool(self.named.get("training"))

    @property
    def named(self) -> dict[str, Any]:
        """The arguments of a norm that may update running statistics, by their names."""
        return {**dict(zip(_UPDATES[self.func], self.args, strict=False)), **self.kwargs}

    def run(self) -> Any:
        """Returns the result on the values of the arguments."""
        return self.func(*replaced(_value, self.args), **replaced(_value, self.kwargs))


_T: Any = Tensor
_DETACHING = frozenset({
    _T.detach, torch.detach, _T.data.__get__, torch.zeros_like, torch.ones_like, torch.empty_like,
    torch.full_like, torch.rand_like, torch.randn_like, torch.randint_like, _T.new_zeros,
    _T.new_ones, _T.new_empty, _T.new_full, _T.new_tensor, _T.sign, torch.sign,
})  # fmt: skip
"""Calls whose results need no gradient, whatever their arguments."""
_BATCH_NORMS = (F.batch_norm, torch.batch_norm)
_MOVES = (_T.to, _T.cpu, _T.cuda, _T.type)
_CONVERSIONS = frozenset({
    _T.to, _T.type, _T.type_as, _T.float, _T.half, _T.bfloat16, _T.double,
})  # fmt: skip
"""Calls that may return their argument itself, by its dtype."""
_CAST = (torch.float16, torch.bfloat16, torch.float32)
"""The dtypes that autocast converts."""
_FUNCTIONAL = ("input", "running_mean", "running_var", "weight", "bias")
_NATIVE = ("input", "weight", "bias", "running_mean", "running_var")
_LAST = ("momentum", "eps")
_UPDATES: dict[Any, tuple[str, ...]] = {
    F.batch_norm: (*_FUNCTIONAL, "training", *_LAST),
    F.instance_norm: (*_FUNCTIONAL, "use_input_stats", *_LAST),
    torch.batch_norm: (*_NATIVE, "training", *_LAST, "cudnn_enabled"),
    torch.instance_norm: (*_NATIVE, "use_input_stats", *_LAST, "cudnn_enabled"),
}
"""Arguments of calls that may change plain tensors: running statistics, of one stage only."""
_NO_MEMORY = "it has memory on one stage only"
_REFUSED: dict[Any, str] = {
    _T.backward: "call Pipeline.step, which runs the backward pass of every stage",
    _T.register_hook: "register it on a parameter",
    _T.retain_grad: "only parameters have a gradient",
    _T.register_post_accumulate_grad_hook: "register it on a parameter",
    _T.data_ptr: _NO_MEMORY,
    _T.untyped_storage: _NO_MEMORY,
    _T.storage: _NO_MEMORY,
    _T.grad_fn.__get__: "its graph is on one stage only",
    _T.data.__set__: "assign another tensor to the attribute instead",
    _T.grad.__set__: "only parameters have a gradient",
}
_GETTERS: dict[Any, Callable[[StageTensor], Any]] = {
    _T.device.__get__: lambda x: torch.device(x.calls.device),
    _T.is_cpu.__get__: lambda x: x.calls.device.type == "cpu",
    _T.is_cuda.__get__: lambda x: x.calls.device.type == "cuda",
    _T.is_meta.__get__: lambda x: False,
    _T.requires_grad.__get__: lambda x: x.needs_grad,
    _T.is_leaf.__get__: lambda x: not x.needs_grad,
    _T.grad.__get__: lambda x: None,
    _T.__iter__: lambda x: iter(x.unbind(0)),
}
"""Attributes that torch's meta device would answer wrongly."""
_DTYPE = _T.dtype.__get__
_FACTS = (
    int, float, str, torch.dtype, torch.layout, torch.memory_format, type(None),
    type(NotImplemented),  # of x == "a"
)  # fmt: skip
"""Types of shapes and other results that all stages know."""


class Calls(ABC):
    """Forward pass that runs on stage tensors.

    Args:
        device: the device of the values.
        shapes: known shapes of results.
    """

    def __init__(self, device: torch.device, shapes: Shapes) -> None:
        self.device, self._shapes = device, shapes
        self._counts = Counter[str]()
        self._tensors = 0
        self._has_autocast = False  # in a call so far: values may have other dtypes than `meta`
        self._sharing: dict[int, weakref.WeakSet[StageTensor]] = {}

    @abstractmethod
    def compute(self, call: Call) -> Any:
        """Returns a call's result on values, or `None` if another stage computes it."""

    def compute_again(self, call: Call) -> Any:
        """Returns the result of a call that backward repeats, which this stage has computed."""
        return call.run()

    @abstractmethod
    def made(self, call: Call, results: Sequence[StageTensor]) -> None:
        """Is told the new results of a call."""

    def enter(self, value: Tensor) -> StageTensor:
        """Returns an argument of the network as a stage tensor."""
        x = self._wrap(_meta(value), value)
        x.made = False
        return x

    def sharing(self, x: StageTensor) -> list[StageTensor]:
        """Returns the other tensors that share the memory of `x`."""
        return [each for each in self._sharing[memory_id(x.meta)] if each is not x]

    def handle(self, func: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Returns the result of a call on stage tensors.

        Raises:
            NotSupported: the call reads values, which only one stage has, or needs a graph that
                spans stages.
        """
        inputs = [x for x in tensors_of((args, kwargs)) if isinstance(x, StageTensor)]
        if func in _GETTERS:
            return _GETTERS[func](inputs[0])
        if func == _DTYPE and inputs[0].made and torch.is_autocast_enabled(self.device.type):
            raise NotSupported(
                f"x.dtype in {calling_module() or 'a loss'} under autocast, which other stages do "
                "not know: cast without asking"
            )
        if func == _T.type and len(args) == 1 and not kwargs:
            return torch.empty(0, dtype=inputs[0].meta.dtype, device=self.device).type()
        if func in _REFUSED:
            raise NotSupported(
                f"{name_of(func)} on a tensor of a network in stages: {_REFUSED[func]}"
            )
        for x in inputs:
            x.refuse_foreign_graph()
        if any(x.calls is not self for x in inputs):
            raise NotSupported(
                f"{name_of(func)} in {calling_module() or 'a loss'} on tensors of several forward "
                "passes in stages: what a network keeps of a pass, such as a running mean of its "
                "own, belongs to one stage; batch norm's running statistics are possible"
            )
        meta, metas = self._on_meta(func, args, kwargs)
        self._has_autocast |= torch.is_autocast_enabled(self.device.type)
        converts = self._has_autocast and func in _CONVERSIONS
        if converts and any(meta is x.meta and x.made for x in inputs):
            meta = meta.view_as(meta)  # it may be the argument itself: one stage alone knows
        changed = [x for x in inputs if any(x.meta is each for each in metas)]
        if len(metas) > len({id(x) for x in changed}) and func not in _UPDATES:
            raise NotSupported(
                f"{name_of(func)} in {calling_module() or 'a loss'} writes into a plain tensor, "
                "which every stage has, what only one stage computes: make that tensor from one of "
                "the network (torch.zeros_like(x), torch.cat), or assign a new one"
            )
        if not changed and not tensors_of(meta):
            if not all(isinstance(x, _FACTS) for x in leaves((meta,))):
                raise NotSupported(f"{name_of(func)} on a tensor of a network in stages")
            return meta
        module = calling_module()
        key = Key(module, self._counts[module])
        call = Call(func, args, kwargs, key, inputs, changed, meta)
        if torch._C._current_graph_task_id() != -1:
            return self._again(call)
        self._counts[module] += 1
        value = self.compute(call)
        known = {id(x.meta): x for x in inputs}
        new: list[StageTensor] = []
        result = self._wrapped(meta, value, known, new)
        self.made(call, new)
        return result

    def _again(self, call: Call) -> Any:
        """Returns the result of a call that backward repeats (activation checkpointing)."""
        if any(x.value is None for x in call.inputs):
            raise NotSupported(
                f"{name_of(call.func)} in backward on a tensor of another stage: a part under "
                "torch.utils.checkpoint spans stages; begin the stage before or after it"
            )
        known = {id(x.meta): x for x in call.inputs}
        return self._wrapped(call.meta, self.compute_again(call), known, [])

    def _on_meta(
        self, func: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]
    ) -> tuple[Any, list[Tensor]]:
        """Returns the result on meta tensors, and the tensors that the call changes."""
        metas, named = replaced(_meta_of, args), replaced(_meta_of, kwargs)
        if func in _MOVES:
            return _moved(metas[0], args[1:], kwargs), []
        if func in _BATCH_NORMS:  # torch refuses a sample alone, but other groups may have more
            x = metas[0] if metas else named["input"]
            with torch.inference_mode(False):
                return torch.empty_like(x), []
        if "device" in named:
            named["device"] = "meta"

        def compute() -> Any:
            with torch.inference_mode(False), torch.no_grad():
                try:
                    return func(*metas, **named)
                except (RuntimeError, TypeError):
                    cast = self._cast_by_autocast((metas, named))
                    if cast is None:
                        raise
                    return func(*cast[0], **cast[1])

        try:
            result, changed = self._shapes.result(func, metas, named, compute)
        except (RuntimeError, TypeError) as error:
            if "meta" not in str(error).lower():
                raise
            raise NotSupported(
                f"{name_of(func)} in {calling_module() or 'a loss'}: it reads values, which only "
                "one stage has, so the calls that follow may differ between stages"
            ) from error
        if not changed:
            return result, []
        tensors: list[Tensor] = []
        for each in tensors_of((metas, named)):
            if not any(each is known for known in tensors):
                tensors.append(each)
        return result, [tensors[i] for i in changed]

    def _cast_by_autocast(self, metas: Any) -> Any:
        """Returns meta tensors with one dtype, as of autocast; `None` where they need no other."""
        found = [x.dtype for x in tensors_of(metas) if x.dtype in _CAST]
        if len(set(found)) < 2 or not torch.is_autocast_enabled(self.device.type):
            return None
        dtype = reduce(torch.promote_types, found)
        return replaced(lambda x: x.to(dtype) if x.dtype in _CAST else x, metas)

    def _wrapped(
        self, meta: Any, value: Any, known: Mapping[int, StageTensor], new: list[StageTensor]
    ) -> Any:
        """Returns a result with stage tensors in the places of its tensors."""
        if isinstance(meta, Tensor):
            found = known.get(id(meta))
            if found is None:
                found = self._wrap(meta, value)
                new.append(found)
            elif value is not None:
                found.value = value
            return found
        if isinstance(meta, list | tuple):
            values = [None] * len(meta) if value is None else value
            parts = [self._wrapped(m, v, known, new) for m, v in zip(meta, values, strict=True)]
            return meta._make(parts) if hasattr(meta, "_make") else type(meta)(parts)
        return meta if value is None else value

    def _wrap(self, meta: Tensor, value: Tensor | None) -> StageTensor:
        x = StageTensor(self, meta, value, self.device)
        x.needs_grad, x.made = False, True
        if value is not None and value.requires_grad:
            x.now_needs_grad()
        x.owner, x.stages = 0, set()
        x.number, self._tensors = self._tensors, self._tensors + 1
        self._sharing.setdefault(memory_id(meta), weakref.WeakSet()).add(x)
        return x


def memory_id(meta: Tensor) -> int:
    """Identifies the memory that a meta tensor and its views share, as long as one is alive."""
    return int(meta.untyped_storage()._cdata)


def _meta(x: Tensor) -> Tensor:
    with torch.inference_mode(False):
        if isinstance(x, ShardedTensor) or x.layout != torch.strided:
            return torch.empty(tuple(x.shape), dtype=x.dtype, device="meta")
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def _moved(meta: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """Returns the result of `Tensor.to` and its relatives, wherever they move a tensor."""
    dtype: torch.dtype | None = None
    for given in (*args, *kwargs.values()):
        if isinstance(given, torch.dtype):
            dtype = given
        elif isinstance(given, Tensor):
            dtype = given.dtype
        elif isinstance(given, str) and given.startswith("torch."):  # of Tensor.type
            dtype = torch.empty(0).type(given).dtype
    copy = kwargs.get("copy", False) or any(each is True for each in args[2:])
    named = {name: kwargs[name] for name in ("memory_format",) if name in kwargs}
    with torch.inference_mode(False), torch.no_grad():
        return meta.to(meta.dtype if dtype is None else dtype, copy=copy, **named)


def _meta_of(x: Tensor) -> Tensor:
    return x.meta if isinstance(x, StageTensor) else _meta(x)


def _value(x: Tensor) -> Tensor | None:
    return x.value if isinstance(x, StageTensor) else x


def _needs_grad(x: Tensor) -> bool:
    return x.needs_grad if isinstance(x, StageTensor) else x.requires_grad
