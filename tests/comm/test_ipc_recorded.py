"""Exchanges by copies into other ranks' memory, against a recorder in the place of the driver."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from children import child_environment
from recorder import RecordedIpc, Recorder
from transport_contract import CHECKS, Check

from pydist import _native as native
from pydist.comm import Transport, run_local
from pydist.comm.exchanger import Exchanger
from pydist.comm.ipc_channel import IpcChannel
from pydist.comm.ipc_place import Tried, agree, reachable
from pydist.errors import DataError, NotSupported, PydistError, RankFailed, RankLost, UsageError
from pydist.partition import Box

JOB = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
from recorder import RecordedIpc, Recorder
from pydist.errors import DataError
from pydist.runtime import connect

t = RecordedIpc.among_processes(Recorder(sys.argv[2]), connect())
channel = t.channel([(1 - t.rank, torch.ones(3))], [(1 - t.rank, torch.zeros(3))], 5)
for round_ in range(4):
    if round_ == 2 and t.rank == 1:
        raise DataError("this file is torn")
    channel.start()
    channel.wait()
"""

CHANNEL_CHECKS = [check for check in CHECKS if "channel" in check.__name__]


@pytest.fixture
def recorder(built: Recorder) -> Iterator[Recorder]:
    built.notes()
    yield built
    built.delay(0)
    built.capture(False)
    assert not [line for line in built.notes() if "mismatch" in line]


def run(recorder: Recorder, function, size: int, far: frozenset[int] = frozenset()):
    def body(host):
        transport = RecordedIpc.among_threads(recorder, host, far)
        result = function(transport)
        transport.close()
        transport.close()
        return result

    before = recorder.blocks()
    results = run_local(body, size)
    assert recorder.blocks() == before
    return results


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_contract(recorder: Recorder, check: Check, size: int) -> None:
    run(recorder, check, size)


@pytest.mark.parametrize("far", [frozenset(), frozenset({1})])
@pytest.mark.parametrize("check", CHANNEL_CHECKS, ids=lambda check: check.__name__)
def test_contract_on_late_streams(recorder: Recorder, check: Check, far: frozenset[int]) -> None:
    """A wait that is missing would see what was there before; some ranks are not to be reached."""
    recorder.delay(300)
    run(recorder, check, 4, far)


def test_an_exchange_is_put_on_the_stream_in_this_order(recorder: Recorder) -> None:
    lines: list[str] = []

    def body(t: Transport) -> None:
        peer = 1 - t.rank
        sent, received = torch.full((4,), float(t.rank)), torch.zeros(2, 4)
        channel = t.channel([(peer, sent), (peer, sent)], [(peer, each) for each in received], 3)
        channel.start()
        channel.wait()
        t.barrier()
        if t.rank == 0:
            recorder.notes()
            channel.start()
            lines.extend(recorder.notes().copy())
        t.barrier()
        if t.rank == 1:
            channel.start()
        channel.wait()
        assert received.tolist() == [[float(peer)] * 4] * 2

    run(recorder, body, 2)
    assert lines[0] == "record caller"
    stream = lines[1].removeprefix("wait ")
    assert lines[1:] == [
        f"wait {stream}",
        f"set 1 on {stream}",  # the peer may write
        f"await own 1 on {stream}",  # so may this rank
        f"set own 0 on {stream}",
        *[f"copy 16 on {stream}"] * 2,
        f"set 1 on {stream}",  # it has
        f"await own 1 on {stream}",  # so has the peer
        f"set own 0 on {stream}",
        *[f"copy 16 on {stream}"] * 2,
        f"record {stream}",
    ]


