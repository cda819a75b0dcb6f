"""Defines the profiler's device: events on streams, and ranges for tracing tools."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable


class CudaDevice:
    """CUDA device that times events, and opens NVTX ranges for Nsight Systems."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[torch.cuda.Event] = []

    def record(self, stream: int | None = None) -> tuple[torch.cuda.Event, int] | None:
        """Records an event after the work enqueued on a stream so far.

        Args:
            stream: the stream; by default the current one.

        Returns:
            The event, and its stream; `None` while the stream is captured into a graph.
        """
        if torch.cuda.is_current_stream_capturing():
            return None
        if stream is None:
            queue = torch.cuda.current_stream(self._device)
        else:
            queue = torch.cuda.ExternalStream(stream, device=self._device)
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record(queue)
        return event, int(queue.cuda_stream)

    def seconds(self, start: torch.cuda.Event, stop: torch.cuda.Event) -> float:
        """Returns the seconds between two events, both reached, to half a microsecond."""
        return float(start.elapsed_time(stop)) / 1e3

    def reached(self, event: torch.cuda.Event) -> bool:
        """Returns whether the device has reached an event."""
        return bool(event.query())

    def wait(self, event: torch.cuda.Event) -> None:
        """Waits until the device has reached an event."""
        event.synchronize()

    def free(self, event: torch.cuda.Event) -> None:
        """Keeps an event for reuse."""
        self._free.append(event)

    def push(self, name: str) -> None:
        """Opens an NVTX range."""
        torch.cuda.nvtx.range_push(name)

    def pop(self) -> None:
        """Closes the innermost NVTX range."""
        torch.cuda.nvtx.range_pop()


def profiled_device(tensors: Iterable[torch.Tensor]) -> CudaDevice | None:
    """Returns the device of a rank's tensors if it is asynchronous to the host; else `None`."""
    found = next((t.device for t in tensors if t.is_cuda), None)
    return None if found is None else CudaDevice(found)
