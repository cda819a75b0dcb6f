"""Tests of device times: events on streams, on the host's clock, without waits of the host.

The device is simulated, so durations are known; tests/gpu/test_profile_gpu.py uses a real one.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from torch import nn

import pydist.profile
from pydist import Mesh, layout_for_sample, parallelize, run_local
from pydist.backend.conv_kernels import ConvKernels
from pydist.comm.transports.local.transport import LocalChannel, LocalTransport
from pydist.profile import Profiler, profiler
from pydist.profile.clock import MAIN_STREAM, DeviceClock
from pydist.profile.recorder import SpanRecorder
from pydist.profile.spans import HALO_WAIT, IN_FLIGHT
from pydist.profile.summary import summarize
from support.equivalence import shard
from support.stand_ins.streams import SimulatedDevice

TRAVEL = 14.0
LENGTHS = {"run_forward": 10.0, "run_wgrad": 4.0, "run_dgrad": 3.0}
WARMUP, STEPS = 1, 3
CARRIER = 77
"""Stream of the messages."""


@pytest.fixture
def devices(monkeypatch) -> defaultdict[str, SimulatedDevice]:
    """Simulates a device per rank's thread for convolutions and exchanges; returns them."""
    made: defaultdict[str, SimulatedDevice] = defaultdict(SimulatedDevice)

    def mine() -> SimulatedDevice:
        return made[threading.current_thread().name]

    monkeypatch.setattr(profiler, "profiled_device", lambda tensors: mine())
    for name, seconds in LENGTHS.items():
        kernel = getattr(ConvKernels, name)

        def compute(self, *args, kernel=kernel, seconds=seconds):
            mine().busy(seconds)
            return kernel(self, *args)

        monkeypatch.setattr(ConvKernels, name, compute)
    start, wait = LocalChannel.start, LocalChannel.wait

    def start_on_device(self) -> None:
        mine().wait_for(mine().current, CARRIER)
        mine().busy(TRAVEL, CARRIER)
        start(self)

    def wait_on_device(self) -> None:
        wait(self)
        mine().wait_for(CARRIER)

    monkeypatch.setattr(LocalChannel, "start", start_on_device)
    monkeypatch.setattr(LocalChannel, "wait", wait_on_device)
    monkeypatch.setattr(LocalChannel, "stream", CARRIER)
    return made


def profiled(path: Path):
    """Profiles some steps of two convolutions on two ranks; returns rank 0's profiler."""
    x = torch.randn(1, 4, 8, 6, 6, generator=torch.Generator().manual_seed(0))

    def body(transport):
        mesh = Mesh(transport, 1, (2, 1, 1))
        net = parallelize(nn.Sequential(*(nn.Conv3d(4, 4, 3, padding=1) for _ in range(2))), mesh)
        with Profiler(mesh, net, WARMUP) as found:
            for _ in range(WARMUP + STEPS):
                local = shard(x, layout_for_sample(mesh, x.shape)).detach()
                net(local).square().sum().backward()
                found.step()
        found.write_trace(path)
        return found

    return run_local(body, 2, timeout=100)[0]


def test_a_layer_is_told_what_its_stream_waited(devices, tmp_path):
    found = profiled(tmp_path / "trace.json")
    summary = found.summary()
    assert summary.on_device
    columns = ("forward", "backward", "exposed", "posted", "boundary")
    for layer, expected in {
        "0": (10.0, 4.0, TRAVEL - 10.0, 0.0, 0.0),
        # In backward wgrad and dgrad run while the halo of dL/dy is in flight.
        "1": (10.0, 7.0, TRAVEL - 10.0 + TRAVEL - 7.0, 0.0, 0.0),
    }.items():
        row = summary.layers[layer]
        assert [row[c] for c in columns] == pytest.approx(expected, abs=1e-6)
    assert summary.step == pytest.approx(10 + 4 + 10 + 4 + 7 + 7 + 4, abs=1e-6)
    assert sum(summary.total.values()) == pytest.approx(summary.step, rel=1e-9)
    assert summary.in_flight == pytest.approx(3 * TRAVEL, abs=1e-6)
    assert summary.hidden == pytest.approx(1 - 15 / (3 * TRAVEL), abs=1e-6)
    assert "in ms per step of the device, mean over ranks" in found.table()


