"""Estimates the memory of a training step on a rank, from the tensors that exist at each time.

Forward keeps what backward needs. Backward frees it call by call, while gradients of activations
exist from the last call that read a tensor until the call that made it, and gradients of parameters
from the first call that reads them. All of that is known from the trace, so the peak is that of a
sweep over the calls in both directions.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from pydist.backend.conv_kernels import ConvKernels
from pydist.backend.problem import ConvProblem
from pydist.plan.trace import Trace

KINDS = (
    "parameters", "gradients", "optimizer", "activations", "transient", "halos", "copies",
    "buckets", "messages", "input", "allocator", "reserved",
)  # fmt: skip
"""What a rank's memory holds: parameters and buffers, gradients of the trained ones, and the
optimizer's state; activations that backward needs; what there is in addition at the peak, such as
gradients of activations; halos and operands in another memory format that backward needs; buckets
of gradients; buffers of messages between ranks, which stay from the first step on; batches that
are read ahead; what the allocator holds in addition; libraries and a device's context."""

_BLOCK = 16 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 8
"""Channels of a block in oneDNN's own memory format, as many as a vector has; smaller numbers are
padded to it."""
_FEW_OUTPUTS, _PARTIAL_SUMS = 8, 4
"""Outputs of a channel, up to which oneDNN's wgrad has so many copies of the weight: measured."""


class Workspace:
    """Memory that each call needs besides tensors of the network, in bytes on a rank.

    Args:
        calls: their number.

    Attributes:
        forward: exists while the call computes.
        dgrad: exists while its backward computes the gradient of its input.
        wgrad: exists while its backward computes that of its weight, before.
        kept: needed by its backward, besides its saved tensors.
        copies: of operands in another memory format, needed by its backward.
        gathered: the memory of the trace that `kept` replaces: all its channels, not a part.
        halos: needed by its backward, received from neighbors.
        messages: buffers of its messages, which stay.
    """

    def __init__(self, calls: int) -> None:
        self.forward, self.dgrad, self.wgrad = np.zeros((3, calls))
        self.kept, self.copies = np.zeros((2, calls))
        self.halos, self.messages = np.zeros((2, calls))
        self.gathered: dict[int, int] = {}


def workspace_of(problem: ConvProblem, kernels: ConvKernels) -> tuple[float, float]:
    """Returns the bytes of oneDNN's buffers for a convolution, in dgrad and wgrad.

    In dgrad, plain dL/dy and dL/dx are copied to blocks of channels. The kernel "blocked" of
    wgrad has the input and dL/dy in blocks, and oneDNN copies both once more. Both reorder weights;
    for a few outputs, wgrad adds up partial sums of them.

    Args:
        problem: the convolution.
        kernels: that compute it.
    """
    shapes = problem.input, problem.output
    padded = (math.prod(s) / s[1] * _BLOCK * math.ceil(s[1] / _BLOCK) for s in shapes)
    size = problem.dtype.itemsize
    copied, weight = size * sum(padded), size * math.prod(problem.weight)
    in_dgrad: float = weight
    if kernels.dgrad == "onednn" and not kernels.channels_last:
        in_dgrad += copied
    in_wgrad = 2 * copied if kernels.wgrad == "blocked" else weight
    if math.prod(problem.output[2:]) <= _FEW_OUTPUTS:
        in_wgrad = max(in_wgrad, _PARTIAL_SUMS * weight)
    return in_dgrad, in_wgrad


