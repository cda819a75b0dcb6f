"""Times the parts of a rank's steps, and passes spans to recorders."""

from __future__ import annotations

from collections import defaultdict
from time import perf_counter
from typing import Any, Protocol

from pydist._loader import native

_SPAN = native.PHASE_SPAN
# Parts that run only pydist's own code, which returns soon unless a device or another rank does not
# respond. "compute" may call the user's code.
_OWN = (
    "convolution", "dgrad", "wgrad", "boundary", "pack", "halo", "statistics", "gradients",
    "optimizer", "redistribute", "transfer",
)  # fmt: skip
_KINDS = dict.fromkeys(_OWN, native.PHASE_BLOCKED)
_enter_phase, _leave_phase = native.enter_phase, native.leave_phase

COMPUTATION = frozenset({"compute", "convolution", "dgrad", "wgrad", "pass"})
"""The parts that are a layer's computation, without communication and waiting."""


class Arriving(Protocol):
    """A halo in flight, for which a recorder waits; `pydist.comm.Channel` is one."""

    stream: int | None

    def wait(self) -> None:
        """Waits until the halo has arrived."""


class SpanSink(Protocol):
    """Receiver of the spans of one rank, in the order in which they end."""

    def begin(self, part: str, layer: str) -> Any:
        """Begins a span.

        Args:
            part: part of the step; see `Timers`.
            layer: path of the module, "" if none.

        Returns:
            A handle for `end`.
        """
        ...

    def end(self, begun: Any, part: str, layer: str, start: float, stop: float, own: float) -> None:
        """Ends a span.

        Args:
            begun: the result of `begin`; `None` if the span is older than the recording.
            part: part of the step.
            layer: path of the module, "" if none.
            start: `time.perf_counter` at the start.
            stop: at the end.
            own: seconds without nested spans.
        """
        ...

    def launch(self, layer: str) -> Any:
        """Records that a halo is posted; returns a handle for `land`."""
        ...

    def land(self, flight: Any, channel: Arriving) -> None:
        """Waits for a halo, and records how long it was in flight, concurrent to other spans."""
        ...


class Timers:
    """Seconds that a rank has spent in the parts of a step, summed since the last `reset`.

    Spans nest, and a part's seconds exclude nested spans. So the sum of the parts is at most the
    step, and the exchange inside a layer counts as exchange, not as computation.

    ==============  ============================================================================
    part            contents
    ==============  ============================================================================
    compute         a layer's computation, except these parts of a convolution:
    convolution     the main convolution, on the shard
    dgrad           its gradient with respect to the input
    wgrad           its gradient with respect to the weight
    pack            packing and posting a halo
    halo            waiting for a halo (not hidden by computation), and unpacking it
    halo in flight  time from posting to arrival, concurrent to the others: recorded, not summed
    boundary        the halo's contribution to the planes at a shard's faces
    statistics      sums over ranks for a norm or a reduction
    gradients       reduction of the gradients of parameters
    optimizer       the optimizer's step
    data            waiting for the next batch
    pass            a pass of a micro-batch through a stage, without its layers
    transfer        waiting for a tensor, or its gradient, of another stage
    redistribute    redistribution of a tensor to another layout, sums of partial results
    profiler        a profiler's own work between the others
    ==============  ============================================================================

    These are seconds of the host. On a CUDA device, a recorder also measures device time.

    A rank measures in its own thread, or in the one that runs its backward while the first waits:
    an object is used by one thread at a time.
    """

    def __init__(self) -> None:
        self.layer = ""
        """Path of the module that is being called; "" unless a profiler updates it."""
        self.recorder: SpanSink | None = None
        """The receiver of all spans, if there is one."""
        self._seconds: dict[str, float] = defaultdict(float)
        self._nested = 0.0
        """Seconds of the spans inside the innermost open one."""

    def measure(self, part: str, layer: str = "") -> Measurement:
        """Returns a context manager that adds its time, without nested spans, to `part`.

        Args:
            part: part of the step; see above.
            layer: path of the module; by default `self.layer`.
        """
        found = Measurement()
        found._timers, found._part, found._layer = self, part, layer
        return found

    def add(self, part: str, start: float, stop: float, begun: Any = None) -> None:
        """Adds a span that the caller has measured and that contains no other one.

        Like `measure` for the current layer, with half the overhead.

        Args:
            part: part of the step; see above.
            start: `time.perf_counter` at the start.
            stop: at the end.
            begun: the result of the recorder's `begin`, if there is a recorder.
        """
        self._seconds[part] += stop - start
        self._nested += stop - start
        if self.recorder is not None:
            self.recorder.end(begun, part, self.layer, start, stop, stop - start)

    def snapshot(self) -> dict[str, float]:
        """Returns the seconds by part."""
        return dict(self._seconds)

    def reset(self) -> None:
        """Resets all sums to zero."""
        self._seconds.clear()


class Measurement:
    """One running measurement of `Timers.measure`, which sets its fields.

    A class, as its entry is faster than that of a generator, without `__init__` for the same
    reason: a step makes about a hundred.
    """

    __slots__ = ("_begun", "_layer", "_outer", "_part", "_start", "_timers")

    _timers: Timers
    _part: str
    _layer: str
    _outer: float
    _begun: Any
    _start: float

    def __enter__(self) -> None:
        timers = self._timers
        self._layer = self._layer or timers.layer
        self._outer, timers._nested = timers._nested, 0.0
        recorder = timers.recorder
        self._begun = None if recorder is None else recorder.begin(self._part, self._layer)
        _enter_phase(self._part, _KINDS.get(self._part, _SPAN))
        self._start = perf_counter()

    def __exit__(self, *_: object) -> None:
        stop = perf_counter()
        _leave_phase()
        timers = self._timers
        whole = stop - self._start
        own = whole - timers._nested
        timers._nested = self._outer + whole
        timers._seconds[self._part] += own
        if timers.recorder is not None:
            timers.recorder.end(self._begun, self._part, self._layer, self._start, stop, own)
