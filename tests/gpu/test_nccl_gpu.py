"""NCCL itself: the contract of all transports, on tensors of the ranks' devices.

One rank a GPU where there are two of them; else two ranks that share the one, which NCCL has taken
since 2.30 when NCCL_MULTI_RANK_GPU_ENABLE=1.
"""

from __future__ import annotations

import os

import pytest
import torch
from device_exchanges import (
    DTYPES,
    a_step_with_an_exchange_is_captured_and_replayed,
    halos_on_a_stream_of_the_caller,
    no_two_ranks,
    started_exchanges_do_not_hold_the_host,
)
from transport_contract import CHECKS, Check

from pydist.comm import Transport
from pydist.comm.nccl_place import SHARE
from pydist.errors import PydistError, UsageError
from pydist.runtime import connect

# Only where there is something to run does a job of two ranks start.
pytestmark = [pytest.mark.skipif(no_two_ranks() != "", reason=no_two_ranks())]
if not no_two_ranks():
    pytestmark = [pytest.mark.ranks(2, seconds=70)]


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


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_halos_on_a_stream_of_the_caller(devices: Transport, dtype, channels_last: bool) -> None:
    halos_on_a_stream_of_the_caller(devices, dtype, channels_last)


def test_started_exchanges_do_not_hold_the_host(devices: Transport) -> None:
    started_exchanges_do_not_hold_the_host(devices)


def test_a_step_with_an_exchange_is_captured_and_replayed(devices: Transport) -> None:
    a_step_with_an_exchange_is_captured_and_replayed(devices)


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
