"""Tests of CUDA IPC against the recorder: which ranks are reachable, and failures."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from pydist.comm import Transport, run_local
from pydist.comm.transports.ipc.peer_memory import MappedPeers, find_peers, reachable
from pydist.errors import DataError, NotSupported, PydistError, RankFailed, RankLost, UsageError
from support.jobs.children import child_environment
from support.stand_ins.recorder import RecordedIpc, Recorder

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="CUDA IPC is for Linux")

START = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
from support.stand_ins.recorder import RecordedIpc, Recorder
from pydist.errors import DataError
from pydist.runtime import connect

t = RecordedIpc.among_processes(Recorder(sys.argv[2]), connect())

def channel_of(tag):
    return t.channel([(1 - t.rank, torch.ones(3))], [(1 - t.rank, torch.zeros(3))], tag)
"""
FAILS = """
channel = channel_of(5)
for round_ in range(4):
    if round_ == 2 and t.rank == 1:
        raise DataError("this file is torn")
    channel.start()
    channel.wait()
"""


PARTS = """
channels = [channel_of(tag) for tag in (5, 6)]
for round_ in range(4):
    for channel in reversed(channels) if t.rank == 1 and round_ == 2 else channels:
        channel.start()
    for channel in channels:
        channel.wait()
t.close()  # waits for the device
"""


