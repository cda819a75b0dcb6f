"""The data path of CUDA-aware MPI on host memory, with a stream that executes work late.

Requires mpi4py, like the transport.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pydist.comm.transports.cuda_mpi.transport import CudaMpiTransport
from support.transports.checks import equal


class OnHostMemory(CudaMpiTransport):
    """Transport that treats host memory as device memory.

    Attributes:
        late: work on the stream that is not done; a wait of the host for the stream executes it.
    """

    def __init__(self, device: Any = None, comm: Any = None, engine: Any = None) -> None:
        super().__init__(device or torch.device("cpu"), comm, engine)
        self.late: list[Callable[[], object]] = []

    def _on_device(self, tensor: Tensor) -> bool:
        return True

    def _wait_for_stream(self) -> None:
        for work in self.late:
            work()
        self.late.clear()


def every_call_waits_for_the_stream(t: OnHostMemory) -> None:
    """MPI would send wrong values if it did not wait for the stream."""
    after, before = (t.rank + 1) % t.size, (t.rank - 1) % t.size
    ranks = torch.arange(1.0, t.size + 1)
    total, theirs = ranks.sum().expand(4), torch.full((4,), 1.0 + before)

    def late(count: int = 4) -> Tensor:
        """Returns a tensor that the stream sets, late, to the rank plus one."""
        tensor = torch.full((count,), -7.0)
        t.late.append(lambda: tensor.fill_(1.0 + t.rank))
        return tensor

    sent, received = late(), late()
    channel = t.channel([(after, sent)], [(before, received)], 3)
    for _ in range(2):
        channel.start()
        assert not t.late
        channel.wait()
        equal(received, theirs)
        t.late.append(lambda: received.fill_(9.0))  # before the next message
    t.send(torch.full((4,), 1.0 + t.rank), after)
    t.recv(out := late(), before)
    equal(out, theirs)
    for root in range(t.size):
        t.broadcast(out := late(), root)
        equal(out, ranks[root].expand(4))
    equal(t.all_gather(late())[:, 0], ranks)
    t.all_gather_async(late(), out := late(4 * t.size)).wait()
    equal(out, ranks.repeat_interleave(4))
    t.all_to_all([late() for _ in ranks], outs := [late() for _ in ranks])
    equal(torch.stack(outs)[:, 0], ranks)
    t.reduce_scatter_async(late(4 * t.size), out := late()).wait()
    equal(out, total)
    t.all_reduce(out := late())
    equal(out, total)
    t.all_reduce_async(out := late()).wait()
    equal(out, total)
    t.all_reduce(out := late(), "max")
    equal(out, ranks[-1].expand(4))