class ActivationSweep:
    """Sweep over a traced step that finds the peak of its activations and their gradients.

    Args:
        trace: of the network.
    """

    def __init__(self, trace: Trace) -> None:
        calls = len(trace.calls)
        memories, tensors = len(trace.memories), len(trace.tensors)
        # Calls between which a memory is used in forward, and the first that saves it.
        self._made = np.zeros(memories, dtype=int)
        self._last = np.zeros(memories, dtype=int)
        self._saver = np.full(memories, calls)
        # Calls between which the gradient of a tensor exists in backward.
        self._producer = np.zeros(tensors, dtype=int)
        self._consumer = np.full(tensors, -1)
        owner = [tensor.memory for tensor in trace.tensors]
        for i, call in enumerate(trace.calls):
            for number in call.inputs:
                self._last[owner[number]] = i
                gradient = trace.tensors[number].gradient
                if gradient is not None:
                    self._consumer[gradient] = max(self._consumer[gradient], i)
            for number in call.outputs:
                self._last[owner[number]] = max(self._last[owner[number]], i)
                if trace.tensors[number].gradient == number:
                    self._producer[number], self._consumer[number] = i, i
            for memory in call.saved:
                self._saver[memory] = min(self._saver[memory], i)
                self._last[memory] = max(self._last[memory], i)
        seen = set[int]()
        for i, call in enumerate(trace.calls):
            for memory in [*(owner[n] for n in call.outputs), *call.saved]:
                if memory not in seen:
                    self._made[memory] = i
                    seen.add(memory)
        # Convolutions free their input between wgrad and dgrad.
        self._convs = [i for i, call in enumerate(trace.calls) if call.kind == "conv"]
        self._sources = [owner[trace.calls[i].inputs[0]] for i in self._convs]
        self._targets = [trace.tensors[trace.calls[i].inputs[0]].gradient for i in self._convs]
        self._of_parameters = np.zeros(calls)
        for i, call in enumerate(trace.calls):
            self._of_parameters[i] = sum(trace.parameters[number] for number in call.parameters)
        self._calls = calls
        self._savers_of: dict[int, list[int]] = {}
        for i, call in enumerate(trace.calls):
            for memory in call.saved:
                self._savers_of.setdefault(memory, []).append(i)
        self._input = owner[0]

    def kept(self, memories: np.ndarray, space: Workspace, calls: range) -> float:
        """Returns the bytes that the backward of some calls needs, without the input and halos.

        Args:
            memories: bytes of each memory on the rank.
            space: the calls' workspace.
            calls: numbers of the calls.
        """
        saver = self._savers(space)
        kept = (saver >= calls.start) & (saver < calls.stop)
        kept[self._input] = False
        return float(memories[kept].sum() + space.kept[calls.start : calls.stop].sum())

    def peak(
        self,
        memories: np.ndarray,
        gradients: np.ndarray,
        space: Workspace,
        calls: range,
        *,
        accumulates: bool,
    ) -> tuple[float, float]:
        """Finds the time at which most bytes exist in a pass over some calls.

        Args:
            memories: bytes of each memory on the rank.
            gradients: bytes of the gradient of each tensor on the rank.
            space: the calls' workspace.
            calls: numbers of the calls.
            accumulates: whether there are gradients of parameters from an earlier pass.

        Returns:
            The bytes of activations and their gradients at that time, without the input and halos;
            and the part of the parameters' gradients that exists.
        """
        count, saver = self._calls, self._savers(space)
        own = memories.copy()
        own[self._input] = 0.0
        own[saver < calls.start] = 0.0  # other calls keep it
        is_saved = saver < count
        until = np.where(is_saved, count - 1, self._last)
        besides = space.kept + space.copies
        besides = besides.cumsum() - besides[: calls.start].sum()
        forward = _sums(self._made, until, own, count) + besides + space.forward
        kept = np.where(is_saved, own, 0.0)
        backward = _sums(saver, np.full(len(own), count - 1), kept, count) + besides
        alive = self._consumer >= 0
        backward += _sums(self._producer[alive], self._consumer[alive], gradients[alive], count)
        backward += np.maximum(space.wgrad, space.dgrad)
        for i, memory, gradient in zip(self._convs, self._sources, self._targets, strict=True):
            freed = own[memory] if saver[memory] == i else 0.0
            in_dgrad = space.dgrad[i] - freed
            in_wgrad = space.wgrad[i] - (0.0 if gradient is None else gradients[gradient])
            backward[i] += max(in_dgrad, in_wgrad) - max(space.dgrad[i], space.wgrad[i])
        chosen = slice(calls.start, calls.stop)
        of_parameters = self._of_parameters[chosen]
        total = of_parameters.sum()
        there = np.full(len(calls), total) if accumulates else of_parameters[::-1].cumsum()[::-1]
        before = total if accumulates else 0.0
        times = [(each, before) for each in forward[chosen]]
        times += zip(backward[chosen], there, strict=True)
        most, then = max(times, key=sum)
        return float(most), float(then / total) if total else 0.0

    def _savers(self, space: Workspace) -> np.ndarray:
        """Returns the first call that saves each memory; their number if none does.

        A call that gathers a memory keeps all its channels instead.
        """
        if not space.gathered:
            return self._saver
        saver = self._saver.copy()
        for memory in {*space.gathered.values()}:
            others = [i for i in self._savers_of[memory] if space.gathered.get(i) != memory]
            saver[memory] = min(others, default=self._calls)
        return saver


def _sums(first: np.ndarray, last: np.ndarray, nbytes: np.ndarray, calls: int) -> np.ndarray:
    """Returns, for each call, the bytes of what exists from a first to a last call, inclusive."""
    changes = np.zeros(calls + 2)
    np.add.at(changes, np.minimum(first, calls), nbytes)
    np.add.at(changes, np.minimum(last, calls) + 1, -nbytes)
    return changes.cumsum()[:calls]
