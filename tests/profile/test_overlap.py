"""Tests of overlap in the trace: halos with the main convolution, gradients with backward.

They check the order of spans in every step; test_hidden_latency.py tests complete hiding.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from pydist import Mesh, layout_for_sample, parallelize, run_local
from pydist.profile import Profiler
from support.equivalence import shard
from support.latency import Latency, delayed

LATENCY = 0.02
STEPS = 5


class Span(NamedTuple):
    rank: int
    name: str
    part: str
    backward: bool
    start: float
    stop: float

    def holds(self, other: Span) -> bool:
        return self.rank == other.rank and self.start <= other.start and other.stop <= self.stop


def trace_of(model: Callable[[], nn.Module], x: torch.Tensor, path: Path) -> list[Span]:
    """Returns the trace of some steps on 2 ranks, in seconds."""

    def body(transport) -> None:
        mesh = Mesh(transport, 1, (2, 1, 1))
        net = parallelize(model(), mesh)
        with Profiler(mesh, net) as profiler:
            for _ in range(profiler.warmup + STEPS):
                mesh.world.barrier()  # a rank's delay does not carry over to the next step
                net(shard(x, layout_for_sample(mesh, x.shape))).square().sum().backward()
                profiler.step()
        profiler.write_trace(path)

    with delayed(Latency(LATENCY)):
        run_local(body, 2, timeout=200)
    return read(path)


def read(path: Path) -> list[Span]:
    spans, open_ = [], {}
    for event in json.loads(path.read_text())["traceEvents"]:
        if event["ph"] == "b":
            open_[event["id"]] = event["ts"]
        elif event["ph"] == "e":
            spans.append(_span(event, open_.pop(event["id"]), event["ts"]))
        elif event["ph"] == "X":
            spans.append(_span(event, event["ts"], event["ts"] + event["dur"]))
    assert not open_
    return spans


def _span(event: dict[str, Any], start: float, stop: float) -> Span:
    backward = event.get("args", {}).get("pass") == "backward"
    return Span(event["pid"], event["name"], event["cat"], backward, start / 1e6, stop / 1e6)


def within(spans: list[Span], frame: Span, part: str, layer: str, backward: bool) -> list[Span]:
    """Returns a layer's spans of one part within a step, sorted by start."""
    found = [
        s for s in spans if (s.part, s.name, s.backward) == (part, layer, backward)
        and frame.holds(s)
    ]  # fmt: skip
    return sorted(found, key=lambda s: s.start)


def in_steps(spans: list[Span], rank: int) -> list[Span]:
    found = [s for s in spans if s.rank == rank and s.part == "step"]
    assert [s.name for s in found] == [f"step {n}" for n in range(1, STEPS + 1)]
    return found


@pytest.fixture(scope="module")
def convolutions(tmp_path_factory) -> list[Span]:
    """Returns the trace of two layers whose time is mostly convolution."""
    x = torch.randn(1, 16, 32, 32, 32, generator=torch.Generator().manual_seed(0))

    def model() -> nn.Module:
        return nn.Sequential(nn.Conv3d(16, 16, 3, padding=1), nn.Conv3d(16, 16, 3, padding=1))

    return trace_of(model, x, tmp_path_factory.mktemp("trace") / "trace.json")


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("layer", ["0", "1"])
def test_halos_travel_while_the_main_convolution_runs(convolutions, layer, backward):
    for frame in (*in_steps(convolutions, 0), *in_steps(convolutions, 1)):
        packs = within(convolutions, frame, "pack", layer, backward)
        waits = within(convolutions, frame, "halo", layer, backward)
        (flight,) = within(convolutions, frame, "halo in flight", layer, backward)
        part = "dgrad" if backward else "convolution"
        (main,) = within(convolutions, frame, part, layer, backward)
        assert packs[0].start <= flight.start <= packs[-1].stop <= main.start
        assert main.stop <= waits[0].start <= flight.stop <= waits[-1].stop


def test_gradients_travel_while_backward_runs(tmp_path):
    """The last layer's gradients fill a bucket, which is sent before the first layer's exist."""
    x = torch.randn(1, 4, 16, 16, 16, generator=torch.Generator().manual_seed(0))

    def model() -> nn.Module:
        return nn.Sequential(
            nn.Conv3d(4, 8, 3, padding=1), nn.ReLU(), nn.MaxPool3d(4), nn.Flatten(),
            nn.Linear(512, 8192),
        )  # fmt: skip

    spans = trace_of(model, x, tmp_path / "trace.json")
    for rank in range(2):
        for frame in in_steps(spans, rank):
            first = within(spans, frame, "wgrad", "0", backward=True)
            posted = [s for s in spans if s.part == "gradients" and s.backward and frame.holds(s)]
            assert min(s.start for s in posted) < max(s.stop for s in first)
            # The wait comes after backward.
            assert max(s.stop for s in posted) > max(s.stop for s in first)
