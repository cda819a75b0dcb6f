"""Defines the profiler's device: events on streams, and ranges for tracing tools."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable


class Device(Protocol):
    """Device that has streams and timed events, such as `CudaDevice`."""

    def record(self, stream: int | None = None) -> tuple[Any, int] | None:
        """Records an event after the work enqueued on a stream so far.

        Args:
            stream: the stream; by default the current one.

        Returns:
            The event, and its stream; `None` while the stream is captured into a graph.
        """
        ...

    def seconds(self, start: Any, stop: Any) -> float:
        """Returns the seconds between two events that were reached."""
        ...

    def reached(self, event: Any) -> bool:
        """Returns whether the device has reached an event."""
        ...

    def wait(self, event: Any) -> None:
        """Waits until the device has reached an event."""
        ...

    def free(self, event: Any) -> None:
        """Returns an event for reuse."""
        ...

    def push(self, name: str) -> None:
        """Begins a range in the trace of a tool that profiles this process, if any."""
        ...

    def pop(self) -> None:
        """Ends the innermost range."""
        ...


class CudaDevice:
    """CUDA device that times events, and opens NVTX ranges for Nsight Systems."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[torch.cuda.Event] = []

    def record(self, stream: int | None = None) -> tuple[torch.cuda.Event, int] | None:
        """Records an event after the work of a stream; see `Device.record`."""
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
        """Returns the seconds between two events, to half a microsecond; see `Device.seconds`."""
        return float(start.elapsed_time(stop)) / 1e3

    def reached(self, event: torch.cuda.Event) -> bool:
        """Returns whether the device has reached an event; see `Device.reached`."""
        return bool(event.query())

    def wait(self, event: torch.cuda.Event) -> None:
        """Waits until the device has reached an event; see `Device.wait`."""
        event.synchronize()

    def free(self, event: torch.cuda.Event) -> None:
        """Keeps an event for reuse; see `Device.free`."""
        self._free.append(event)

    def push(self, name: str) -> None:
        """Opens an NVTX range; see `Device.push`."""
        torch.cuda.nvtx.range_push(name)

    def pop(self) -> None:
        """Closes the innermost NVTX range; see `Device.pop`."""
        torch.cuda.nvtx.range_pop()


def profiled_device(tensors: Iterable[torch.Tensor]) -> Device | None:
    """Returns the device of a rank's tensors if it is asynchronous to the host; else `None`."""
    found = next((t.device for t in tensors if t.is_cuda), None)
    return None if found is None else CudaDevice(found)
