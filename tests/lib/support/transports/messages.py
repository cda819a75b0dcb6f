"""Checks messages between two ranks: order, strides, buffers and channels."""

from __future__ import annotations

import torch

from pydist.comm import Transport
from support.transports.checks import DTYPES, Checks, equal, numbers

CHECKS = Checks()


@CHECKS.add
def send_and_recv_every_dtype_and_shape(t: Transport) -> None:
    after, before = (t.rank + 1) % t.size, (t.rank - 1) % t.size
    for dtype in DTYPES:
        for shape in ((), (0,), (5,), (2, 0, 3), (2, 3, 4)):
            t.send(numbers(t.rank, dtype, *shape), after)
            received = torch.empty(shape, dtype=dtype)
            t.recv(received, before)
            equal(received, numbers(before, dtype, *shape))


@CHECKS.add
def sends_are_buffered(t: Transport) -> None:
    after, before = (t.rank + 1) % t.size, (t.rank - 1) % t.size
    big = torch.full((1 << 20,), float(t.rank))
    for _ in range(2):
        t.send(big, after, tag=3)  # every rank sends before any receives
        big += t.size
    received = torch.empty_like(big)
    for round_ in range(2):
        t.recv(received, before, tag=3)
        equal(received, torch.full_like(received, before + round_ * t.size))


@CHECKS.add
def sends_take_any_strides(t: Transport) -> None:
    after, before = (t.rank + 1) % t.size, (t.rank - 1) % t.size
    parts = [lambda x: x[:, 1:2], lambda x: x.permute(2, 0, 1), lambda x: x[:, :, ::2]]
    for part in parts:
        values = numbers(t.rank, torch.float32, 2, 3, 4)
        t.send(part(values), after)
        values.zero_()
        expected = part(numbers(before, torch.float32, 2, 3, 4))
        received = torch.empty(expected.shape)
        t.recv(received, before)
        equal(received, expected)


@CHECKS.add
def lent_tensors_arrive_after_the_sender_has_forgotten_them(t: Transport) -> None:
    after, before = (t.rank + 1) % t.size, (t.rank - 1) % t.size
    parts = [lambda x: x, lambda x: x.permute(2, 0, 1), lambda x: x[:, :, ::2], lambda x: x[:0]]
    for part in parts:
        lent = numbers(t.rank, torch.float32, 64, 64, 64)
        t.send(part(lent), after, lender=lent)
        del lent
        received = torch.empty(part(torch.empty(64, 64, 64)).shape)
        t.recv(received, before)
        equal(received, part(numbers(before, torch.float32, 64, 64, 64)))


@CHECKS.add
def messages_keep_their_order_and_tags_apart(t: Transport) -> None:
    after, before = (t.rank + 1) % t.size, (t.rank - 1) % t.size
    for number in range(3):
        for tag in (0, 32767):
            t.send(torch.tensor([t.rank, tag, number]), after, tag)
    for tag in (32767, 0):  # not in the order of sending
        for number in range(3):
            received = torch.empty(3, dtype=torch.int64)
            t.recv(received, before, tag)
            assert received.tolist() == [before, tag, number]


@CHECKS.add
def a_rank_can_send_to_itself(t: Transport) -> None:
    for number in range(2):
        t.send(torch.tensor([t.rank, number]), t.rank, tag=9)
    for number in range(2):
        received = torch.empty(2, dtype=torch.int64)
        t.recv(received, t.rank, tag=9)
        assert received.tolist() == [t.rank, number]


@CHECKS.add
def a_channel_repeats_with_new_contents(t: Transport) -> None:
    peers = range(t.size)  # including this rank
    sends = [(peer, torch.empty(2 + peer, 2)) for peer in peers]
    sends += [(peer, torch.empty(1)) for peer in peers]  # a second message to the same peer
    recvs = [(peer, torch.empty(2 + t.rank, 2)) for peer in peers]
    recvs += [(peer, torch.empty(1)) for peer in peers]
    channel = t.channel(sends, recvs, tag=7)
    for round_ in range(3):
        for index, (peer, buffer) in enumerate(sends):
            buffer.fill_(1000 * round_ + 100 * (index >= t.size) + 10 * t.rank + peer)
        channel.start()
        channel.wait()
        for index, (peer, buffer) in enumerate(recvs):
            expected = 1000 * round_ + 100 * (index >= t.size) + 10 * peer + t.rank
            equal(buffer, torch.full_like(buffer, expected))
    channel.close()
    channel.close()


@CHECKS.add
def channels_overlap_and_carry_empty_messages(t: Transport) -> None:
    after, before = (t.rank + 1) % t.size, (t.rank - 1) % t.size
    received = [torch.empty(3), torch.empty(3)]
    empty = torch.empty(0)
    channels = [
        t.channel(
            [(after, torch.full((3,), float(t.rank + 10 * tag))), (after, empty)],
            [(before, received[tag]), (before, empty)],
            tag,
        )
        for tag in (0, 1)
    ]
    for channel in channels:
        channel.start()
    t.barrier()
    for channel in reversed(channels):
        channel.wait()
    for tag in (0, 1):
        assert received[tag].tolist() == [before + 10 * tag] * 3
    t.channel([], [], tag=5).start()
