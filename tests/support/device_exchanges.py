"""What every transport between CUDA devices must do: for tests that have devices."""

from __future__ import annotations

import torch

from pydist.comm import Transport
from pydist.comm.exchanger import Exchanger
from pydist.comm.nccl_place import SHARING, missing, open_nccl
from pydist.partition import Box

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def no_two_ranks() -> str:
    """Why NCCL can't connect two ranks here, as far as one process knows; "" if it may.

    Asked before a job of two ranks is started, which takes a while.
    """
    lacks = missing()
    if not lacks and torch.cuda.device_count() < 2 and open_nccl().version < SHARING:
        lacks = f"one GPU, which NCCL {open_nccl().version} lets no two ranks share"
    return lacks


def halos_on_a_stream_of_the_caller(t: Transport, dtype: torch.dtype, channels_last: bool) -> None:
    """What is packed is late on the device, each time anew."""
    size, width = t.size, 32
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
    exchanger = Exchanger(t, owned, needed, channels_last=channels_last)
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(1, 3, width * size, 40, 40, generator=generator).to(dtype)
    lo, hi = (needed[t.rank][0].lo[2], needed[t.rank][0].hi[2])
    own = whole[:, :, width * t.rank : width * (t.rank + 1)]
    stream = torch.cuda.Stream(t.device)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for round_ in range(4):
            # Busy first, so that what is packed is late on the device.
            busy = torch.randn(2000, 2000, device=t.device)
            for _ in range(10):
                busy = busy @ busy / 2000
            local = own.to(t.device, non_blocking=True) + round_
            slots = exchanger.empty_slots(local)
            exchanger.gather(local, slots)
            expected = whole[:, :, lo:hi].to(t.device) + round_
            assert torch.equal(slots[0], expected)


def started_exchanges_do_not_hold_the_host(t: Transport) -> None:
    """The host is through with an exchange before the device has come to it."""
    peer = 1 - t.rank
    sent = torch.full((1 << 20,), float(t.rank), device=t.device)
    received = torch.empty_like(sent)
    channel = t.channel([(peer, sent)], [(peer, received)], 5)
    channel.start()
    channel.wait()  # connected
    t.barrier()
    torch.cuda._sleep(1_000_000_000)  # cycles, before what is sent is ready
    before = torch.cuda.Event()
    before.record()
    channel.start()
    channel.wait()
    assert not before.query()
    assert torch.equal(received, torch.full_like(received, float(peer)))


def a_step_with_an_exchange_is_captured_and_replayed(t: Transport) -> None:
    """A graph holds the exchange, and carries new numbers in each replay."""
    peer = 1 - t.rank
    source, sent, received, result = (torch.zeros(1 << 12, device=t.device) for _ in range(4))
    channel = t.channel([(peer, sent)], [(peer, received)], 6)

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
        source.fill_(value + t.rank)
        graph.replay()
        assert torch.equal(result, torch.full_like(result, 2.0 * (value + peer)))
