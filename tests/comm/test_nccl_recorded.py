"""Tests of the NCCL transport with a recorder in place of NCCL and the CUDA driver."""

from __future__ import annotations

import shutil
import threading
import time
from collections import defaultdict
from pathlib import Path

import pytest
import torch

from pydist import _native as native
from pydist.comm import Channel, LocalTransport, Transport, run_local
from pydist.comm.transports.nccl.device import DeviceTransport
from pydist.errors import NotSupported, PydistError, RankFailed, RankLost, UsageError
from support.stand_ins.recorder import RecordedTransport, Recorder
from support.transports.checks import Check
from support.transports.contract import CHECKS
from support.transports.halos import check_halos


def run(recorder: Recorder, function, size: int):
    def body(host):
        transport = RecordedTransport.of(recorder, host)
        result = function(transport)
        transport.close()  # a transport that is only dropped aborts the group
        return result

    return run_local(body, size)


def repeat(channel: Channel) -> None:
    """Runs enough rounds to observe a failure in the middle of one."""
    for _ in range(3):
        channel.start()
        channel.wait()


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_contract(recorder: Recorder, check: Check, size: int) -> None:
    run(recorder, check, size)
    assert not [line for line in recorder.notes() if "mismatch" in line]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_contract_on_late_streams(recorder: Recorder, check: Check) -> None:
    """A missing wait would expose old values."""
    recorder.delay(300)
    run(recorder, check, 2)


def test_an_exchange_is_one_group_between_events(recorder: Recorder) -> None:
    def body(t: Transport) -> None:
        sent, received = torch.ones(4), torch.zeros(2, 4)
        channel = t.channel([(0, sent), (0, sent)], [(0, received[0]), (0, received[1])], 3)
        recorder.notes()
        channel.start()
        channel.wait()
        assert received.tolist() == [[1.0] * 4] * 2

    run(recorder, body, 1)
    lines = recorder.notes()
    assert lines[0] == "record caller"
    stream = lines[1].removeprefix("wait ")
    assert lines[1:10] == [
        f"wait {stream}",
        "group start",
        *[f"send 16 on {stream}"] * 2,
        *[f"recv 16 on {stream}"] * 2,
        "group end",
        "issued",  # by NCCL's thread, so that the event comes after it
        f"record {stream}",
    ]
    assert lines[10] == "wait caller"


def test_streams_have_the_greatest_priority_and_do_not_wait_for_the_default_one(
    built: Recorder, tmp_path: Path
) -> None:
    anew = Recorder(shutil.copy(built.path, tmp_path))  # has no streams yet
    run(anew, lambda t: t.split(0, t.rank), 2)
    made = [line for line in anew.notes() if line.startswith("create")]
    assert len(made) == 4  # a stream for each group of each rank
    assert all(line.endswith("flags 1 priority -5") for line in made)


def test_a_stream_outlives_its_group_and_serves_the_next(recorder: Recorder) -> None:
    """The allocator may record events on the stream long after the group ends."""

    def stream_of_a_group() -> int:
        group = recorder.group(recorder.nccl().unique_id(), 0, 1)
        group.close()
        return group.stream

    first = stream_of_a_group()
    recorder.notes()
    assert stream_of_a_group() == first
    assert not [line for line in recorder.notes() if line.startswith("create")]


def test_in_a_capture_an_operation_that_has_started_is_on_the_stream(recorder: Recorder) -> None:
    """Otherwise NCCL's thread and this thread could add to one graph concurrently."""

    def body(t: Transport) -> None:
        channel = t.channel([(0, torch.ones(4))], [(0, torch.zeros(4))], 3)
        repeat(channel)
        recorder.notes()
        recorder.capture(True)
        channel.start()
        recorder.capture(False)
        started = recorder.notes()
        assert started[-2] == "issued"
        assert started[-1].startswith("record stream")
        channel.wait()
        assert recorder.notes() == ["wait caller"]

    run(recorder, body, 1)


def test_an_operation_shows_when_it_is_complete(recorder: Recorder) -> None:
    recorder.delay(50_000)

    def body(t: Transport) -> None:
        tensor = torch.ones(3)
        work = t.all_reduce_async(tensor)
        assert not work.done()
        work.wait()
        assert work.done()
        assert tensor.tolist() == [2.0] * 3

    run(recorder, body, 2)


def test_halos_come_and_go_home(recorder: Recorder) -> None:
    recorder.delay(200)
    run(recorder, check_halos, 3)


