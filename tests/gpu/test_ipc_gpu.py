"""Copies into the memory of other ranks' devices: the contract of all transports, on such memory.

One rank a GPU where there are two of them, else two ranks that share the one: processes map each
other's memory of the same device as well. Where NCCL takes no two ranks of a GPU, what it would
carry goes through the host.
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
from one_gpu import ranks_of_one_gpu
from transport_contract import CHECKS, Check

from pydist.comm import Transport
from pydist.comm.ipc import IpcTransport
from pydist.comm.ipc_channel import IpcChannel
from pydist.comm.nccl_place import SHARE, missing
from pydist.errors import NotSupported, UsageError
from pydist.runtime import connect

# Only where there is something to run does a job of two ranks start.
pytestmark = [pytest.mark.skipif(missing() != "", reason=missing())]
if not missing():
    pytestmark = [pytest.mark.ranks(2, seconds=70)]


@pytest.fixture(scope="module")
def devices() -> Transport:
    if torch.cuda.device_count() < 2:
        os.environ[SHARE] = "1"
    try:
        return ranks_of_one_gpu() if no_two_ranks() else connect("ipc")
    except (NotSupported, UsageError) as error:  # the same on all ranks
        pytest.skip(f"no exchange by copies here: {error}")


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_contract_on_the_device(check: Check, devices: Transport) -> None:
    with devices.device:  # tensors are made there
        check(devices)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_contract_in_host_memory(check: Check, devices: Transport) -> None:
    check(devices)


def test_the_ranks_reach_each_other(devices: IpcTransport) -> None:
    peer = 1 - devices.rank
    sent, received = (torch.zeros(4, device=devices.device) for _ in range(2))
    channel = devices.channel([(peer, sent)], [(peer, received)], 1)
    assert isinstance(channel, IpcChannel)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_halos_on_a_stream_of_the_caller(devices: Transport, dtype, channels_last: bool) -> None:
    halos_on_a_stream_of_the_caller(devices, dtype, channels_last)


def test_started_exchanges_do_not_hold_the_host(devices: Transport) -> None:
    started_exchanges_do_not_hold_the_host(devices)


def test_a_step_with_an_exchange_is_captured_and_replayed(devices: Transport) -> None:
    a_step_with_an_exchange_is_captured_and_replayed(devices)


def test_nothing_is_written_before_its_receiver_is_done(devices: Transport) -> None:
    """One rank only sends, and is far ahead of the other, which only receives."""
    buffer = torch.zeros(1 << 20, device=devices.device)
    pairs = [(1 - devices.rank, buffer)]
    sends, recvs = (pairs, []) if devices.rank == 0 else ([], pairs)
    channel = devices.channel(sends, recvs, 8)
    copies = []
    for round_ in range(8):
        if devices.rank == 0:
            buffer.fill_(round_)
        channel.start()
        channel.wait()
        if devices.rank == 1:
            torch.cuda._sleep(20_000_000)  # cycles
            copies.append(buffer.clone())
    for round_, copy in enumerate(copies):
        assert torch.equal(copy, torch.full_like(copy, float(round_)))
    devices.barrier()