def test_no_host_waits_once_the_ranks_know_each_other(recorder: Recorder) -> None:
    """Also for a peer that is late: `start` and `wait` put their calls on streams, and return."""

    def body(t: RecordedIpc) -> None:
        peer = 1 - t.rank
        sent, received = torch.full((4,), 1.0 + t.rank), torch.zeros(4)
        channel = t.channel([(peer, sent)], [(peer, received)], 3)
        assert isinstance(channel, IpcChannel)
        channel.start()
        channel.wait()
        received.zero_()
        t.barrier()
        if t.rank == 0:
            caller = native.IpcGroup(t._place.memory, 0, 1)  # for its stream
            for _ in range(3):
                channel._native.start(caller.stream)
                channel._native.issue()
                channel._native.wait(caller.stream)
            assert received.tolist() == [0.0] * 4
            t.barrier()
            caller.rest(20)
        else:
            t.barrier()
            for _ in range(3):
                channel.start()
                channel.wait()
        assert received.tolist() == [1.0 + peer] * 4

    run(recorder, body, 2)


@pytest.mark.parametrize("late", [0, 1])
def test_nothing_is_written_before_its_receiver_is_done(recorder: Recorder, late: int) -> None:
    """One rank only sends, the other only receives; either may be far behind."""
    rounds, count = 6, 3000

    def body(t: Transport) -> None:
        buffer = torch.zeros(count)
        pairs = [(1 - t.rank, buffer)]
        channel = t.channel(pairs, [], 3) if t.rank == 0 else t.channel([], pairs, 3)
        for round_ in range(rounds):
            if t.rank == late:
                time.sleep(0.003)
            if t.rank == 0:
                buffer.fill_(round_)
            channel.start()
            channel.wait()
            if t.rank == 1:
                assert buffer.tolist() == [float(round_)] * count

    recorder.delay(100)
    run(recorder, body, 2)


def test_halos_come_and_go_home(recorder: Recorder) -> None:
    """The exchanger's buffers serve again, in both directions."""
    size = 3
    owned = [Box((0, 0, 4 * rank), (1, 2, 4 * rank + 4)) for rank in range(size)]
    needed = [
        [Box((0, 0, max(0, 4 * rank - 1)), (1, 2, min(12, 4 * rank + 5)))] for rank in range(size)
    ]
    whole = torch.arange(24.0).reshape(1, 2, 12)
    recorder.delay(200)

    def body(t: Transport) -> None:
        exchanger = Exchanger(t, owned, needed)
        box, mine = needed[t.rank][0], owned[t.rank]
        for round_ in range(3):
            local = (whole + 100 * round_)[..., mine.lo[2] : mine.hi[2]].contiguous()
            slots = exchanger.empty_slots(local)
            exchanger.gather(local, slots)
            assert torch.equal(slots[0], whole[..., box.lo[2] : box.hi[2]] + 100 * round_)
            back = torch.zeros_like(local)
            exchanger.add_back(slots, back)
            times = torch.tensor([1.0 + (t.rank > 0), 1, 1, 1.0 + (t.rank < size - 1)])
            assert torch.equal(back, local * times)

    run(recorder, body, size)


def test_groups_may_be_used_in_different_orders(recorder: Recorder) -> None:
    """The first exchange of a channel waits for its peers where it is awaited, not at its start."""

    def body(t: Transport) -> None:
        other, peer = t.split(0, t.rank), 1 - t.rank
        received = torch.zeros(2, 1)
        channels = [
            group.channel([(peer, torch.full((1,), 10.0 * i + t.rank))], [(peer, received[i])], 0)
            for i, group in enumerate((t, other))
        ]
        for _ in range(2):
            first, second = channels if t.rank == 0 else reversed(channels)
            first.start()
            second.start()
            second.wait()
            first.wait()
            assert received.flatten().tolist() == [peer, 10.0 + peer]
        other.close()

    run(recorder, body, 2)


def test_an_exchange_that_waits_for_its_peers_is_not_overtaken(recorder: Recorder) -> None:
    def body(t: Transport) -> None:
        peer, received = 1 - t.rank, torch.zeros(3, 1)
        known, first, second = (
            t.channel([(peer, torch.full((1,), 10.0 * i + t.rank))], [(peer, received[i])], i)
            for i in range(3)
        )
        known.start()
        known.wait()
        received.zero_()
        for channel in (first, known, second):
            channel.start()
        for channel in (known, second, first) if t.rank else (first, second, known):
            channel.wait()
        assert received.flatten().tolist() == [peer, 10.0 + peer, 20.0 + peer]

    run(recorder, body, 2)


