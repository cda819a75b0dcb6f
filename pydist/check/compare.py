"""Runs a network unpartitioned and partitioned, and compares every layer and gradient."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils._pytree import tree_leaves

from pydist.check.calls import CallRecorder, ShardedCall, sample_layout
from pydist.check.reference import Reference
from pydist.errors import UsageError
from pydist.mesh import Mesh
from pydist.parallel import parallelize
from pydist.stages import Stages, pipeline
from pydist.tensor import ShardedTensor
from pydist.tensor.operands import shard_of_plain
from pydist.tensor.stage import StageTensor
from pydist.watchdog import MODULE_PATH

NOISE = 1e-3
"""A tensor that noise in the last bit changes by more, relative to itself, is only noise."""

INPUT = "input"
"""The name of the gradient with respect to the sample."""


@dataclass
class Differences:
    """Largest differences that were found, relative to the reference tensor's largest value.

    Attributes:
        outputs: by module path, over all calls of the module and all tensors that it returns.
        gradients: by parameter name, and for the input.
        buffers: by name.
    """

    outputs: dict[str, float] = field(default_factory=dict)
    gradients: dict[str, float] = field(default_factory=dict)
    buffers: dict[str, float] = field(default_factory=dict)

    def join(self, other: Differences) -> None:
        """Keeps the larger of each."""
        for mine, theirs in self.pairs(other):
            for name, value in theirs.items():
                mine[name] = _larger(mine.get(name, 0.0), value)

    def pairs(self, other: Differences) -> list[tuple[dict[str, float], dict[str, float]]]:
        """Returns outputs, gradients and buffers, each of both."""
        return [
            (self.outputs, other.outputs),
            (self.gradients, other.gradients),
            (self.buffers, other.buffers),
        ]


class WholeRun:
    """Reference run that computes forward and backward on one device, and keeps the tensors.

    Args:
        model: the network; it is copied.
        x: the samples [N, C, ...].
        micro_batches: number of parts of the batch, which run in sequence.

    Attributes:
        casts: the narrower types to which the network itself casts.

    Raises:
        UsageError: the network can't be compared.
    """

    def __init__(self, model: nn.Module, x: Tensor, micro_batches: int = 1) -> None:
        self.x, self._micro_batches = x.detach().double(), micro_batches
        self._outputs: dict[tuple[str, int, int], Tensor] = {}
        self._grads: dict[str, Tensor] = {}
        net = copy.deepcopy(model).double()

        def keep(path: str, call: int, number: int, value: Tensor) -> None:
            # A copy, as later calls may work in place.
            self._outputs[path, call, number] = value.detach().clone()

        for path, module in net.named_modules():
            module.__dict__[MODULE_PATH] = path or type(net).__name__  # for error messages
        leaf = self.x.clone().requires_grad_()
        with Reference() as reference, _watching(net, keep):
            for loss in self._losses(net, leaf):
                if isinstance(loss, Tensor) and loss.requires_grad:
                    _run_backward(loss)
        self.casts = reference.casts
        if reference.draws:
            drawn = ", ".join(dict.fromkeys(reference.draws))
            raise UsageError(
                f"the network draws random numbers: {drawn}; they differ between the two runs: "
                "check it in evaluation mode, or without them"
            )
        if not isinstance(loss, Tensor):
            raise UsageError("the network returns no tensor of real numbers: nothing to compare")
        if not loss.requires_grad:
            raise UsageError("the network's output has no gradient: it was detached on its way")
        self._grads = _gradients(net, leaf)
        self._buffers = _buffers(net)

    @cached_property
    def scales(self) -> Differences:
        """Largest absolute value that each tensor has; for a module the least of its tensors'."""
        outputs: dict[str, float] = {}
        for (path, _, _), value in self._outputs.items():
            outputs[path] = min(outputs.get(path, math.inf), _largest(value))
        gradients = {name: _largest(g) for name, g in self._grads.items()}
        return Differences(outputs, gradients, {n: _largest(b) for n, b in self._buffers.items()})

    @cached_property
    def largest_value(self) -> float:
        """Largest absolute value that occurs in the sample and in all activations."""
        return max(map(_largest, (self.x, *self._outputs.values())))

    def differences(self, model: nn.Module, x: Tensor) -> Differences:
        """Computes the differences of another run on one device."""
        net, found = copy.deepcopy(model), Differences()
        leaf = x.detach().clone().requires_grad_()
        with _watching(net, partial(self._compare, found)):
            for loss in self._losses(net, leaf):
                loss.backward()
        self._finish(found, _gradients(net, leaf), net)
        return found

    def split_differences(self, model: nn.Module, x: Tensor, mesh: Mesh) -> RankRun:
        """Computes the differences of a run on a mesh for this rank's blocks. Collective.

        Args:
            model: the network; it is copied.
            x: the samples [N, C, ...], plain and equal on all ranks.
            mesh: the mesh that cuts them.
        """
        net, found = parallelize(copy.deepcopy(model), mesh), Differences()
        leaf = _sharded(x, mesh)
        with CallRecorder(mesh) as recorder, _watching(net, partial(self._compare, found)):
            loss = loss_of(net(leaf))
        with recorder.again():
            _run_backward(loss)
        self._finish(found, _gradients(net, leaf), net)
        return RankRun(found, recorder.calls)

    def staged_differences(self, model: nn.Module, x: Tensor, stages: Stages) -> RankRun:
        """Computes the differences of a run in stages, of what this rank's stage has. Collective.

        The input's gradient is compared where nothing else has one.

        Args:
            model: the network; it is copied.
            x: the samples [N, C, ...], plain and equal on all ranks.
            stages: the ranks of each stage.
        """
        net, found = copy.deepcopy(model), Differences()
        made = pipeline(net, stages, x, micro_batches=self._micro_batches)
        leaf = x.detach().clone().requires_grad_()
        trains = bool(self._grads.keys() - {INPUT})  # else a step needs the sample's gradient
        given: Tensor = _sharded(x, stages.mesh).detach() if trains else leaf
        with _watching(net, partial(self._compare, found)):
            made.step(given, None, lambda outputs, _: loss_of(outputs))
        grads = _gradients(net, leaf)
        for name in grads:
            found.gradients[name] = difference(grads[name], self._grads[name])
        made.gather()
        self._compare_buffers(found, net)
        return RankRun(found, plan=str(made.plan))

    def without_gradient(self, found: Differences) -> dict[str, float]:
        """Returns NaN for each parameter whose gradient no stage has."""
        return {n: math.nan for n in self._grads if n != INPUT and n not in found.gradients}

    def _losses(self, net: nn.Module, x: Tensor) -> Iterator[Any]:
        """Yields the loss of each micro-batch, weighted by its samples, after its forward pass."""
        parts = self._micro_batches
        cuts = [len(x) * i // parts for i in range(parts + 1)]
        for a, b in pairwise(cuts):
            yield loss_of(net(x[a:b])) * ((b - a) / len(x))

    def _compare(
        self, found: Differences, path: str, call: int, number: int, value: Tensor
    ) -> None:
        expected = self._outputs.get((path, call, number))
        worst = found.outputs.get(path, 0.0)
        here = math.nan if expected is None else difference(value, expected)
        found.outputs[path] = _larger(worst, here)

    def _finish(self, found: Differences, grads: dict[str, Tensor], net: nn.Module) -> None:
        for name, expected in self._grads.items():
            found.gradients[name] = difference(grads[name], expected)
        self._compare_buffers(found, net)

    def _compare_buffers(self, found: Differences, net: nn.Module) -> None:
        for name, value in _buffers(net).items():
            found.buffers[name] = difference(value, self._buffers[name])


@dataclass
class RankRun:
    """Result that one rank has of a partitioned run.

    Attributes:
        differences: the differences of its blocks, of what its stage has.
        calls: the calls on sharded tensors, in order; none of a run in stages.
        plan: the table of the stages, if it has any.
    """

    differences: Differences
    calls: list[ShardedCall] = field(default_factory=list)
    plan: str = ""


def difference(found: Tensor, expected: Tensor) -> float:
    """Computes max|Δ| / max|expected|, over this rank's block if `found` is sharded.

    Args:
        found: plain or sharded; the result is NaN if its shape differs.
        expected: the full tensor, in float64.
    """
    if tuple(found.shape) != tuple(expected.shape):
        return math.nan
    scale = float(expected.abs().max()) if expected.numel() else 0.0
    if isinstance(found, ShardedTensor):
        box = found.layout.box
        expected = expected[box.slices]
        found = found.to_local()
    if not expected.numel():
        return 0.0
    worst = float((found.detach().double() - expected).abs().max())
    return worst / (scale or 1.0)


def _sharded(x: Tensor, mesh: Mesh) -> ShardedTensor:
    """Returns this rank's block of a plain tensor, as a leaf with a gradient."""
    layout = sample_layout(mesh, x.shape)
    local = shard_of_plain(x.detach(), layout).clone().requires_grad_()
    return ShardedTensor.from_local(local, layout)


def _run_backward(loss: Tensor) -> None:
    """Runs backward with torch's function modes active, for checkpoints that recompute parts.

    `loss.backward()` is itself passed to the modes, which are disabled inside of it.
    """
    Variable._execution_engine.run_backward(
        (loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True,
        accumulate_grad=True,
    )  # fmt: skip


def _largest(value: Tensor) -> float:
    return float(value.abs().max()) if value.numel() else 0.0


def loss_of(outputs: Any) -> Any:
    """Computes a sum of all floating-point outputs in which each element has another weight.

    Returns:
        A scalar; 0.0 without such outputs.
    """
    total: Any = 0.0
    for number, y in enumerate(_floating(outputs)):
        generator = torch.Generator().manual_seed(number)
        weights = torch.randn(tuple(y.shape), generator=generator, dtype=torch.float64)
        total = total + (y * weights.to(y.dtype)).sum()
    return total


def _floating(values: Any) -> list[Tensor]:
    return [v for v in tree_leaves(values) if isinstance(v, Tensor) and v.is_floating_point()]


@contextmanager
def _watching(net: nn.Module, tell: Callable[[str, int, int, Tensor], None]) -> Iterator[None]:
    """Calls `tell` with each output of each layer: path, index of the call, index of the tensor."""
    calls: dict[str, int] = {}

    def after(path: str, _module: nn.Module, _inputs: Any, outputs: Any) -> None:
        if torch._C._current_graph_task_id() != -1:
            return  # a checkpoint computes its activations again
        call = calls[path] = calls.get(path, -1) + 1
        with torch.no_grad():
            for number, value in enumerate(_floating(outputs)):
                own = value.value if isinstance(value, StageTensor) else value
                if own is not None:  # else another stage has it
                    tell(path, call, number, own)

    layers = [(p, m) for p, m in net.named_modules() if not p or not any(m.children())]
    handles = [m.register_forward_hook(partial(after, p)) for p, m in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _gradients(net: nn.Module, leaf: Tensor | None = None) -> dict[str, Tensor]:
    grads = {n: p.grad for n, p in net.named_parameters() if p.grad is not None}
    return grads if leaf is None or leaf.grad is None else {**grads, INPUT: leaf.grad}


def _buffers(net: nn.Module) -> dict[str, Tensor]:
    return {n: b.detach() for n, b in net.named_buffers() if b.is_floating_point()}


def _larger(a: float, b: float) -> float:
    """Returns the larger number; NaN if either is NaN."""
    return math.nan if math.isnan(a) or math.isnan(b) else max(a, b)
