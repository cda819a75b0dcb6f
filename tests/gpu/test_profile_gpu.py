"""Profile of a real device: events on its streams, and the waits of a stream."""

from __future__ import annotations

import json
import time

import pytest
import torch
from torch import Tensor, nn

from pydist import Mesh, distribute_tensor, parallelize
from pydist.comm import LocalTransport
from pydist.profile import Profiler
from pydist.profile.clock import DeviceClock
from pydist.profile.device import CudaDevice
from pydist.profile.recorder import SpanRecorder
from pydist.profile.spans import IN_FLIGHT
from pydist.train.device import own_stream
from support.transports.device_contract import no_two_ranks, two_ranks

DEVICE = torch.device("cuda", 0)
BUSY = 50_000_000
"""The number of cycles of a kernel: about 25 ms."""


@pytest.fixture(scope="module")
def busy_seconds() -> float:
    """Returns the duration of `BUSY` in seconds, at the clock of a device under load."""
    for _ in range(20):
        torch.cuda._sleep(BUSY)
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    torch.cuda._sleep(BUSY)
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / 1e3


class Busy(nn.Module):
    """Layer that keeps the device busy, but not the host."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        torch.cuda._sleep(BUSY)
        return x * self.scale


@pytest.mark.behind_the_host
def test_a_layer_has_the_time_of_the_device(busy_seconds, tmp_path):
    mesh = Mesh(LocalTransport())
    with own_stream(DEVICE):
        model = nn.Sequential(nn.Conv3d(2, 4, 3, padding=1), Busy(), nn.Flatten()).to(DEVICE)
        model = parallelize(model, mesh)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, fused=True)
        x = torch.randn(1, 2, 16, 16, 16, device=DEVICE)
        with Profiler(mesh, model, warmup=2) as profiler:
            for _ in range(2 + 3):
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                profiler.step()
    summary = profiler.summary()
    assert summary.on_device
    assert summary.layers["1"]["forward"] == pytest.approx(busy_seconds, rel=0.1)
    assert summary.layers["0"]["forward"] < busy_seconds / 2
    assert summary.layers["0"]["backward"] > 0
    assert summary.total["optimizer"] > 0
    assert summary.step >= summary.layers["1"]["forward"]
    assert sum(summary.total.values()) == pytest.approx(summary.step, rel=1e-6)
    profiler.write_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    on_device = [e for e in events if e["tid"] == 1 and e["ph"] == "X"]
    assert {e["cat"] for e in on_device} >= {"step", "convolution", "wgrad", "optimizer"}


@pytest.mark.behind_the_host
def test_a_wait_is_what_the_stream_waits_and_not_the_host(busy_seconds):
    side = torch.cuda.Stream(DEVICE)
    with own_stream(DEVICE):
        clock = DeviceClock(CudaDevice(DEVICE))
        recorder = SpanRecorder(clock)
        mesh = Mesh(LocalTransport())
        mesh.session.timers.recorder = recorder
        clock.step()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(2 * BUSY)
        began = time.perf_counter()
        with mesh.session.timers.measure("compute"):
            torch.cuda._sleep(BUSY)
        with mesh.session.timers.measure("halo"):
            torch.cuda.current_stream().wait_stream(side)
        queued = time.perf_counter() - began
        clock.step()
        clock.finish()
    assert queued < busy_seconds / 2, "the host has waited"
    own = {span.part: span.own for span in clock.spans}
    assert own["compute"] == pytest.approx(busy_seconds, rel=0.1)
    assert own["halo"] == pytest.approx(busy_seconds, rel=0.1)
    # On the host's clock, the device begins within a millisecond of the launch.
    assert clock.spans[0].start == pytest.approx(began, abs=1e-3)


def test_a_graph_is_captured_while_a_recorder_is_set():
    with own_stream(DEVICE):
        clock = DeviceClock(CudaDevice(DEVICE))
        mesh = Mesh(LocalTransport())
        mesh.session.timers.recorder = SpanRecorder(clock)
        clock.step()
        x = torch.zeros(8, device=DEVICE)
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream()
        with torch.cuda.graph(graph, stream=stream), mesh.session.timers.measure("compute"):
            x += 1
        graph.replay()
        graph.replay()
        clock.step()
        clock.finish()
    assert clock.spans == []
    assert torch.equal(x.cpu(), torch.full((8,), 2.0))


@two_ranks(no_two_ranks())
def test_halos_of_two_ranks_fly_on_a_stream_of_their_own(devices, tmp_path):
    mesh = Mesh(devices, 1, (2, 1, 1))
    with own_stream(devices.device):
        model = nn.Sequential(*(nn.Conv3d(4, 4, 3, padding=1) for _ in range(2))).to(devices.device)
        model = parallelize(model, mesh)
        x = torch.ones(1, 4, 32, 32, 32, device=devices.device)
        with Profiler(mesh, model, warmup=2) as profiler:
            for _ in range(2 + 3):
                model(distribute_tensor(x, mesh)).square().mean().backward()
                profiler.step()
    profiler.write_trace(tmp_path / "trace.json")
    if devices.rank != 0:
        return
    summary = profiler.summary()
    assert summary.on_device
    assert summary.in_flight > 0
    assert 0 <= summary.hidden <= 1
    for layer in ("0", "1"):
        assert summary.layers[layer]["posted"] > 0
        assert summary.layers[layer]["exposed"] >= 0
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    flights = [e for e in events if e.get("cat") == IN_FLIGHT and e["tid"] > 0]
    assert {e["pid"] for e in flights} == {0, 1}
    assert min(e["tid"] for e in flights) > 1, "that is the stream of the steps"
