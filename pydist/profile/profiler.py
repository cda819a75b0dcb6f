"""Measures the steps of any training loop."""

from __future__ import annotations

import threading
from itertools import chain
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from pydist.errors import UsageError
from pydist.profile.clock import DeviceClock
from pydist.profile.device import profiled_device
from pydist.profile.gathering import RankSpans, gather_spans
from pydist.profile.layers import LayerHooks
from pydist.profile.recorder import SpanRecorder
from pydist.profile.schedule import draw_schedule
from pydist.profile.summary import Summary, summarize
from pydist.profile.table import format_table
from pydist.profile.trace import write_trace
from pydist.stages import Stages

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from pydist.mesh import Mesh


class Profiler:
    """Profiler that measures the steps of a training loop, on all ranks of a mesh.

        with pydist.profile.Profiler(mesh, model) as profiler:
            for batch in loader:
                ...                              # the usual step
                profiler.step()
        print(profiler.table())
        profiler.write_trace("trace.json")       # for chrome://tracing or ui.perfetto.dev

    In the `with` block every module of the model, every node of its graph and every optimizer has
    hooks that measure it, at a cost of some 40 µs per module and step. Entering and leaving the
    block is collective: all ranks profile, or none. Results are on rank 0, after the block.

    For a model on a CUDA device, all times are device times, from events around the same spans on
    their streams (the trace has both), and the spans are NVTX ranges, for Nsight Systems. A
    profiled step is never a CUDA graph.

    Args:
        ranks: the mesh on which the model was parallelized, or the stages of its pipeline.
        model: the model.
        warmup: number of first steps that are excluded: they make plans and buffers, and run the
            consistency checks that later steps skip.

    Raises:
        UsageError: the mesh is being profiled already, or `warmup` is negative.
    """

    def __init__(self, ranks: Mesh | Stages, model: nn.Module, warmup: int = 3) -> None:
        if warmup < 0:
            raise UsageError(f"warmup={warmup}: 0 or more steps are possible")
        self.mesh = ranks.mesh if isinstance(ranks, Stages) else ranks
        self.model, self.warmup = model, warmup
        self._described = _described(ranks)
        self._world = ranks.world
        self._clock: DeviceClock | None = None
        self._recorder = SpanRecorder()
        self._bounds: list[float] = []
        self._ranks: list[RankSpans] | None = None

    def __enter__(self) -> Profiler:
        if self.mesh.session.timers.recorder is not None:
            raise UsageError("this mesh is being profiled already")
        # Rank threads share torch's table of optimizer hooks: no step may run while it grows.
        self._world.barrier()
        self._layers = LayerHooks(self.model, self.mesh.session.timers)
        self._optimizers = _OptimizerHooks(self.mesh)
        device = profiled_device(chain(self.model.parameters(), self.model.buffers()))
        self._clock = None if device is None else DeviceClock(device)
        self._recorder = SpanRecorder(self._clock)
        self.mesh.session.timers.recorder = self._recorder
        self._world.barrier()
        self._left_out = 0
        self._mark()
        return self

    def step(self) -> None:
        """Ends a step, and begins the next."""
        self.mesh.session.timers.layer = ""  # a call that has raised leaves its layer set
        if self._left_out < self.warmup:
            self._left_out += 1
            self._bounds.clear()
            self._recorder.spans.clear()
            if self._clock is not None:
                self._clock.forget()
        self._mark()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self._world.barrier()
        self.mesh.session.timers.recorder = None
        self.mesh.session.timers.layer = ""
        self._layers.remove()
        self._optimizers.remove()
        if kind is None:
            complete = self._left_out == self.warmup
            rank, layers, device = self._world.rank, self._layers.paths, None
            if (clock := self._clock) is not None:
                clock.finish()
                bounds = clock.bounds if complete else []
                device = RankSpans(rank, layers, bounds, clock.spans)
            bounds = self._bounds if complete else []
            mine = RankSpans(rank, layers, bounds, self._recorder.spans, device)
            self._ranks = gather_spans(self._world, mine)

    @property
    def ranks(self) -> list[RankSpans]:
        """Spans that each rank has recorded, on rank 0; empty elsewhere.

        Raises:
            UsageError: the block has not ended, or contained no step after the warm-up.
        """
        if self._ranks is None:
            raise UsageError("the profile is there once its `with` block has ended without error")
        if any(each.steps < 1 for each in self._ranks):
            raise UsageError(
                f"nothing was measured: call step() at the end of each step, after {self.warmup} "
                "for warm-up at least once more"
            )
        return self._ranks

    def summary(self) -> Summary | None:
        """Returns mean seconds by layer and part, on rank 0; None elsewhere. Raises as `ranks`.

        The times are device times if all ranks have a device.
        """
        return summarize(self.ranks) if self.ranks else None

    def table(self) -> str:
        """Returns the table of layers and parts, on rank 0; "" elsewhere. Raises as `ranks`."""
        summary = self.summary()
        return "" if summary is None else format_table(summary, self._described)

    def write_trace(self, path: str | Path) -> None:
        """Writes a trace for chrome://tracing or ui.perfetto.dev on rank 0.

        Raises:
            DiskError: the file can't be written.
            UsageError: as `ranks`.
        """
        if self.ranks:
            write_trace(Path(path), self.ranks)

    def draw_schedule(self, path: str | Path) -> None:
        """Draws the passes of stages on rank 0, as they ran beside the ideal schedule.

        Raises:
            DiskError: the file can't be written.
            UsageError: as `ranks`, or matplotlib is not installed.
        """
        if self.ranks:
            draw_schedule(Path(path), self.ranks)

    def _mark(self) -> None:
        self._bounds.append(perf_counter())
        if self._clock is not None:
            self._clock.step()


def _described(ranks: Mesh | Stages) -> str:
    size, name = ranks.world.size, ranks.world.name
    if isinstance(ranks, Stages):
        return f"{size} ranks ({ranks.count} stages, {name})"
    return f"{size} ranks ({ranks.grid}, {name})" if size > 1 else "1 rank"


class _OptimizerHooks:
    """Hooks that measure the steps of all optimizers that this rank's thread uses."""

    def __init__(self, mesh: Mesh) -> None:
        self._timers = mesh.session.timers
        self._thread = threading.get_ident()
        self._open: list[AbstractContextManager[None]] = []
        self._handles = [
            register_optimizer_step_pre_hook(self._before),
            register_optimizer_step_post_hook(self._after),
        ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _before(self, *_: Any) -> None:
        # The hooks are global to the process: the step may be that of another rank's thread.
        if threading.get_ident() == self._thread:
            measured = self._timers.measure("optimizer")
            self._open.append(measured)
            measured.__enter__()

    def _after(self, *_: Any) -> None:
        if threading.get_ident() == self._thread:
            self._open.pop().__exit__(None, None, None)
