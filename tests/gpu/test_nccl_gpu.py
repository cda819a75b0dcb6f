"""NCCL itself: the contract of all transports, on tensors of the ranks' devices.

One rank a GPU where there are two of them; else two ranks that share the one, which NCCL has taken
since 2.30 when NCCL_MULTI_RANK_GPU_ENABLE=1.
"""

from __future__ import annotations

import os

import pytest
import torch
from transport_contract import CHECKS, Check

from pydist.comm import Transport
from pydist.comm.exchanger import Exchanger
from pydist.comm.nccl_place import SHARE, missing
from pydist.errors import PydistError, UsageError
from pydist.partition import Box
from pydist.runtime import connect

# Only where there is something to run does a job of two ranks start.
pytestmark = [pytest.mark.skipif(missing() != "", reason=missing())]
if not missing():
    pytestmark = [pytest.mark.ranks(2)]


@pytest.fixture(scope="module")
def devices() -> Transport:
    if torch.cuda.device_count() < 2:
        os.environ[SHARE] = "1"
    try:
        return connect("nccl")
    except UsageError as error:  # the same on all ranks
        pytest.skip(f"NCCL does not connect two ranks on one GPU here: {error}")


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_contract_on_the_device(check: Check, devices: Transport) -> None:
    with devices.device:  # tensors are made there
        check(devices)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_contract_in_host_memory(check: Check, devices: Transport) -> None:
    check(devices)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("channels_last", [False, True])
def test_halos_on_a_stream_of_the_caller(devices: Transport, dtype, channels_last: bool) -> None:
    size, width = devices.size, 32
    owned = [Box((0, 0, width * r, 0, 0), (1, 3, width * (r + 1), 40, 40)) for r in range(size)]
    needed = [
        [
            Box(
                (0, 0, max(0, width * r - 2), 0, 0),
                (1, 3, min(width * size, width * r + 34), 40, 40),
            )
        ]
        for r in range(size)
    ]
    exchanger = Exchanger(devices, owned, needed, channels_last=channels_last)
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(1, 3, width * size, 40, 40, generator=generator).to(dtype)
    lo, hi = (needed[devices.rank][0].lo[2], needed[devices.rank][0].hi[2])
    own = whole[:, :, width * devices.rank : width * (devices.rank + 1)]
    stream = torch.cuda.Stream(devices.device)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for round_ in range(4):
            # Busy first, so that what is packed is late on the device.
            busy = torch.randn(2000, 2000, device=devices.device)
            for _ in range(10):
                busy = busy @ busy / 2000
            local = own.to(devices.device, non_blocking=True) + round_
            slots = exchanger.empty_slots(local)
            exchanger.gather(local, slots)
            expected = whole[:, :, lo:hi].to(devices.device) + round_
            assert torch.equal(slots[0], expected)


def test_started_exchanges_do_not_hold_the_host(devices: Transport) -> None:
    peer = 1 - devices.rank
    sent = torch.full((1 << 20,), float(devices.rank), device=devices.device)
    received = torch.empty_like(sent)
    channel = devices.channel([(peer, sent)], [(peer, received)], 5)
    channel.start()
    channel.wait()  # connected
    devices.barrier()
    torch.cuda._sleep(1_000_000_000)  # cycles, before what is sent is ready
    before = torch.cuda.Event()
    before.record()
    channel.start()
    channel.wait()
    assert not before.query()
    assert torch.equal(received, torch.full_like(received, float(peer)))


def test_a_step_with_an_exchange_is_captured_and_replayed(devices: Transport) -> None:
    peer = 1 - devices.rank
    source, sent, received, result = (torch.zeros(1 << 12, device=devices.device) for _ in range(4))
    channel = devices.channel([(peer, sent)], [(peer, received)], 6)

    def step() -> None:
        sent.copy_(source)
        channel.start()
        channel.wait()
        result.copy_(received * 2)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        step()
    for value in range(3):
        source.fill_(value + devices.rank)
        graph.replay()
        assert torch.equal(result, torch.full_like(result, 2.0 * (value + peer)))


def test_a_group_closes_when_the_graph_with_its_operations_is_gone(devices: Transport) -> None:
    """NCCL waits for that without limit; and what it carried is still freed in good order."""
    group = devices.split(0, devices.rank)
    tensor = torch.ones(1 << 10, device=devices.device)
    group.all_reduce(tensor)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        group.all_reduce(tensor)
    graph.replay()
    assert torch.equal(tensor, torch.full_like(tensor, 4.0))
    torch.cuda.synchronize()
    graph.reset()
    kept = torch.ones(1 << 10, device=devices.device)
    kept.record_stream(torch.cuda.ExternalStream(group._on_device._group.stream))
    group.close()
    del group, kept  # the allocator records an event on the stream
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def test_tensors_elsewhere_are_refused(devices: Transport) -> None:
    with pytest.raises(PydistError, match="tensor on meta"):
        devices.all_reduce(torch.empty(2, device="meta"))
    with pytest.raises(UsageError, match="host memory and on a CUDA device"):
        devices.channel([(0, torch.zeros(1))], [(0, torch.zeros(1, device=devices.device))], 7)
