"""Simulated device: the faults that it finds and a CPU would not, and the valid uses it accepts."""

from __future__ import annotations

import ctypes
import os

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.skipif(
    not os.environ.get("PYDIST_SIMULATED"), reason="tools/simulate has the simulated device"
)


@pytest.fixture
def stream():
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        yield stream


@pytest.fixture
def other():
    """Yields a stream of the recorder, which runs asynchronously to the host."""
    driver, handle = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
    assert driver.cuStreamCreateWithPriority(ctypes.byref(handle), 1, 0) == 0
    driver.recorder_delay.argtypes = [ctypes.c_long]
    driver.recorder_delay(100_000)  # microseconds of delay for each operation
    yield torch.cuda.ExternalStream(handle.value)
    driver.recorder_delay(0)


def test_memory_is_nan_before_it_is_written():
    assert torch.empty(1 << 16, device="cuda").isnan().all()
    assert torch.empty_strided((4, 4), (1, 4), device="cuda").isnan().all()


def test_memory_that_a_stream_uses_is_freed_when_the_stream_is_through(other):
    memory = torch.ones(1 << 16, device="cuda")
    address = memory.data_ptr()
    memory.record_stream(other)
    del memory
    kept = (ctypes.c_float * (1 << 16)).from_address(address)
    assert set(kept) == {1.0}
    other.synchronize()


def test_host_and_device_do_not_mix():
    x = torch.ones(3, device="cuda")
    with pytest.raises(RuntimeError, match="same device"):
        x + torch.ones(3)
    assert (x + torch.tensor(2.0)).tolist() == [3.0] * 3
    assert x[torch.tensor([0, 2])].is_cuda


def test_a_network_has_the_gradients_of_the_cpu():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv3d(2, 3, 3), nn.BatchNorm3d(3), nn.LeakyReLU(), nn.MaxPool3d(2))
    x = torch.randn(2, 2, 6, 6, 6)
    found = []
    for device in ("cpu", "cuda"):
        network.zero_grad()
        network.to(device)(x.to(device)).square().sum().backward()
        found.append([p.grad.cpu() for p in network.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_views_share_memory_and_are_known_to_autograd():
    x = torch.zeros(4, 4, device="cuda", requires_grad=True)
    y = x * 1
    y[1:3].t().add_(1)
    assert y.sum().item() == 8
    y.square().sum().backward()
    assert torch.equal(x.grad, 2 * y)


def test_a_graph_computes_when_it_is_replayed_and_not_before(stream):
    x, total = torch.ones(2, device="cuda"), torch.zeros(2, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        total += x * 2
    assert total.tolist() == [0, 0]
    for value in (1.0, 5.0):
        x.fill_(value)
        graph.replay()
    assert total.tolist() == [12, 12]


def test_memory_that_a_graph_reads_is_not_kept_for_it(stream):
    gone, result = torch.ones(8, device="cuda"), torch.zeros(8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        own = gone + 1
        result.copy_(own)
        del own
    graph.replay()
    assert result.tolist() == [2.0] * 8
    gone.untyped_storage().resize_(0)
    del gone
    for _ in range(20):
        torch.full((8,), 7.0, device="cuda")  # reuses the memory
    graph.replay()
    assert result.tolist() != [2.0] * 8


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.sum().item(),
        lambda x: x.cpu(),
        lambda x: x.copy_(torch.ones(3)),
        lambda x: x.nonzero(),
        lambda x: torch.cuda.synchronize(),
        lambda x: torch.cuda.current_stream().synchronize(),
    ],
)
def test_a_capture_fails_where_the_host_would_wait(stream, wait):
    x = torch.ones(3, device="cuda")
    with (
        pytest.raises(RuntimeError, match="previous error during capture"),
        torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream),
        pytest.raises(RuntimeError, match="not permitted when stream is capturing"),
    ):
        wait(x)
    with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream):
        x.copy_(torch.ones(3).pin_memory(), non_blocking=True)


def test_a_capture_waits_for_nothing_from_before_it(stream):
    event = torch.cuda.Event()
    event.record()
    with (
        pytest.raises(RuntimeError, match="previous error during capture"),
        torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream),
        pytest.raises(RuntimeError, match="cuStreamWaitEvent gives 905"),
    ):
        event.wait()


def test_a_capture_waits_for_all_that_it_has_begun(stream, other):
    with torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream):
        other.wait_stream(stream)
        stream.wait_stream(other)
    with (
        pytest.raises(RuntimeError, match="unjoined"),
        torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream),
    ):
        other.wait_stream(stream)


def test_a_stream_that_waits_for_a_captured_one_is_captured(stream):
    side, apart, x = torch.cuda.Stream(), torch.cuda.Stream(), torch.ones(2, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        side.wait_stream(stream)
        with torch.cuda.stream(side):
            assert torch.cuda.is_current_stream_capturing()
            x += 1
        stream.wait_stream(side)
        with torch.cuda.stream(apart):
            assert not torch.cuda.is_current_stream_capturing()
    assert x.tolist() == [1, 1]
    graph.replay()
    assert x.tolist() == [2, 2]
    with torch.cuda.stream(side):
        assert not torch.cuda.is_current_stream_capturing()