def run_job(recorder: Recorder, folder: Path, script: str) -> subprocess.CompletedProcess[str]:
    """Runs a script in two processes."""
    (folder / "job.py").write_text(START + script)
    support = Path(__file__).parents[1] / "lib"
    return subprocess.run(
        [
            *(sys.executable, "-m", "pydist.launch", "2", "gloo"),
            *(str(folder / "job.py"), str(support), recorder.path),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=child_environment(),
        cwd=folder,
    )


def test_a_failure_names_the_exchange_and_ends_the_group(recorder: Recorder) -> None:
    def body(t: Transport) -> None:
        channel = t.channel([(t.rank, torch.ones(6))], [(t.rank, torch.zeros(6))], 0)
        recorder.fail_next_copy(700)
        with pytest.raises(PydistError) as caught:
            channel.start()
        assert str(caught.value) == (
            "CUDA IPC: rank 0 of 1: exchange (to rank 0 24 bytes; from rank 0 24 bytes):"
            " cuMemcpyAsync failed: CUDA_ERROR_RECORDED"
        )
        with pytest.raises(RankFailed, match="the group was ended before"):
            channel.start()

    run_local(lambda host: body(RecordedIpc.among_threads(recorder, host)), 1)


def test_memory_that_cant_be_mapped_is_named(recorder: Recorder) -> None:
    def body(t: Transport) -> None:
        channel = t.channel([(1 - t.rank, torch.ones(6))], [(1 - t.rank, torch.zeros(6))], 0)
        if t.rank == 1:
            t.barrier()
            return
        recorder.fail_next_map(205)
        channel.start()
        with pytest.raises(PydistError) as caught:
            channel.wait()
        assert str(caught.value) == (
            "CUDA IPC: rank 0 can't map the memory of rank 1: cuIpcOpenMemHandle failed:"
            " CUDA_ERROR_RECORDED"
        )
        t.barrier()

    run_local(lambda host: body(RecordedIpc.among_threads(recorder, host)), 2)


def test_other_byte_counts_are_refused(recorder: Recorder) -> None:
    def body(t: Transport) -> None:
        channel = t.channel(
            [(1 - t.rank, torch.ones(3))], [(1 - t.rank, torch.ones(3 + t.rank))], 0
        )
        channel.start()
        with pytest.raises(UsageError) as caught:
            channel.wait()
        assert str(caught.value) == (
            "rank 0 sends 12 bytes in 1 messages where rank 1 expects 16 bytes in 1 messages"
        )
        t.barrier()

    run_local(lambda host: body(RecordedIpc.among_threads(recorder, host)), 2)
    with pytest.raises(UsageError, match="sends itself 4 bytes and expects 8"):
        run_local(
            lambda host: RecordedIpc.among_threads(recorder, host).channel(
                [(0, torch.ones(1))], [(0, torch.ones(2))], 0
            ),
            1,
        )


def test_a_peer_that_does_not_come_is_waited_for_with_a_limit(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RecordedIpc, "seconds", 0.05)

    def body(t: Transport) -> None:
        if t.rank == 1:
            t.barrier()
            return
        channel = t.channel([], [(1, torch.zeros(2))], 0)
        channel.start()
        with pytest.raises(RankLost, match=r"rank 0 of 2: rank 1 has not reached an exchange"):
            channel.wait()
        t.barrier()

    run_local(lambda host: body(RecordedIpc.among_threads(recorder, host)), 2)


def test_a_device_that_never_rests_is_waited_for_with_a_limit(recorder: Recorder) -> None:
    def body(t: RecordedIpc) -> None:
        channel = t.channel([(0, torch.ones(2))], [(0, torch.zeros(2))], 0)
        recorder.delay(300_000)
        channel.start()
        with pytest.raises(RankLost, match=r"the end of all exchanges: another rank has not"):
            t._links.group.rest(0.01)
        recorder.delay(0)
        channel.wait()

    run_local(lambda host: body(RecordedIpc.among_threads(recorder, host)), 1)


def test_ranks_of_one_process_do_not_map_each_other(recorder: Recorder) -> None:
    def body(host: Transport) -> None:
        with pytest.raises(NotSupported, match=r"'ipc' needs ranks that map .* processes of one"):
            find_peers(host, recorder.driver, 0, 1 << 16)

    before = recorder.blocks()
    run_local(body, 2)
    assert recorder.blocks() == before
    (alone,) = run_local(lambda host: find_peers(host, recorder.driver, 0, 1 << 16), 1)
    assert not alone.near
    alone.memory.release()


def test_a_rank_that_cant_share_memory_is_named_on_all(recorder: Recorder) -> None:
    def body(host: Transport) -> None:
        device = 7 * host.rank  # the recorder has one device
        with pytest.raises(NotSupported, match=r"rank 1 on .*: cuDeviceGet failed: .*; use 'nccl'"):
            find_peers(host, recorder.driver, device, 1 << 16)

    run_local(body, 2)


def test_ranks_reach_whom_they_map_and_who_maps_them() -> None:
    tried = [
        MappedPeers("a", [1, 2]),
        MappedPeers("a", [0]),
        MappedPeers("a", [], "the memory of rank 0: so"),
        MappedPeers("b", []),
    ]
    assert [reachable(tried, rank) for rank in range(4)] == [{1}, {0}, set(), set()]
    with pytest.raises(NotSupported) as caught:
        reachable(
            [MappedPeers("a", [1]), MappedPeers("a", [], "the memory of rank 0: cuX failed: Y")], 0
        )
    assert str(caught.value) == (
        "transport 'ipc' needs ranks that map the memory of each other's devices: rank 1 on a: the"
        " memory of rank 0: cuX failed: Y; use 'nccl'"
    )


def test_a_rank_that_fails_in_the_midst_ends_all(recorder: Recorder, tmp_path: Path) -> None:
    """The other rank's device waits for it, and that rank's host for the device."""
    began = time.monotonic()
    result = run_job(recorder, tmp_path, FAILS)
    assert result.returncode == DataError.exit_code
    assert result.stderr.splitlines() == ["rank 1: error: this file is torn"]
    assert time.monotonic() - began < 40


def test_ranks_that_start_exchanges_in_different_orders_are_told(
    recorder: Recorder, tmp_path: Path
) -> None:
    """Their devices wait for each other; the host of the later rank detects it."""
    began = time.monotonic()
    result = run_job(recorder, tmp_path, PARTS)
    assert result.returncode == UsageError.exit_code
    assert set(result.stderr.splitlines()) <= {
        f"rank {rank}: error: CUDA IPC: rank {rank} of 2: exchange (to rank {1 - rank} 12 bytes;"
        f" from rank {1 - rank} 12 bytes): rank {1 - rank} has started another exchange with this"
        " rank in its place; all ranks start their exchanges in one order"
        for rank in range(2)
    }
    assert time.monotonic() - began < 40
