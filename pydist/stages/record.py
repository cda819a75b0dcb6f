"""Recording of a forward pass: its calls, their costs, and where stages may begin.

Calls are measured with the kernels that run them later: on one rank, with volumes that are sharded
tensors. Time is that of the forward and the backward pass.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import zip_longest
from types import FrameType
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from pydist.arguments import leaves, mapped
from pydist.backend.problem import onednn_has
from pydist.comm import LocalTransport
from pydist.errors import NotSupported, UsageError
from pydist.mesh import Mesh
from pydist.stages.calls import Call, Calls, Key, memory_id
from pydist.stages.parts import on_mesh
from pydist.stages.program_state import ProgramState
from pydist.stages.shapes import Shapes, is_differentiable
from pydist.stages.sources import Sources, names_of
from pydist.tensor import ShardedTensor, local_of
from pydist.tensor.stage import StageTensor
from pydist.tensor.wrapper import replaced, tensors_of
from pydist.watchdog import MODULE_PATH

_CONVOLUTIONS = frozenset({
    torch.conv1d, torch.conv2d, torch.conv3d,
    torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d,
})  # fmt: skip


class Cost(NamedTuple):
    """Cost that one recorded call of a forward pass has.

    Attributes:
        key: the call.
        seconds: of its forward and backward computation.
        gradients: bytes of the gradients of its results and arguments, which its backward pass has
            in memory at once.
        freed: bytes of these for which its backward pass first frees what it alone has saved.
    """

    key: Key
    seconds: float
    gradients: int
    freed: int = 0


class Wait(NamedTuple):
    """Tensor whose gradient waits, from the backward pass of its last use to that of its maker.

    Attributes:
        nbytes: of the gradient.
        made: the call that made the tensor, or the last one that has changed it in place.
        uses: the calls that use it, in order; at least one.
        memory: the tensor's, as in `RecordedPass.saved`.
    """

    nbytes: int
    made: int
    uses: list[int]
    memory: int


@dataclass
class RecordedPass:
    """Record that describes the calls of a forward pass.

    Attributes:
        costs: its calls, in order.
        sent: bytes that a cut before each call sends: of tensors that later calls use.
        legal: whether a stage may begin with each call.
        inside: whether the call before is in the same part under `torch.utils.checkpoint`, which
            one stage must repeat as a whole.
        saved: of each call, the memories that its backward pass needs, with their bytes; calls may
            share a memory. Parameters and arguments of the network do not count.
        operands: names of the parameters and buffers from which the plain tensors among the
            arguments of each call were computed.
        waits: the tensors whose gradients come from later calls.
        trained: of each call, the parameters among its operands whose gradients it computes: bytes
            by id.
        flows: pairs of calls: the one that made a tensor, or has changed it last, and one that uses
            it; the number of calls for the criterion, which uses the network's results.
    """

    costs: list[Cost]
    sent: np.ndarray
    legal: np.ndarray
    inside: np.ndarray
    saved: list[dict[int, int]]
    operands: list[list[str]]
    waits: list[Wait]
    trained: list[dict[str, int]]
    flows: set[tuple[int, int]] = field(default_factory=set)

    def __str__(self) -> str:
        checksum = crc32(", ".join(str(cost.key) for cost in self.costs).encode())
        return f"{len(self.costs)} calls (checksum {checksum:08x})"


@dataclass
class _Life:
    """The calls between which a tensor is used, and the memory that it shares with others."""

    nbytes: int
    made: int
    last: int
    memory: int


class _Backward(NamedTuple):
    """Backward pass that a call has.

    Attributes:
        seconds: of its computation; 0 if no gradient flows through the call.
        saved: the tensors that it needs, on the meta device if they are the call's arguments or
            results; without parameters and arguments of the network.
    """

    seconds: float
    saved: list[Tensor]


class _PassRecorder(Calls):
    """Forward pass that runs on one rank and records its calls."""

    def __init__(self, device: torch.device, mesh: Mesh, sources: Sources) -> None:
        super().__init__(device, Shapes())
        self._sources = sources
        self.costs: list[Cost] = []
        self._mesh = mesh
        self._lives: dict[int, _Life] = {}  # by the number of the tensor
        self._waits: dict[int, list[Wait]] = {}  # the same; another one after each change in place
        self._memories: dict[int, int] = {}  # in use, by `memory_id`: another number for each
        self._changed = set[int]()
        self._updates: dict[int, list[int]] = {}  # calls with the same running statistics
        self._saved: list[dict[int, int]] = []
        self._backward: _Backward | None = None
        self._operands: list[list[str]] = []
        self._inside: list[bool] = []
        self._parts: list[FrameType] = []  # of the last call; alive, so that no other has their ids

    def adopt(self, values: Any) -> Any:
        """Returns arguments with stage tensors in the places of tensors."""

        def entered(value: Any) -> Any:
            if not isinstance(value, Tensor) or isinstance(value, nn.Parameter):
                return value
            # Every stage has it: it is never sent.
            own = on_mesh(value.detach(), self._mesh, self._mesh.grid.batch_dims(3))
            return self.enter(own)

        return mapped(entered, values)

    def compute(self, call: Call) -> Any:
        now = len(self.costs)
        for x in call.inputs:
            if x.number in self._lives:
                self._lives[x.number].last = now
                uses = self._waits[x.number][-1].uses
                uses += [now] if now not in uses[-1:] else []
        self._changed.update(
            self._lives[x.number].memory for x in call.changed if x.number in self._lives
        )
        self._operands.append([each for x in call.operands for each in self._sources.of(x)])
        for statistics in call.statistics:
            self._updates.setdefault(id(statistics), []).append(now)
        parts = _checkpointed_parts()
        self._inside.append(any(a is b for a in parts for b in self._parts))
        self._parts = parts
        with torch.no_grad():
            forward, result = self._timed(call.run)
        self._backward = backward = self._backward_of(call)
        self._seconds = forward + (forward if backward is None else backward.seconds)
        return result

    def _timed(self, compute: Callable[[], Any]) -> tuple[float, Any]:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        began = time.perf_counter()
        result = compute()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - began, result

    def _backward_of(self, call: Call) -> _Backward | None:
        """Returns the backward pass of a call; `None` if it can't run by itself."""
        if call.changed:
            return None
        starts: list[Tensor] = []
        known: dict[int, Tensor | None] = {}  # meta tensors, by address

        def entered(x: Tensor) -> Tensor:
            is_made = isinstance(x, StageTensor) and x.made
            value = x.value if isinstance(x, StageTensor) else x
            assert value is not None
            if is_differentiable(value) and (is_made or isinstance(x, nn.Parameter)):
                value = value.detach().requires_grad_()
                starts.append(value)
            known[_address(_local(value))] = (
                x.meta if isinstance(x, StageTensor) and is_made else None
            )
            return value

        saved: list[Tensor] = []

        def keep(x: Tensor) -> Tensor:
            saved.append(x)
            return x

        try:
            with torch.enable_grad(), saved_tensors_hooks(keep, lambda x: x):
                out = call.func(*replaced(entered, call.args), **replaced(entered, call.kwargs))
                ends = [_local(x) for x in tensors_of(out) if x.requires_grad]
                grads = [torch.ones_like(x) for x in ends]
                roots = [_local(x) for x in starts]
            for x, meta in zip(tensors_of(out), tensors_of(call.meta), strict=True):
                known.setdefault(_address(_local(x)), meta)
            places = {_address(x): x for x in saved}
            found = [known.get(at, x) for at, x in places.items()]
            kept = [x for x in found if x is not None]
            if not ends:
                return _Backward(0.0, [])
            seconds, _ = self._timed(
                lambda: torch.autograd.grad(ends, roots, grads, allow_unused=True)
            )
            return _Backward(seconds, kept)
        except (RuntimeError, NotSupported):
            return None

    def made(self, call: Call, results: Sequence[StageTensor]) -> None:
        now = len(self.costs)
        for x in (*results, *call.changed) if call.needs_grad else ():
            if is_differentiable(x.meta):
                x.now_needs_grad()
        shared = {memory_id(x.meta) for x in call.inputs}
        for x in results:
            if memory_id(x.meta) not in shared:  # new, perhaps at the address of freed memory
                self._memories[memory_id(x.meta)] = x.number
            memory = self._memories.setdefault(memory_id(x.meta), x.number)
            self._lives[x.number] = _Life(x.meta.nbytes, now, now, memory)
        for x in (*results, *call.changed):
            nbytes = x.meta.nbytes if is_differentiable(x.meta) else 0
            if x.number in self._lives:
                memory = self._lives[x.number].memory
                self._waits.setdefault(x.number, []).append(Wait(nbytes, now, [], memory))
        self._saved.append(self._saved_by(call))
        self.costs.append(
            Cost(call.key, self._seconds, self._gradients_of(call), self._freed_by(call))
        )
        self._backward = None

    def _saved_by(self, call: Call) -> dict[int, int]:
        """Returns the memories that the backward pass of a call needs, with their bytes."""
        if self._backward is None:  # unknown: perhaps all
            saved = [x.meta for x in call.inputs if x.made] + tensors_of(call.meta)
        else:
            saved = self._backward.saved
        found: dict[int, int] = {}
        for x in saved:
            memory = self._memories.get(memory_id(x)) if x.is_meta else None
            if memory is None:  # a copy, or indices, which the call alone needs
                memory, self._tensors = self._tensors, self._tensors + 1
                found[memory] = x.untyped_storage().nbytes()
            else:
                found[memory] = self._lives[memory].nbytes
        return found

    def _gradients_of(self, call: Call) -> int:
        """Returns the bytes of the gradients of a call's results and arguments; 0 for views."""
        if self._backward is not None and not self._backward.seconds:
            return 0
        results = {memory_id(x): x for x in tensors_of(call.meta)}
        given = {memory_id(x.meta): x.meta for x in call.inputs if x.made}
        if not call.changed and results.keys() <= given.keys():
            return 0
        metas = [*results.values(), *given.values()]
        return sum(x.nbytes for x in metas if is_differentiable(x))

    def _freed_by(self, call: Call) -> int:
        """Returns the bytes of gradients before which a call's backward pass frees its input.

        As `shard_gradients` does where oneDNN computes them.
        """
        x = call.inputs[0].meta
        if self.device.type != "cpu" or not onednn_has(x.dtype) or call.func not in _CONVOLUTIONS:
            return 0
        return x.nbytes if call.inputs[0].made else 0

    def record(self, results: Any) -> RecordedPass:
        """Returns the recorded pass, whose results the network has returned."""
        calls = len(self.costs)
        inside = np.asarray(self._inside, dtype=bool)
        sent, legal = np.zeros(calls), ~inside
        legal[:1] = False
        sharing: dict[int, list[_Life]] = {}
        for life in self._lives.values():
            sent[life.made + 1 : life.last + 1] += life.nbytes
            sharing.setdefault(life.memory, []).append(life)
        for memory, lives in sharing.items():
            if memory in self._changed and len(lives) > 1:
                first, last = min(e.made for e in lives), max(e.last for e in lives)
                legal[first + 1 : last + 1] = False
        for calls_of in self._updates.values():
            legal[calls_of[0] + 1 : calls_of[-1] + 1] = False
        versions = [each for own in self._waits.values() for each in own]
        flows = {(each.made, use) for each in versions for use in each.uses}
        flows |= {
            (self._waits[x.number][-1].made, calls)
            for x in leaves((results,))
            if isinstance(x, StageTensor) and x.number in self._waits
        }
        waits = [each for each in versions if each.uses and each.nbytes]
        return RecordedPass(
            self.costs, sent, legal, inside, self._saved, self._operands, waits, [], flows
        )


