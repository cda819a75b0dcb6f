"""Copies blocks to a device through two pinned buffers, on a stream of their own."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

_BUFFERS = 2
"""One is filled from the file while the other one is copied."""


@dataclass
class _Slot:
    """Buffer that is in host memory, and the event at the end of the last copy from it."""

    memory: Tensor
    sent: torch.cuda.Event | None = None


class DeviceInput:
    """Copies blocks from files to a device without stalling the stream that computes.

    One thread reads a block into the next of two pinned buffers, queues its copy and normalization
    on a stream of its own, and continues reading. A buffer is filled again when the copy from it
    has ended (an event). Batches are memory of torch's allocator, which the consumer's stream
    takes over (`Arrival.hand_over`).

    With a CPU as the device, nothing is copied or pinned: for tests of the callers.

    Args:
        device: the destination of blocks.
        memory_format: of the inputs there.
    """

    def __init__(
        self, device: torch.device, memory_format: torch.memory_format = torch.contiguous_format
    ) -> None:
        self.device, self.memory_format = device, memory_format
        self._on_cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._on_cuda else None
        self._slots = [_Slot(self._buffer(0)) for _ in range(_BUFFERS)]
        self._filled = 0

    @contextmanager
    def queueing(self) -> Iterator[None]:
        """Makes this input's stream current for the `with` block."""
        if self._stream is None:
            yield
        else:
            with torch.cuda.stream(self._stream):
                yield

    def staging(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Returns host memory for the next block, after the last copy from it has ended.

        It is valid until `staging` is called twice more.
        """
        self._filled += 1
        slot = self._slots[self._filled % _BUFFERS]
        if slot.sent is not None:
            slot.sent.synchronize()
            slot.sent = None
        needed = math.prod(shape) * dtype.itemsize
        if slot.memory.numel() < needed:
            slot.memory = self._buffer(needed)
        return slot.memory[:needed].view(dtype).view(tuple(shape))

    def send(self, staged: Tensor, out: Tensor | None = None) -> Tensor:
        """Queues the copy of the block last staged to the device. Call within `queueing`.

        Args:
            staged: the memory that `staging` returned, filled.
            out: the destination; by default new memory, or on a CPU `staged` itself.

        Returns:
            The block on the device.
        """
        if out is None:
            if not self._on_cuda:
                return staged
            out = torch.empty_like(staged, device=self.device, pin_memory=False)
        out.copy_(staged, non_blocking=True)
        if self._on_cuda:
            self._slots[self._filled % _BUFFERS].sent = _now()
        return out

    def arrival(self, found: Tensor) -> Arrival:
        """Marks the end of a batch. Call within `queueing`.

        Args:
            found: int32, one per sample, on the device: not 0 where the sample is not finite.
        """
        if not self._on_cuda:
            return Arrival(found, None)
        on_host = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
        on_host.copy_(found, non_blocking=True)
        return Arrival(on_host, _now())

    def _buffer(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._on_cuda)


@dataclass(frozen=True)
class Arrival:
    """Batch that is on the device, or on its way there."""

    _found: Tensor
    _event: torch.cuda.Event | None

    def hand_over(self, *tensors: Tensor) -> None:
        """Makes the current stream wait for the batch and own its tensors from now on."""
        if self._event is None:
            return
        stream = torch.cuda.current_stream(tensors[0].device)
        stream.wait_event(self._event)
        for tensor in tensors:
            tensor.record_stream(stream)

    def not_finite(self) -> list[int]:
        """Returns the samples with NaN or infinity; waits for the arrival of the batch."""
        if self._event is not None:
            self._event.synchronize()
        return torch.nonzero(self._found).flatten().tolist()


def _now() -> torch.cuda.Event:
    event = torch.cuda.Event()
    event.record()
    return event
