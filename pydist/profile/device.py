"""The device that a profile asks for the time: events on its streams, ranges for its tools."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable


class Device(Protocol):
    """A device with streams, whose events have a time. `CudaDevice` is one."""

    def record(self, stream: int | None = None) -> tuple[Any, int] | None:
        """An event behind what a stream has been given so far.

        Args:
            stream: the stream; by default the current one.

        Returns:
            The event, and its stream; `None` while the stream is captured into a graph.
        """
        ...

    def seconds(self, start: Any, stop: Any) -> float:
        """From one event that was reached to another."""
        ...

    def reached(self, event: Any) -> bool:
        """Whether the device has come to an event."""
        ...

    def wait(self, event: Any) -> None:
        """Returns when it has."""
        ...

    def free(self, event: Any) -> None:
        """An event is not needed any more."""
        ...

    def push(self, name: str) -> None:
        """A range begins in the trace of a tool that watches this process, if one does."""
        ...

    def pop(self) -> None:
        """The innermost range ends."""
        ...


class CudaDevice:
    """A CUDA device: timed events, and NVTX ranges for Nsight Systems."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[torch.cuda.Event] = []

    def record(self, stream: int | None = None) -> tuple[torch.cuda.Event, int] | None:
        """See `Device.record`."""
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
        """See `Device.seconds`; to half a microsecond."""
        return float(start.elapsed_time(stop)) / 1e3

    def reached(self, event: torch.cuda.Event) -> bool:
        """See `Device.reached`."""
        return bool(event.query())

    def wait(self, event: torch.cuda.Event) -> None:
        """See `Device.wait`."""
        event.synchronize()

    def free(self, event: torch.cuda.Event) -> None:
        """See `Device.free`."""
        self._free.append(event)

    def push(self, name: str) -> None:
        """See `Device.push`."""
        torch.cuda.nvtx.range_push(name)

    def pop(self) -> None:
        """See `Device.pop`."""
        torch.cuda.nvtx.range_pop()


def device_of(tensors: Iterable[torch.Tensor]) -> Device | None:
    """The device that a rank's tensors lie on, if it is one that works behind the host's back."""
    found = next((t.device for t in tensors if t.is_cuda), None)
    return None if found is None else CudaDevice(found)