def test_the_trace_has_a_row_for_each_stream(devices, tmp_path):
    profiled(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    rows = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert rows == {
        (rank, row): f"stream {row}" if row else f"rank {rank}"
        for rank in (0, 1)
        for row in (0, MAIN_STREAM, MAIN_STREAM + 1)
    }
    for rank in (0, 1):
        on_device = [e for e in events if (e["pid"], e["tid"], e["ph"]) == (rank, MAIN_STREAM, "X")]
        parts = {e["cat"] for e in on_device}
        assert parts >= {"step", "convolution", "wgrad", "dgrad", "pack", HALO_WAIT, "boundary"}
        flights = [e for e in events if e["pid"] == rank and e.get("cat") == IN_FLIGHT]
        assert {e["tid"] for e in flights} == {0, MAIN_STREAM + 1}
        (main,) = [
            e for e in on_device
            if (e["name"], e["cat"]) == ("1", "convolution") and e["ts"] < on_step(on_device, 2)
        ]  # fmt: skip
        (begun,) = [
            e for e in flights
            if e["ph"] == "b" and e["tid"] and e["name"] == "1" and e["ts"] <= main["ts"]
            and e["ts"] >= main["ts"] - 1
        ]  # fmt: skip
        assert main["dur"] == pytest.approx(10e6)
        (ended,) = [e for e in flights if e["ph"] == "e" and e["id"] == begun["id"]]
        assert ended["ts"] - begun["ts"] == pytest.approx(TRAVEL * 1e6)


def on_step(events, number: int) -> float:
    return next(e["ts"] for e in events if e["name"] == f"step {number}")


def test_the_host_waits_for_the_device_at_the_end_alone(devices, tmp_path):
    waits = []
    end = DeviceClock.finish

    def finish(self) -> None:
        waits.append(self._device.waits)
        end(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeviceClock, "finish", finish)
        profiled(tmp_path / "trace.json")
    assert waits == [0, 0]


def clock_on(device: SimulatedDevice) -> DeviceClock:
    clock = DeviceClock(device)
    clock.step()
    return clock


def test_the_host_and_the_device_have_one_clock():
    device = SimulatedDevice()
    clock = clock_on(device)
    before = time.perf_counter()
    span = clock.begin("data", "")
    device.busy(5.0)
    clock.end(span)
    clock.step()
    clock.finish()
    (found,) = clock.spans
    assert (found.part, found.own, found.stream) == ("data", pytest.approx(5.0), MAIN_STREAM)
    # The idle device's time was set when the clock was made, less than a second ago.
    assert before - 1 < found.start <= before
    assert clock.bounds == pytest.approx([found.start, found.stop])


def test_events_are_given_back_as_soon_as_the_device_has_passed_them():
    device = SimulatedDevice()
    clock = clock_on(device)
    for step in range(3):
        for _ in range(2):
            span = clock.begin("compute", "conv")
            device.busy(1.0)
            clock.end(span)
        device.clock = device.at[0] - 1.0  # 1 s before the stream's
        clock.step()
        assert len(device.freed) == 2 * (2 * step + 1)
    clock.finish()
    assert len(device.freed) == 12
    assert len(clock.spans) == 6


def test_time_in_a_span_is_its_own_unless_a_nested_one_took_it_on_that_stream():
    device = SimulatedDevice()
    clock = clock_on(device)
    outer = clock.begin("compute", "conv")
    inner = clock.begin("pack", "conv")
    device.busy(1.0)
    clock.end(inner)
    device.current = 5
    beside = clock.begin("data", "")
    device.busy(8.0)
    clock.end(beside)
    device.current = 0
    device.busy(2.0)
    clock.end(outer)
    clock.step()
    clock.finish()
    own = {span.part: (span.own, span.stream) for span in clock.spans}
    assert own == {
        "pack": (pytest.approx(1.0), MAIN_STREAM),
        "data": (pytest.approx(8.0), MAIN_STREAM + 1),
        "compute": (pytest.approx(2.0), MAIN_STREAM),
    }


def test_ranges_are_named_by_layer_and_part_and_closed_after_an_exception():
    device = SimulatedDevice()
    mesh = Mesh(LocalTransport())
    clock = clock_on(device)
    mesh.session.timers.recorder = SpanRecorder(clock)
    with mesh.session.timers.measure("compute", "conv"):
        clock.begin("pack", "conv")  # packing raised an error
    assert device.all_ranges == ["conv compute", "conv pack"]
    assert device.ranges == []
    with mesh.session.timers.measure("optimizer"), mesh.session.timers.measure("profiler"):
        pass
    assert device.all_ranges[2:] == ["optimizer"]
    clock.finish()
    assert [span.part for span in clock.spans] == ["compute", "optimizer"]


def test_a_graph_that_is_captured_gets_no_events():
    device = SimulatedDevice()
    mesh = Mesh(LocalTransport())
    clock = clock_on(device)
    mesh.session.timers.recorder = recorder = SpanRecorder(clock)
    before = len(device.recorded)
    device.capturing = True
    with mesh.session.timers.measure("compute"):
        device.busy(1.0)
    device.capturing = False
    assert len(device.recorded) == before
    clock.step()
    clock.finish()
    assert clock.spans == []
    assert [span.part for span in recorder.spans] == ["compute"]


def test_without_a_device_of_its_own_times_are_the_hosts():
    mesh, model = Mesh(LocalTransport()), nn.Linear(3, 3)
    with Profiler(mesh, model, warmup=0) as found:
        model(torch.ones(2, 3)).sum().backward()
        found.step()
    assert found.ranks[0].device is None
    assert not summarize(found.ranks).on_device
    assert "of the device" not in found.table()


def test_without_a_profiler_nothing_of_it_is_called():
    """A step calls no function of pydist.profile; calls are counted, since times are noisy."""
    x = torch.randn(1, 2, 8, 4, 4, generator=torch.Generator().manual_seed(0))
    folder = str(Path(pydist.profile.__file__).parent)

    def body(transport):
        mesh = Mesh(transport, 1, (2, 1, 1))
        net = parallelize(nn.Sequential(nn.Conv3d(2, 2, 3, padding=1), nn.BatchNorm3d(2)), mesh)

        def calls() -> list[str]:
            seen: list[str] = []

            def look(frame, event, _) -> None:
                if event == "call" and frame.f_code.co_filename.startswith(folder):
                    seen.append(frame.f_code.co_name)

            sys.setprofile(look)
            net(shard(x, layout_for_sample(mesh, x.shape))).square().sum().backward()
            sys.setprofile(None)
            return seen

        assert calls() == []
        mesh.session.timers.recorder = SpanRecorder()
        assert {"begin", "end", "launch", "land"} <= set(calls())
        mesh.session.timers.recorder = None

    run_local(body, 2, timeout=100)
