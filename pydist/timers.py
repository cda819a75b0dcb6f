"""Where a rank's time goes: seconds by part of a step, and spans for recorders."""

from __future__ import annotations

from collections import defaultdict
from time import perf_counter
from typing import Any, Protocol

from pydist._loader import native

_SPAN = native.PHASE_SPAN
# Own code of pydist, which returns soon unless a device or another rank does not answer. What is
# measured as "compute" may call the user's.
_OWN = (
    "convolution", "dgrad", "wgrad", "boundary", "pack", "halo", "statistics", "gradients",
    "optimizer", "redistribute",
)  # fmt: skip
_KINDS = dict.fromkeys(_OWN, native.PHASE_BLOCKED)
_enter_phase, _leave_phase = native.enter_phase, native.leave_phase

COMPUTATION = frozenset({"compute", "convolution", "dgrad", "wgrad"})
"""The parts that are a layer's own work, and neither communication nor waiting."""


class Arriving(Protocol):
    """A halo on its way, as a recorder waits for it; `pydist.comm.Channel` is one."""

    stream: int | None

    def wait(self) -> None:
        """Returns when it is there."""


class Recorder(Protocol):
    """Takes the spans of one rank, in the order in which they end."""

    def begin(self, part: str, layer: str) -> Any:
        """A span begins.

        Args:
            part: what is done; see `Timers`.
            layer: path of the module it is done for, "" if none.

        Returns:
            What `end` is given when the span is over.
        """
        ...

    def end(self, begun: Any, part: str, layer: str, start: float, stop: float, own: float) -> None:
        """A span has ended.

        Args:
            begun: what `begin` returned; `None` if the span is older than the recording.
            part: what was done.
            layer: path of the module it was done for, "" if none.
            start: `time.perf_counter` when it began.
            stop: when it ended.
            own: seconds of it that no nested span took.
        """
        ...

    def launch(self, layer: str) -> Any:
        """A halo is posted; returns what `land` is given for it."""
        ...

    def land(self, flight: Any, channel: Arriving) -> None:
        """Waits for a halo, and records for how long it was on its way, beside other spans."""
        ...


class Timers:
    """Seconds that a rank has spent in the parts of a step, summed since the last `reset`.

    Spans nest, and a part's seconds leave out what nested spans took. So the parts add up to no
    more than the step, and the exchange inside of a layer counts as exchange, not as computation.

    ==============  ============================================================================
    part            what it is
    ==============  ============================================================================
    compute         a layer's own work, but for these of a convolution:
    convolution     the main one, on the shard
    dgrad           its gradient by the input
    wgrad           its gradient by the weight
    pack            a halo is packed and posted
    halo            waiting for a halo (what computation did not hide), and unpacking it
    halo in flight  from posting to arrival, beside the others: recorded, not summed
    boundary        what the halo contributes to the planes at a shard's faces
    statistics      sums over ranks for a norm or a reduction
    gradients       reducing the gradients of parameters
    optimizer       the optimizer's step
    data            waiting for the next batch
    redistribute    moving a tensor into another layout
    profiler        what a profiler does for itself between the others
    ==============  ============================================================================

    These are seconds of the host. On a CUDA device a recorder measures its own beside them.

    A rank measures in its own thread, or in the one that runs its backward while the first waits:
    an object serves one at a time.
    """

    def __init__(self) -> None:
        self.layer = ""
        """Path of the module that is being called; "" unless a profiler keeps it up to date."""
        self.recorder: Recorder | None = None
        """Takes every span while it is set."""
        self._seconds: dict[str, float] = defaultdict(float)
        self._nested = 0.0
        """Seconds that the spans inside of the innermost open one have taken."""

    def measure(self, part: str, layer: str = "") -> Measurement:
        """A context manager that adds its block's time, less that of nested spans, to `part`.

        Args:
            part: what is done; see above.
            layer: path of the module it is done for; by default `self.layer`.
        """
        return Measurement(self, part, layer)

    def add(self, part: str, start: float, stop: float, begun: Any = None) -> None:
        """Adds a span that the caller has measured and that contains no other one.

        As `measure` for the layer at work, in half the time.

        Args:
            part: what was done; see above.
            start: `time.perf_counter` when it began.
            stop: when it ended.
            begun: what the recorder's `begin` returned, if there is one.
        """
        self._seconds[part] += stop - start
        self._nested += stop - start
        if self.recorder is not None:
            self.recorder.end(begun, part, self.layer, start, stop, stop - start)

    def snapshot(self) -> dict[str, float]:
        """Seconds by part."""
        return dict(self._seconds)

    def reset(self) -> None:
        """Starts all sums at zero again."""
        self._seconds.clear()


class Measurement:
    """One measurement under way, made by `Timers.measure`; a class, as it opens faster."""

    __slots__ = ("_begun", "_layer", "_outer", "_part", "_start", "_timers")

    def __init__(self, timers: Timers, part: str, layer: str) -> None:
        self._timers, self._part, self._layer = timers, part, layer

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
