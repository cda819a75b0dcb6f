"""Estimates the memory of a training step on a rank, from the tensors that exist at each time.

Forward keeps what backward needs. Backward frees it call by call, while gradients of activations
exist from the last call that read a tensor until the call that made it. Both are known from the
trace, so the peak is that of a sweep over the calls in both directions.
"""

from __future__ import annotations

import numpy as np

from pydist.plan.trace import Trace

KINDS = (
    "parameters", "gradients", "optimizer", "activations", "transient", "halos", "copies",
    "buckets", "input", "allocator", "reserved",
)  # fmt: skip
"""What a rank's memory holds: parameters, their gradients, and the optimizer's state; activations
that backward needs; what there is in addition at the peak, such as gradients of activations; halos
and the input in another memory format that backward needs; buckets of gradients; batches that are
read ahead; what the allocator holds in addition; libraries and a device's context."""


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
        # Gradients that a norm's backward has in two memory formats.
        self._twice = [(i, c.outputs[0]) for i, c in enumerate(trace.calls) if c.kind == "norm"]
        self._calls = calls
        self._is_saved = self._saver < calls
        self._input = owner[0]
        self._gradient = [tensor.gradient for tensor in trace.tensors]

    def kept(self, memories: np.ndarray) -> float:
        """Returns the bytes that backward needs, without the input.

        Args:
            memories: bytes of each memory on the rank.
        """
        kept = self._is_saved.copy()
        kept[self._input] = False
        return float(memories[kept].sum())

    def peak(self, memories: np.ndarray, gradients: np.ndarray) -> float:
        """Returns the largest number of bytes that exist at a time, without the input.

        Args:
            memories: bytes of each memory on the rank.
            gradients: bytes of the gradient of each tensor on the rank.
        """
        calls = self._calls
        own = memories.copy()
        own[self._input] = 0.0
        until = np.where(self._is_saved, calls - 1, self._last)
        forward = _sums(self._made, until, own, calls)
        kept = np.where(self._is_saved, own, 0.0)
        backward = _sums(self._saver, np.full(len(own), calls - 1), kept, calls)
        alive = self._consumer >= 0
        backward += _sums(self._producer[alive], self._consumer[alive], gradients[alive], calls)
        for i, number in self._twice:
            gradient = self._gradient[number]
            backward[i] += 0.0 if gradient is None else gradients[gradient]
        return float(max(forward.max(), backward.max()))


def _sums(first: np.ndarray, last: np.ndarray, nbytes: np.ndarray, calls: int) -> np.ndarray:
    """Returns, for each call, the bytes of what exists from a first to a last call, inclusive."""
    changes = np.zeros(calls + 2)
    np.add.at(changes, np.minimum(first, calls), nbytes)
    np.add.at(changes, np.minimum(last, calls) + 1, -nbytes)
    return changes.cumsum()[:calls]
