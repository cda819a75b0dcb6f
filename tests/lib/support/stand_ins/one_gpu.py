"""Two ranks on one GPU that NCCL can't share between them: halos are copied, the rest staged."""

from __future__ import annotations

import atexit
import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from pydist import _native as native
from pydist.comm import Transport
from pydist.comm.interface.handles import Channel, Work
from pydist.comm.transports.ipc.peer_memory import BLOCK_BYTES, find_peers
from pydist.comm.transports.ipc.transport import IpcTransport
from pydist.errors import NotSupported
from pydist.runtime import connect


@functools.cache
def ranks_of_one_gpu() -> Transport:
    """Returns the transport `ipc` over the ranks of the job, all on the first device. Collective.

    Raises:
            NotSupported: the ranks can't map each other's memory, or the host's transport does not
                support threads; the same on all ranks.
    """
    host = connect()
    if not host.concurrent:
        raise NotSupported(f"'{host.name}' is not for threads")
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    place = find_peers(host, native.CudaDriver(), 0, BLOCK_BYTES)
    world = IpcTransport(Staged(host, device), place, sorted(place.near), world=True)
    atexit.register(world.close)
    return world


class Staged(Transport):
    """Transport that stages tensors of a device in host memory: no overlap, and no graph.

    Args:
        host: connects the same ranks.
        device: whose tensors are supported as well.
        owns_host: whether closing this one closes `host`.
    """

    name = "staged"

    def __init__(self, host: Transport, device: torch.device | None, owns_host: bool = False):
        self.rank, self.size, self.concurrent = host.rank, host.size, host.concurrent
        self.device = device
        self._host, self._owns_host = host, owns_host

    def _subgroup(self, members: Sequence[int]) -> Staged:
        return Staged(self._host._subgroup(members), self.device, owns_host=True)

    def _channel(
        self, sends: Sequence[tuple[int, Tensor]], recvs: Sequence[tuple[int, Tensor]], tag: int
    ) -> Channel:
        assert not any(each.is_cuda for _, each in (*sends, *recvs)), "these are copied"
        return self._host._channel(sends, recvs, tag)

    def _send(self, tensor: Tensor, dest: int, tag: int) -> None:
        self._host._send(tensor.cpu(), dest, tag)

    def _recv(self, tensor: Tensor, source: int, tag: int) -> None:
        with on_host(tensor) as (copy,):
            self._host._recv(copy, source, tag)

    def _barrier(self) -> None:
        self._host._barrier()

    def _broadcast(self, tensor: Tensor, root: int) -> None:
        with on_host(tensor) as (copy,):
            self._host._broadcast(copy, root)

    def _gather(self, tensor: Tensor, root: int) -> list[Tensor] | None:
        found = self._host._gather(tensor.cpu(), root)
        return None if found is None else [each.to(tensor.device) for each in found]

    def _scatter(self, tensors: Sequence[Tensor] | None, out: Tensor, root: int) -> None:
        given = None if tensors is None else [each.cpu() for each in tensors]
        with on_host(out) as (copy,):
            self._host._scatter(given, copy, root)

    def _all_to_all_async(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Work:
        copies = [each.cpu() for each in outputs]
        sent = [each.cpu() for each in inputs]
        return _StagedWork(self._host._all_to_all_async(sent, copies), copies, outputs)

    def _all_reduce(self, tensor: Tensor, op: Any) -> None:
        with on_host(tensor) as (copy,):
            self._host._all_reduce(copy, op)

    def _all_reduce_async(self, tensor: Tensor, op: Any) -> Work:
        self._all_reduce(tensor, op)
        return Work()

    def progress(self) -> None:
        self._host.progress()

    def abort(self, reason: str, exit_code: int) -> None:
        self._host.abort(reason, exit_code)

    def close(self) -> None:
        if self._owns_host:
            self._host.close()


class _StagedWork(Work):
    """Work on the host, whose results are copied to the device when it is waited for.

    Args:
        work: of the host's transport, which keeps the copies until the messages have arrived.
        copies: in host memory.
        outputs: the tensors that were copied.
    """

    def __init__(self, work: Work, copies: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        self._work, self._pairs = work, list(zip(copies, outputs, strict=True))

    def done(self) -> bool:
        return self._work.done()

    def wait(self) -> None:
        self._work.wait()
        for copy, output in self._pairs:
            if copy is not output:
                output.copy_(copy)
        self._pairs.clear()


@contextmanager
def on_host(*tensors: Tensor) -> Iterator[list[Tensor]]:
    """Copies tensors to host memory, and copies them back to the device at the end."""
    copies = [each.cpu() for each in tensors]
    yield copies
    for each, copy in zip(tensors, copies, strict=True):
        if copy is not each:
            each.copy_(copy)