def _checkpointed_parts() -> list[FrameType]:
    """Returns the frames of `torch.utils.checkpoint.checkpoint` that are running."""
    found: list[FrameType] = []
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        code = frame.f_code
        if code.co_name == "checkpoint" and code.co_filename == torch.utils.checkpoint.__file__:
            found.append(frame)
        frame = frame.f_back
    return found


def _address(x: Tensor) -> int:
    return int(x.untyped_storage().data_ptr())


def _local(x: Tensor) -> Tensor:
    return local_of(x) if isinstance(x, ShardedTensor) else x


def record(model: nn.Module, inputs: Sequence[Any], repeats: int = 3) -> RecordedPass:
    """Records a forward pass, and the backward pass of each call by itself, on this rank alone.

    Costs are the least of several passes. Only the gradients of one call are in memory at a time.

    Random numbers, buffers and other attributes of modules are as before afterwards.

    Args:
        model: the network, not parallelized yet.
        inputs: its arguments.
        repeats: number of passes.

    Raises:
        UsageError: two passes make different calls.
        NotSupported: the network reads values, as in `if x.max() > 0`.
    """
    first = next((x for x in leaves(inputs) if isinstance(x, Tensor)), None)
    if first is None:
        raise UsageError("sample: expected the network's arguments, with a tensor among them")
    found: list[RecordedPass] = []
    mesh = Mesh(LocalTransport())
    modules, versions = list(model.modules()), [p._version for p in model.parameters()]
    with (
        torch.enable_grad(), ProgramState(modules, first.device).kept(), copied_buffers(modules),
        _named(model),
    ):  # fmt: skip
        for _ in range(repeats):
            sources = Sources(names_of(model))
            recorder = _PassRecorder(first.device, mesh, sources)
            arguments = recorder.adopt(tuple(inputs))
            with sources:
                results = model(*arguments)
            found.append(recorder.record(results))
    for (name, p), version in zip(model.named_parameters(), versions, strict=True):
        if p._version != version:
            raise NotSupported(
                f"the forward pass of {type(model).__name__} changes the parameter {name!r}, so "
                "that several passes over a batch would differ: make it a buffer"
            )
    keys = [[cost.key for cost in each.costs] for each in found]
    if not keys[0]:
        raise UsageError(f"{type(model).__name__} makes no call on the sample that stages divide")
    for other in keys[1:]:
        differ = ((a, b) for a, b in zip_longest(keys[0], other) if a != b)
        if pair := next(differ, None):
            raise UsageError(
                f"two forward passes of {type(model).__name__} on the sample make different calls: "
                f"{pair[0] or 'none'} in one, {pair[1] or 'none'} in the other; stages are planned "
                "for the same calls in every pass"
            )
    rows = zip(*(each.costs for each in found), strict=True)
    costs = [row[0]._replace(seconds=min(c.seconds for c in row)) for row in rows]
    sizes = {name: p.nbytes for name, p in model.named_parameters() if p.requires_grad}
    trained = [{n: sizes[n] for n in call if n in sizes} for call in found[0].operands]
    return dataclasses.replace(found[0], costs=costs, trained=trained)


@contextmanager
def copied_buffers(
    modules: Iterable[nn.Module], values: Mapping[int, Tensor] | None = None
) -> Iterator[None]:
    """Gives modules copies of their buffers in the `with` block, so that their own do not change.

    Args:
        modules: the modules.
        values: takes the places of these buffers only, by their ids; may change.
    """
    held = [(m, name, b) for m in modules for name, b in m._buffers.items() if b is not None]
    copies = {id(b): b.clone() for _, _, b in held} if values is None else values
    kept = [(module, name, buffer) for module, name, buffer in held if id(buffer) in copies]
    for module, name, buffer in kept:
        module._buffers[name] = copies[id(buffer)]
    try:
        yield
    finally:
        for module, name, buffer in kept:
            module._buffers[name] = buffer


@contextmanager
def _named(model: nn.Module) -> Iterator[None]:
    """Gives the modules the paths by which calls are known, as `parallelize` does later."""
    for path, module in model.named_modules():
        module.__dict__[MODULE_PATH] = path or type(model).__name__
    try:
        yield
    finally:
        for module in model.modules():
            module.__dict__.pop(MODULE_PATH, None)
