"""The parameters and buffers from which a network computes its plain tensors in a forward pass."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage, nn
from torch._C import _functorch
from torch.overrides import TorchFunctionMode

from pydist import marks
from pydist.errors import NotSupported
from pydist.stages.calls import Call
from pydist.stages.parameters import StagedParameters
from pydist.tensor import ShardedTensor, local_of
from pydist.tensor.stage import StageTensor
from pydist.tensor.wrapper import tensors_of

Named = tuple[frozenset[str], Tensor]
Followed = tuple[weakref.ref[Tensor], frozenset[str]]
_NONE = frozenset[str]()
_T = Tensor
_READS = frozenset(
    {
        _T.item, _T.tolist, _T.numpy, _T.__array__, _T.__bool__, _T.__float__, _T.__int__,
        _T.__index__, _T.__complex__, _T.__contains__, _T.is_nonzero, _T.equal, _T.allclose,
        torch.is_nonzero, torch.equal, torch.allclose,
    }
)  # fmt: skip
"""Functions whose result is a value instead of a tensor."""


class ValueRead(NamedTuple):
    """A value of weights or statistics that a network has read.

    Attributes:
        what: the function and the names of the weights.
        checksum: of the value.
        is_old: whether it is computed from weights that this rank does not train.
    """

    what: str
    checksum: int
    is_old: bool


def names_of(model: nn.Module, parameters: StagedParameters | None = None) -> list[Named]:
    """Returns the network's buffers and all parameters, by default its own, with their names."""
    parameters = parameters or StagedParameters(model)
    found = (*parameters.named(), *model.named_buffers())
    return [(frozenset([name]), x) for name, x in found]


class Sources(TorchFunctionMode):
    """Follows plain tensors to the parameters and buffers that they come from, without a graph.

    As of weights that are normalized, scaled, cut or transposed, also in evaluation and detached.

    Args:
        named: parameters and buffers; see `names_of`.
        kept: what earlier passes have computed and the network has kept; see `kept`.
        on_read: called with the names from which a value comes that a function reads, with the
            function and the value.
    """

    def __init__(
        self,
        named: Sequence[Named],
        kept: Sequence[Followed] = (),
        on_read: Callable[[frozenset[str], Any, Any], None] | None = None,
    ) -> None:
        super().__init__()
        # Names by the identity of a tensor, and of its memory: another tensor may share it without
        # a call that shows this.
        self._of: dict[int, frozenset[str]] = {}
        self._alive: list[object] = [x for _, x in named]  # so that nothing else is identified so
        self._made: list[Tensor] = []
        self._on_read = on_read
        self.written: dict[str, frozenset[str]] = {}
        """By name of what was changed in place: the names of what it was computed with."""
        users = Counter(memory._cdata for _, x in named if (memory := _memory_of(x)) is not None)
        self._arrays = {memory for memory, count in users.items() if count > 1}
        """Memory of which several parameters are parts: it does not tell them apart."""
        for names, x in named:
            self._name(x, names)
        self._named = dict(self._of)
        for reference, names in kept:
            if (alive := reference()) is not None:
                self._add(alive, names)

    def of(self, x: Tensor) -> frozenset[str]:
        """Returns the names of the parameters and buffers."""
        return self._found(self._of, x)

    def kept(self) -> list[Followed]:
        """Returns which tensors with names outlive the pass, which has ended."""
        found = {id(x): (weakref.ref(x), self.of(x)) for x in self._made}
        self._made.clear()
        return [each for each in found.values() if each[0]() is not None]

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], StageTensor):
            return func(*args, **kwargs)  # as most calls
        given = tensors_of((args, kwargs))
        if any(isinstance(x, StageTensor) for x in given):
            return func(*args, **kwargs)
        sources = _NONE.union(*(self.of(x) for x in given))
        if not sources:
            return func(*args, **kwargs)
        versions = [version_of(x) for x in given]
        result = func(*args, **kwargs)
        if func in _READS and self._on_read is not None:
            self._on_read(sources, func, result)
        for x, version in zip(given, versions, strict=True):
            if version_of(x) != version:
                for name in self._found(self._named, x):  # also of a view of it
                    self.written[name] = self.written.get(name, _NONE) | sources
                self._add(x, sources)
        for x in tensors_of(result):
            self._add(x, sources)
        return result

    def _add(self, x: Tensor, names: frozenset[str]) -> None:
        self._made.append(x)
        self._name(x, names)

    def _name(self, x: Tensor, names: frozenset[str]) -> None:
        self._of[id(x)] = self._of.get(id(x), _NONE) | names
        memory = _memory_of(x)
        if memory is not None and memory._cdata not in self._arrays:
            self._of[memory._cdata] = self._of.get(memory._cdata, _NONE) | names
            self._alive.append(memory)

    def _found(self, known: Mapping[int, frozenset[str]], x: Tensor) -> frozenset[str]:
        memory = _memory_of(x)
        by_memory = _NONE if memory is None else known.get(memory._cdata, _NONE)
        return known.get(id(x), _NONE) | by_memory


def refuse_unnamed(call: Call, sources: Sources) -> None:
    """Refuses a call that trains a tensor which meshes do not know, so that each trains it alone.

    Raises:
        NotSupported: it does.
    """
    for x in call.operands:
        if isinstance(x, ShardedTensor) or not x.requires_grad or sources.of(x):
            continue
        for leaf in _leaves_of(x):
            if not sources.of(leaf):
                raise NotSupported(
                    f"{call} trains a tensor of shape {list(leaf.shape)} that is no parameter "
                    "of the network or of a criterion that is a module: schedule='gems' would "
                    "train it on each mesh by other micro-batches"
                )


def _leaves_of(x: Tensor) -> list[Tensor]:
    """Returns the leaves of a plain tensor's graph."""
    if x.grad_fn is None:
        return [x]
    return [node.variable for node, _ in marks.below([x.grad_fn]) if hasattr(node, "variable")]


def version_of(x: Tensor) -> int:
    """Returns how often a tensor was changed in place, as far as torch counts it."""
    own = local_of(x) if isinstance(x, ShardedTensor) else x
    return 0 if own.is_inference() else own._version


def _memory_of(x: Tensor) -> UntypedStorage | None:
    """Returns the memory of a plain tensor; `None` of others, such as sharded ones."""
    if type(x) not in (Tensor, nn.Parameter) or x.layout != torch.strided:
        return None
    plain = x
    while _functorch.is_functorch_wrapped_tensor(plain):  # within torch.vmap and torch.func
        plain = _functorch.get_unwrapped(plain)
    return plain.untyped_storage()
