"""Tests of copies into other ranks' memory and of NCCL between real processes.

The recorder replaces NCCL and the driver, whose memory other processes map.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from pydist.comm import Transport
from pydist.exchange.exchanger import Exchanger
from pydist.partition import Box
from support.stand_ins.recorder import (
    RecordedIpc,
    RecordedTransport,
    Recorder,
    build,
    shared_memory,
)
from support.transports.checks import Check
from support.transports.contract import CHECKS

CHANNEL_CHECKS = [check for check in CHECKS if "channel" in check.__name__]

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="the recorder's processes need Linux")
]
if sys.platform == "linux":
    pytestmark = [pytest.mark.ranks(2, mpi="openmpi")]


@pytest.fixture(scope="module")
def library(world: Transport) -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="recorder") as folder:
        built = str(build(Path(folder))).encode() if world.rank == 0 else None
        yield world.broadcast_bytes(built).decode()
        world.barrier()


@pytest.fixture(scope="module")
def recorder(library: str) -> Recorder:
    return Recorder(Path(library))


@pytest.fixture(scope="module")
def transport(recorder: Recorder, world: Transport) -> Iterator[RecordedIpc]:
    made = RecordedIpc.among_processes(recorder, world.split(0, world.rank))
    assert made._near == set(range(world.size)) - {world.rank}
    yield made
    made.close()
    assert recorder.blocks() == 0
    assert not [line for line in recorder.notes() if "mismatch" in line]


@pytest.fixture(scope="module")
def nccl(recorder: Recorder, world: Transport) -> Iterator[RecordedTransport]:
    before = shared_memory()
    made = RecordedTransport.of(recorder, world.split(0, world.rank))
    yield made
    made.close()
    made.host.close()
    assert shared_memory() == before
    assert not [line for line in recorder.notes() if "mismatch" in line]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_contract(transport: RecordedIpc, check: Check) -> None:
    check(transport)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_contract_of_nccl(nccl: RecordedTransport, check: Check) -> None:
    check(nccl)


@pytest.mark.parametrize("check", CHANNEL_CHECKS, ids=lambda check: check.__name__)
def test_contract_on_late_streams(
    recorder: Recorder, transport: RecordedIpc, nccl: RecordedTransport, check: Check
) -> None:
    recorder.delay(200)
    check(transport)
    check(nccl)
    recorder.delay(0)


def test_halos_come_and_go_home(recorder: Recorder, transport: RecordedIpc) -> None:
    t, size = transport, transport.size
    owned = [Box((0, 0, 40 * r, 0), (1, 2, 40 * r + 40, 50)) for r in range(size)]
    needed = [
        [Box((0, 0, max(0, 40 * r - 3), 0), (1, 2, min(40 * size, 40 * r + 43), 50))]
        for r in range(size)
    ]
    whole = torch.randn(1, 2, 40 * size, 50, generator=torch.Generator().manual_seed(0))
    exchanger, own = Exchanger(t, owned, needed), slice(40 * t.rank, 40 * t.rank + 40)
    lo, hi = needed[t.rank][0].lo[2], needed[t.rank][0].hi[2]
    recorder.delay(100)
    for round_ in range(5):
        local = (whole + round_)[:, :, own].contiguous()
        slots = exchanger.empty_slots(local)
        exchanger.gather(local, slots)
        assert torch.equal(slots[0], (whole + round_)[:, :, lo:hi])
        back = torch.zeros_like(local)
        exchanger.add_back(slots, back)
        times = torch.ones(40)
        times[:3] += t.rank > 0
        times[-3:] += t.rank < size - 1
        assert torch.equal(back, local * times[:, None])
    recorder.delay(0)
