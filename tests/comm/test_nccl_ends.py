"""Tests of the end of NCCL groups with the recorder: leftovers, aborts and killed processes."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import torch

from pydist.comm import Transport, run_local
from pydist.errors import RankFailed
from support.jobs.children import child_environment
from support.stand_ins.recorder import RecordedTransport, Recorder, shared_memory

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")

RANK = """
import ctypes
import sys

class Id(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * 128)]

library, comm = ctypes.CDLL(sys.argv[1]), ctypes.c_void_p()
unique = Id.from_buffer_copy(bytes.fromhex(sys.argv[2]))
config = (ctypes.c_int * 6)(24, 0, 0xCAFEBEEF - (1 << 32), 21400, 0, 0)
print(library.ncclCommInitRankConfig(ctypes.byref(comm), 2, unique, 1, config), flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def nothing_is_left(recorder: Recorder) -> Iterator[None]:
    before = shared_memory()
    yield
    limit = time.monotonic() + 5  # streams release memory late
    while shared_memory() > before and time.monotonic() < limit:
        time.sleep(0.01)
    assert shared_memory() == before


def exchange(t: Transport) -> None:
    peer = 1 - t.rank
    channel = t.channel([(peer, torch.ones(50_000))], [(peer, torch.zeros(50_000))], 0)
    total = torch.ones(50_000)
    for _ in range(2):
        channel.start()
        t.all_reduce(total)
        channel.wait()


def test_an_end_leaves_nothing(recorder: Recorder) -> None:
    def body(host: Transport) -> None:
        t = RecordedTransport.of(recorder, host)
        exchange(t)
        assert shared_memory() > 0
        t.split(0, t.rank)
        t.close()

    run_local(body, 2)


@pytest.mark.parametrize("delay", [0, 2000])
def test_an_abort_leaves_nothing(recorder: Recorder, delay: int) -> None:
    recorder.delay(delay)  # moves the abort to another point of the exchange

    def body(host: Transport) -> None:
        t = RecordedTransport.of(recorder, host)
        host.barrier()
        if t.rank == 0:
            for group in t._place.groups:
                group.abort("", 0)
            return
        with pytest.raises(RankFailed):
            exchange(t)

    run_local(body, 2)


def test_a_process_that_is_killed_ends_the_group(recorder: Recorder) -> None:
    unique = recorder.nccl().unique_id()
    command = [sys.executable, "-c", RANK, recorder.path, unique.hex()]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=child_environment()
    ) as other:
        group = recorder.group(unique, 0, 2)  # both ranks have joined
        received = torch.zeros(3)
        ticket = group.exchange([], [(1, received.data_ptr(), 12)], 0)
        other.kill()
        assert other.stdout is not None
        assert other.stdout.read() == b"7\n"  # it was connecting
    began = time.monotonic()
    with pytest.raises(RankFailed, match=r"rank 0 of 2: .*from rank 1 12 bytes"):
        ticket.wait(0)
    assert time.monotonic() - began < 5