def test_a_failure_names_rank_peer_and_bytes_and_ends_the_group(recorder: Recorder) -> None:
    def body(t: Transport) -> None:
        peer = 1 - t.rank
        channel = t.channel([(peer, torch.ones(6))], [(peer, torch.zeros(6))], 0)
        t.host.barrier()  # both are connected
        if t.rank == 1:
            t.host.barrier()
            with pytest.raises(RankFailed, match="rank 1 of 2: "):
                repeat(channel)
            return
        recorder.fail_next_send(5, "this is wrong\nfor two lines")
        with pytest.raises(UsageError) as caught:
            channel.start()
        t.host.barrier()
        assert str(caught.value) == (
            "NCCL 2.32.3: rank 0 of 2: exchange (to rank 1 24 bytes; from rank 1 24 bytes):"
            " invalid usage (this is wrong for two lines)"
        )
        with pytest.raises(RankFailed, match="the group was ended before"):
            channel.start()

    run(recorder, body, 2)


@pytest.mark.parametrize(("result", "error"), [(6, RankFailed), (2, RankFailed), (1, PydistError)])
def test_errors_are_of_the_class_of_whose_fault_they_are(
    recorder: Recorder, result: int, error: type[Exception]
) -> None:
    group = recorder.group(recorder.nccl().unique_id(), 0, 1)
    recorder.fail_next_send(result, "")
    buffer = torch.zeros(2)
    with pytest.raises(PydistError) as caught:
        group.exchange([(0, buffer.data_ptr(), 8)], [], 0)
    assert type(caught.value) is error
    assert recorder.notes().count("abort") == 1


def test_an_abort_that_does_not_return_is_left_alone(recorder: Recorder) -> None:
    """NCCL's abort waits for graphs that hold operations of the group."""
    group = recorder.group(recorder.nccl().unique_id(), 0, 1)
    recorder.fail_next_send(5, "")
    recorder.abort_takes(seconds=6)
    buffer = torch.zeros(2)
    began = time.monotonic()
    with pytest.raises(UsageError, match="invalid usage"):
        group.exchange([(0, buffer.data_ptr(), 8)], [], 0)
    assert time.monotonic() - began < 5
    stuck = group.stream
    del group
    assert recorder.group(recorder.nccl().unique_id(), 0, 1).stream != stuck, "nobody's after it"


def test_a_graph_that_was_not_reset_is_waited_for_with_a_limit(recorder: Recorder) -> None:
    """NCCL releases a group only when no graph holds its operations, here a user's graph."""
    group = recorder.group(recorder.nccl().unique_id(), 0, 1, seconds=1.0)
    recorder.hold_graphs(True)
    with pytest.raises(RankLost) as caught:
        group.close()
    assert str(caught.value) == (
        "NCCL 2.32.3: rank 0 of 1: closing: not all ranks have reached it, or a CUDA graph that"
        " holds operations of the group was not reset, within 1 s"
    )
    group.close()


def test_a_peer_that_there_is_not_leaves_no_group_of_calls_open(recorder: Recorder) -> None:
    group = recorder.group(recorder.nccl().unique_id(), 0, 1)
    sent, received = torch.ones(2), torch.zeros(2)
    for peer in (1, -1):
        recorder.notes()
        with pytest.raises(UsageError, match=f"rank {peer} is none of 1"):
            group.exchange([(0, sent.data_ptr(), 8)], [(peer, received.data_ptr(), 8)], 0)
        assert recorder.notes() == []
    group.exchange([(0, sent.data_ptr(), 8)], [(0, received.data_ptr(), 8)], 0).wait(0)
    assert torch.equal(received, sent)
    group.close()