def test_memory_of_channels_that_are_gone_serves_again(recorder: Recorder) -> None:
    recorder.delay(50)

    def body(t: Transport) -> None:
        peer, blocks = 1 - t.rank, 0
        for number in range(12):
            sent, received = torch.full((9000,), float(number)), torch.zeros(9000)
            channel = t.channel([(peer, sent)], [(peer, received)], number)
            channel.start()
            channel.wait()
            assert received[0] == received[-1] == number
            del channel
            t.barrier()
            if number == 3:
                blocks = recorder.blocks()
            t.barrier()
        assert recorder.blocks() == blocks  # 36,000 of 65,536 bytes each: one a block

    run(recorder, body, 2)


def test_what_a_graph_may_replay_is_nobody_elses(recorder: Recorder) -> None:
    def body(t: RecordedIpc) -> None:
        peer, places = 1 - t.rank, []
        for captured in (False, True, False, False):
            channel = t.channel([(peer, torch.ones(1))], [(peer, torch.zeros(1))], 0)
            assert isinstance(channel, IpcChannel)
            places.append(channel._native.offer(peer))
            t.barrier()
            recorder.capture(captured)  # of both ranks
            t.barrier()
            channel.start()
            channel.wait()
            t.barrier()
            if t.rank == 0:
                recorder.capture(False)
            t.barrier()
            del channel
        assert places[1] == places[0]
        assert places[2] not in places[:2]
        assert places[3] == places[2]

    run(recorder, body, 2)


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
        with pytest.raises(RankLost, match=r"rank 0 of 2: rank 1 has not come to an exchange"):
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
            agree(host, recorder.driver, 0, 1 << 16)

    before = recorder.blocks()
    run_local(body, 2)
    assert recorder.blocks() == before
    (alone,) = run_local(lambda host: agree(host, recorder.driver, 0, 1 << 16), 1)
    assert not alone.near
    alone.memory.release()


def test_a_rank_that_cant_share_memory_is_named_on_all(recorder: Recorder) -> None:
    def body(host: Transport) -> None:
        device = 7 * host.rank  # there is but one
        with pytest.raises(NotSupported, match=r"rank 1 on .*: cuDeviceGet failed: .*; use 'nccl'"):
            agree(host, recorder.driver, device, 1 << 16)

    run_local(body, 2)


def test_ranks_reach_whom_they_map_and_who_maps_them() -> None:
    tried = [
        Tried("a", [1, 2]),
        Tried("a", [0]),
        Tried("a", [], "the memory of rank 0: so"),
        Tried("b", []),
    ]
    assert [reachable(tried, rank) for rank in range(4)] == [{1}, {0}, set(), set()]
    with pytest.raises(NotSupported) as caught:
        reachable([Tried("a", [1]), Tried("a", [], "the memory of rank 0: cuX failed: Y")], 0)
    assert str(caught.value) == (
        "transport 'ipc' needs ranks that map the memory of each other's devices: rank 1 on a: the"
        " memory of rank 0: cuX failed: Y; use 'nccl'"
    )


@pytest.mark.skipif(sys.platform != "linux", reason="processes share the recorder's memory there")
def test_a_rank_that_fails_in_the_midst_ends_all(recorder: Recorder, tmp_path: Path) -> None:
    """The other one's device waits for it, and its host for the device."""
    script = tmp_path / "job.py"
    script.write_text(JOB)
    support = Path(__file__).parents[1] / "support"
    arguments = [str(script), str(support), recorder.path]
    began = time.monotonic()
    result = subprocess.run(
        [sys.executable, "-m", "pydist.launch", "2", "gloo", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=child_environment(),
        cwd=tmp_path,
    )
    assert result.returncode == DataError.exit_code
    assert result.stderr.splitlines() == ["rank 1: error: this file is torn"]
    assert time.monotonic() - began < 40
