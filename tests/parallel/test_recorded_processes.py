"""Tests of copies into other ranks' memory and of NCCL between real processes.

The recorder replaces NCCL and the driver, whose memory other processes map.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from pydist.comm import Transport
from support.stand_ins.recorder import (
    RecordedIpc,
    RecordedTransport,
    Recorder,
    build,
    shared_memory,
)
from support.transports.checks import Check
from support.transports.contract import CHECKS
from support.transports.halos import check_halos

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
    recorder.delay(100)
    check_halos(transport)
    recorder.delay(0)