def test_what_was_split_off_is_closed_with_the_world_the_last_first(
    recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = defaultdict(list)
    close = DeviceTransport.close

    def watch(self: DeviceTransport) -> None:
        closed[threading.get_ident()].append(self)
        close(self)

    monkeypatch.setattr(DeviceTransport, "close", watch)

    def body(host: LocalTransport) -> None:
        world = RecordedTransport.of(recorder, host)
        parts = [world.split(0, world.rank), world.split(world.rank, 0), world.split(0, 0)]
        made = list(world._place.groups)
        gone = made.pop(1)
        parts[0].close()
        world.close()
        assert closed[threading.get_ident()] == [gone, *reversed(made)]
        for each in (*parts, world):
            each.close()  # further calls do nothing
        assert len(closed[threading.get_ident()]) == len(made) + 1 > 2

    run_local(body, 2)
    assert "abort" not in recorder.notes()


@pytest.mark.parametrize("closes", ["the world", "a group"])
def test_a_graph_that_is_still_there_is_reset_before_a_group_closes(
    recorder: Recorder, closes: str
) -> None:
    """NCCL would wait for the graph without limit; a deleted graph needs no reset."""
    happened = []

    class Graph:
        def reset(self) -> None:
            happened.append(recorder.notes().count("destroy"))

    world = RecordedTransport.of(recorder, LocalTransport())
    group = world.split(0, 0)
    kept, dropped = Graph(), Graph()
    for each in (world, group):
        each.captured_in(kept)
        each.captured_in(dropped)
        repeat(each.channel([(0, torch.ones(4))], [(0, torch.zeros(4))], 3))
    del dropped
    recorder.notes()
    (world if closes == "the world" else group).close()
    assert happened == [0], "once, and before"
    assert "destroy" in recorder.notes()
    world.close()
    assert happened == [0]
    del kept


def test_works_of_a_capture_that_failed_are_let_go(recorder: Recorder) -> None:
    world = RecordedTransport.of(recorder, LocalTransport())
    tensor = torch.ones(3)
    work = world._on_device._all_reduce_async(tensor, "sum")
    assert world._made._under_way
    world.forget_capture()
    assert not world._made._under_way
    work.wait()  # the recorder, unlike a failed capture, still writes to the tensor
    world.close()


def test_ranks_that_do_not_come_are_waited_for_with_a_limit(recorder: Recorder) -> None:
    with pytest.raises(RankLost, match="rank 0 of 3: connecting 3 ranks on CUDA device 0: not all"):
        recorder.group(recorder.nccl().unique_id(), 0, 3, seconds=0.05)
    assert "abort" in recorder.notes()


def test_other_byte_counts_are_refused_by_the_recorder(recorder: Recorder) -> None:
    """The tests of the contract rely on this."""

    def body(t: Transport) -> None:
        peer = 1 - t.rank
        channel = t.channel([(peer, torch.ones(3))], [(peer, torch.zeros(3 + t.rank))], 0)
        with pytest.raises(PydistError):
            repeat(channel)

    run(recorder, body, 2)
    assert any("mismatch: 12 bytes sent, 16 expected" in line for line in recorder.notes())


def test_groups_may_be_used_in_different_orders(recorder: Recorder) -> None:
    """A rank without work starts its buckets in another order relative to halos."""

    def body(t: Transport) -> None:
        buckets = t.split(0, t.rank)
        peer = 1 - t.rank
        sent, received, gradient = torch.ones(2) * t.rank, torch.zeros(2), torch.ones(3)
        channel = t.channel([(peer, sent)], [(peer, received)], 0)
        if t.rank == 0:
            work = buckets.all_reduce_async(gradient)
            channel.start()
            channel.wait()
        else:
            channel.start()
            channel.wait()
            work = buckets.all_reduce_async(gradient)
        work.wait()
        assert received.tolist() == [float(peer)] * 2
        assert gradient.tolist() == [2.0] * 3
        buckets.close()

    run(recorder, body, 2)


def test_exchanges_in_different_orders_are_found(recorder: Recorder) -> None:
    """NCCL confuses messages of equal size without an error."""

    def body(t: Transport) -> None:
        peer = 1 - t.rank
        received = [torch.zeros(2), torch.zeros(2)]
        channels = [
            t.channel([(peer, torch.full((2,), float(tag)))], [(peer, received[tag])], tag)
            for tag in range(2)
        ]
        for each in channels:
            each.start()
            each.wait()
        t.barrier()
        for each in channels if t.rank else reversed(channels):
            each.start()
            each.wait()
        assert received[0].tolist() == [1.0, 1.0]
        with pytest.raises(PydistError, match=f"ranks {peer} and {t.rank} have started"):
            t.barrier()

    run(recorder, body, 2)


def test_a_rank_that_aborts_ends_the_others(recorder: Recorder) -> None:
    def body(t: Transport) -> None:
        t.host.barrier()  # both are connected
        if t.rank == 0:
            for group in t._place.groups:
                group.abort("", 0)
            return
        channel = t.channel([], [(0, torch.zeros(2))], 0)
        with pytest.raises(RankFailed):
            repeat(channel)

    run(recorder, body, 2)


def test_an_old_library_and_a_missing_device_are_named(recorder: Recorder) -> None:
    recorder.version(21306)
    with pytest.raises(NotSupported, match=r"NCCL 2\.13\.6 \(.*\) is too old: .* 2\.14\.0 or"):
        recorder.nccl()
    recorder.version(23203)
    with pytest.raises(PydistError, match="cuDeviceGet failed: CUDA_ERROR_RECORDED"):
        native.NcclCommunicator(recorder.nccl(), recorder.driver, bytes(128), 0, 1, 7, 1.0, 1.0)
