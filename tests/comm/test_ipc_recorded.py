"""Tests of exchanges by copies into other ranks' memory, with a recorder as the driver."""

from __future__ import annotations

import copy
import sys
import time

import pytest
import torch
from torch import nn

from pydist import _native as native
from pydist import distribute_tensor, parallelize
from pydist.comm import Transport, run_local
from pydist.comm.transports.ipc.channel import IpcChannel
from pydist.mesh import Mesh
from support.stand_ins.recorder import RecordedIpc, Recorder, run_ipc
from support.transports.checks import Check
from support.transports.contract import CHECKS
from support.transports.halos import check_halos

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="CUDA IPC is for Linux")

CHANNEL_CHECKS = [check for check in CHECKS if "channel" in check.__name__]


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_contract(recorder: Recorder, check: Check, size: int) -> None:
    run_ipc(recorder, check, size)


@pytest.mark.parametrize("far", [frozenset(), frozenset({1})])
@pytest.mark.parametrize("check", CHANNEL_CHECKS, ids=lambda check: check.__name__)
def test_contract_on_late_streams(recorder: Recorder, check: Check, far: frozenset[int]) -> None:
    """A missing wait would expose old values; some ranks are not reachable by copies."""
    recorder.delay(300)
    run_ipc(recorder, check, 4, far)


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

    run_ipc(recorder, body, 2)
    assert lines[0] == "record caller"
    stream = lines[1].removeprefix("wait ")
    assert lines[1:] == [
        f"wait {stream}",
        f"set 1 on {stream}",  # allows the peer to write
        f"await own 1 on {stream}",  # the peer allows this rank
        f"set own 0 on {stream}",
        *[f"copy 16 on {stream}"] * 2,
        f"set 1 on {stream}",  # tells the peer that data arrived
        f"await own 1 on {stream}",  # the peer's data arrived
        f"set own 0 on {stream}",
        *[f"copy 16 on {stream}"] * 2,
        f"record {stream}",
    ]


def test_no_host_waits_once_the_ranks_know_each_other(recorder: Recorder) -> None:
    """`start` and `wait` enqueue their calls and return, even if the peer is late."""

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

    run_ipc(recorder, body, 2)


@pytest.mark.parametrize("late", [0, 1])
def test_nothing_is_written_before_its_receiver_is_done(recorder: Recorder, late: int) -> None:
    """One rank only sends, the other only receives; either may be late."""
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
    run_ipc(recorder, body, 2)


def test_halos_come_and_go_home(recorder: Recorder) -> None:
    recorder.delay(200)
    run_ipc(recorder, check_halos, 3)


def test_a_network_has_the_bits_of_another_transport(recorder: Recorder) -> None:
    """The network exchanges faces and edges, forward and backward, and blocks complete late."""
    generator = torch.Generator().manual_seed(0)
    network = nn.Sequential(
        nn.Conv3d(2, 4, 3, padding=1),
        nn.BatchNorm3d(4),
        nn.ReLU(inplace=True),
        nn.Conv3d(4, 3, 5, padding=2, stride=2),
        nn.AvgPool3d(3, 1, 1),
    ).double()
    x = torch.randn(1, 2, 8, 10, 6, generator=generator).double()

    def steps(t: Transport) -> list[torch.Tensor]:
        mesh = Mesh(t, 1, (2, 2, 1))
        model = parallelize(copy.deepcopy(network), mesh)
        for _ in range(2):
            model.zero_grad()
            y = model(distribute_tensor(x, mesh))
            y.square().mean().backward()
        grads = [p.grad for p in model.parameters()]
        return [y.full_tensor().detach(), *(grad for grad in grads if grad is not None)]

    recorder.delay(30)
    found, expected = run_ipc(recorder, steps, 4), run_local(steps, 4)
    assert len(expected[0]) == 1 + len(list(network.parameters()))
    for ours, others in zip(found, expected, strict=True):
        for one, other in zip(ours, others, strict=True):
            assert torch.equal(one, other)


def test_groups_may_be_used_in_different_orders(recorder: Recorder) -> None:
    """The first exchange of a channel waits for its peers in `wait`, not in `start`."""

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

    run_ipc(recorder, body, 2)


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

    run_ipc(recorder, body, 2)


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
        assert recorder.blocks() == blocks  # each takes 36,000 of a block's 65,536 bytes

    run_ipc(recorder, body, 2)


def test_what_a_graph_may_replay_is_nobody_elses(recorder: Recorder) -> None:
    def body(t: RecordedIpc) -> None:
        peer, places = 1 - t.rank, []
        where = 3 * len(t._place.memory.sample())  # only this part of an offer describes memory
        for captured in (False, True, False, False):
            channel = t.channel([(peer, torch.ones(1))], [(peer, torch.zeros(1))], 0)
            assert isinstance(channel, IpcChannel)
            places.append(channel._native.offer(peer)[:where])
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

    run_ipc(recorder, body, 2)
