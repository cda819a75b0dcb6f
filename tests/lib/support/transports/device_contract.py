"""Checks the contract of every transport between CUDA devices, on two ranks with devices.

Each rank has its own GPU if two exist. Else both share one: NCCL supports that from 2.30 with
NCCL_MULTI_RANK_GPU_ENABLE=1, and processes can also map each other's memory of the same device.
Without that support, messages that NCCL would carry besides these go through the host.
"""

from __future__ import annotations

import os
from typing import ClassVar

import pytest
import torch

from pydist.comm import Transport
from pydist.comm.transports.nccl.device_assignment import (
    MIN_SHARING_VERSION,
    SHARE_VARIABLE,
    missing,
    open_nccl,
)
from pydist.errors import NotSupported, UsageError
from pydist.exchange.exchanger import Exchanger
from pydist.partition import Box
from pydist.runtime import connect
from support.stand_ins.one_gpu import ranks_of_one_gpu
from support.transports.checks import Check
from support.transports.contract import CHECKS

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

EVERY_CHECK = pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)


def no_two_ranks() -> str:
    """Returns why NCCL can't connect two ranks here, as far as one process knows, or "".

    Called before the start of a job of two ranks, which takes time.
    """
    lacks = missing()
    if not lacks and torch.cuda.device_count() < 2 and open_nccl().version < MIN_SHARING_VERSION:
        lacks = f"one GPU, which NCCL {open_nccl().version} lets no two ranks share"
    return lacks


def two_ranks(lacks: str, seconds: float = 70, **kwargs: object) -> pytest.MarkDecorator:
    """Marks tests of a job of two ranks, or skips them for the reason in `lacks`.

    The time limit lets a hanging job report its state within the limit of `tools/gpu_check.sh`.
    """
    if lacks:
        return pytest.mark.skip(reason=lacks)
    return pytest.mark.ranks(2, seconds=seconds, **kwargs)


def connected(transport: str | None) -> Transport:
    """Connects the two ranks by a given or any transport; skips the test if none is possible."""
    if torch.cuda.device_count() < 2:
        os.environ[SHARE_VARIABLE] = "1"
    try:
        if no_two_ranks() and transport in (None, "ipc"):
            return ranks_of_one_gpu()
        return connect(transport or "nccl")
    except (NotSupported, UsageError) as error:  # the same on all ranks
        pytest.skip(f"'{transport or 'nccl'}' does not connect two ranks here: {error}")


class DeviceContract:
    """Tests of a subclass's transport; each subclass has its own module, and so its own job."""

    transport: ClassVar[str]

    @EVERY_CHECK
    def test_contract_on_the_device(self, check: Check, devices: Transport) -> None:
        assert devices.device is not None
        with devices.device:  # creates tensors there
            check(devices)

    @EVERY_CHECK
    def test_contract_in_host_memory(self, check: Check, devices: Transport) -> None:
        check(devices)

    @pytest.mark.parametrize("channels_last", [False, True])
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_halos_on_a_stream_of_the_caller(
        self, devices: Transport, dtype: torch.dtype, channels_last: bool
    ) -> None:
        """The packed values are late on the device, and new in each round."""
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
                torch.cuda._sleep(20_000_000)  # cycles: makes the packed values late on the device
                local = own.to(devices.device, non_blocking=True) + round_
                slots = exchanger.empty_slots(local)
                exchanger.gather(local, slots)
                expected = whole[:, :, lo:hi].to(devices.device) + round_
                assert torch.equal(slots[0], expected)


class StreamContract(DeviceContract):
    """The same contract for transports that know streams."""

    @pytest.mark.behind_the_host
    def test_started_exchanges_do_not_hold_the_host(self, devices: Transport) -> None:
        """Checks that the host finishes an exchange before the device reaches it."""
        peer = 1 - devices.rank
        sent = torch.full((1 << 20,), float(devices.rank), device=devices.device)
        received = torch.empty_like(sent)
        channel = devices.channel([(peer, sent)], [(peer, received)], 5)
        channel.start()
        channel.wait()  # connected
        devices.barrier()
        torch.cuda._sleep(1_000_000_000)  # cycles, before the sent values are ready
        before = torch.cuda.Event()
        before.record()
        channel.start()
        channel.wait()
        assert not before.query()
        assert torch.equal(received, torch.full_like(received, float(peer)))

    def test_a_step_with_an_exchange_is_captured_and_replayed(self, devices: Transport) -> None:
        """Checks that a graph holds the exchange, and sends new values in each replay."""
        peer = 1 - devices.rank
        source, sent, received, result = (
            torch.zeros(1 << 12, device=devices.device) for _ in range(4)
        )
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
