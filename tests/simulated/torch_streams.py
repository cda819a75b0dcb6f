"""Streams, events and graphs of `torch.cuda` on the simulated device.

Streams made by torch are the calling thread itself: their operations have ended when the call
returns. One that waits for a captured stream is captured, too. Streams of other libraries
(`ExternalStream`) are the recorder's, and run asynchronously.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import simulated_torch_device as simulated
import torch

DEVICE = torch.device("cuda", 0)

_driver = ctypes.CDLL("libcuda.so.1")
_POINTER = ctypes.c_void_p
_driver.cuEventCreate.argtypes = [ctypes.POINTER(_POINTER), ctypes.c_uint]
_driver.cuEventRecord.argtypes = [_POINTER, _POINTER]
_driver.cuStreamWaitEvent.argtypes = [_POINTER, _POINTER, ctypes.c_uint]
_driver.cuEventQuery.argtypes = [_POINTER]
_driver.cuEventDestroy_v2.argtypes = [_POINTER]
_driver.cuStreamSynchronize.argtypes = [_POINTER]


def _check(status: int, call: str) -> None:
    if status != 0:
        simulated.fail_capture()
        raise RuntimeError(f"CUDA error: {call} gives {status}")


class Stream:
    """Stream made by torch: the thread that uses it."""

    cuda_stream = 0
    device = DEVICE

    _numbers = itertools.count()
    _known: dict[int, Stream] = {}  # noqa: RUF012  all of them, by number

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.stream_id = next(self._numbers)
        self._known[self.stream_id] = self

    @classmethod
    def current(cls) -> Stream:
        return cls._known[simulated.current_stream()]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.stream_id == self.stream_id

    def __hash__(self) -> int:
        return hash(self.stream_id)

    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, self.cuda_stream)

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        return self.record_event().query()

    def synchronize(self) -> None:
        if self.cuda_stream == 0:
            not_captured("synchronize")()
        else:
            _check(_driver.cuStreamSynchronize(self.cuda_stream), "cuStreamSynchronize")


DEFAULT = Stream()


class ExternalStream(Stream):
    """Stream made by another library."""

    def __init__(self, stream_ptr: int, device: Any = None) -> None:
        super().__init__()
        self.cuda_stream = stream_ptr


class Event:
    """Event of the recorder, with the host's time at which it was recorded."""

    def __init__(
        self,
        enable_timing: bool = False,
        blocking: bool = False,
        interprocess: bool = False,
        external: bool = False,
    ) -> None:
        self._timed = enable_timing
        self._place = _POINTER()
        self._seconds: float | None = None
        self._is_captured = False

    def record(self, stream: Stream | None = None) -> None:
        if not self._place:
            _check(_driver.cuEventCreate(ctypes.byref(self._place), 0), "cuEventCreate")
        self._seconds = time.perf_counter()
        stream = stream or Stream.current()
        with on_stream(stream):
            self._is_captured = simulated.capturing()
            _check(_driver.cuEventRecord(self._place, stream.cuda_stream), "cuEventRecord")

    def wait(self, stream: Stream | None = None) -> None:
        if self._place:
            stream = stream or Stream.current()
            if self._is_captured and stream.cuda_stream == 0:
                simulated.join_capture(stream.stream_id)
            with on_stream(stream):
                status = _driver.cuStreamWaitEvent(stream.cuda_stream, self._place, 0)
                _check(status, "cuStreamWaitEvent")

    def query(self) -> bool:
        not_captured("an event's query")()
        return not self._place or bool(_driver.cuEventQuery(self._place) == 0)

    def synchronize(self) -> None:
        not_captured("an event's synchronize")()
        self.wait(DEFAULT)

    def elapsed_time(self, end: Event) -> float:
        if not (self._timed and end._timed and self._seconds and end._seconds):
            raise RuntimeError("CUDA error: invalid resource handle")
        if not (self.query() and end.query()):
            raise RuntimeError("CUDA error: device not ready")
        return (end._seconds - self._seconds) * 1e3

    def __del__(self) -> None:
        if self._place:
            _driver.cuEventDestroy_v2(self._place)


@contextlib.contextmanager
def on_stream(stream: Stream | None) -> Iterator[None]:
    if stream is None:
        yield
        return
    before = simulated.exchange_stream(stream.stream_id)
    try:
        yield
    finally:
        simulated.exchange_stream(before)


class CUDAGraph:
    """Recorded operations of a capture, which each replay repeats."""

    def __init__(self, keep_graph: bool = False) -> None:
        self.held: Any = None

    def replay(self) -> None:
        self.held.replay()

    def reset(self) -> None:
        self.held = None


@contextlib.contextmanager
def capture(
    cuda_graph: CUDAGraph,
    pool: Any = None,
    stream: Stream | None = None,
    capture_error_mode: str = "global",
) -> Iterator[None]:
    with on_stream(stream or Stream()):
        simulated.begin_capture()
        try:
            yield
        finally:
            cuda_graph.held = simulated.end_capture()


def not_captured(what: str) -> Callable[..., None]:
    """Returns a call named `what`, which fails a capture."""

    def call(*args: Any, **kwargs: Any) -> None:
        if simulated.capturing():
            simulated.fail_capture()
            raise RuntimeError(
                f"CUDA error: operation not permitted when stream is capturing ({what})"
            )

    return call
