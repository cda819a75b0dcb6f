"""The transport for ranks of one machine that write into each other's device memory.

Halos and redistribution are copies between devices (CUDA IPC) by the copy engines, while all
multiprocessors compute; NCCL carries collectives, and messages to ranks that can't be reached.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from torch import Tensor

from pydist._loader import native
from pydist.comm.interface.handles import Channel
from pydist.comm.interface.transport import Transport
from pydist.comm.transports.ipc.channel import IpcChannel, IpcLinks
from pydist.comm.transports.ipc.peer_memory import BLOCK_BYTES, PeerMemory, find_peers
from pydist.comm.transports.nccl.transport import ISSUE_SECONDS, NcclTransport
from pydist.comm.transports.routed import RoutedTransport
from pydist.errors import NotSupported

_Pair: TypeAlias = tuple[int, Tensor]


class IpcTransport(RoutedTransport):
    """Transport of one rank that copies halos into the memory of other CUDA devices.

    Channels between ranks that can map each other's memory are `IpcChannel`s. They match in the
    order in which ranks start them: of two exchanges between the same ranks, all must start the
    same one first, or the rank that starts second raises. The transport below does everything else.
    """

    name = "ipc"

    def __init__(
        self, base: Transport, place: PeerMemory, near: Sequence[int], world: bool
    ) -> None:
        """Creates a group. Collective.

        Args:
            base: connects the same ranks, in host and device memory; closed with this one.
            place: this rank's memory on its device.
            near: the ranks of the group that this one can reach, and that can reach it.
            world: whether this is the transport over all ranks, whose `close` closes all others.
        """
        self.rank, self.size = base.rank, base.size
        self.device = base.device
        self._base, self._place, self._near, self._world = base, place, frozenset(near), world
        host = base.host if isinstance(base, NcclTransport) else base
        self._links: IpcLinks | None = self._link(host._subgroup(range(host.size)))
        place.links.append(self._links)

    def _link(self, offers: Transport) -> IpcLinks:
        assert self.device is not None
        group = native.IpcGroup(self._place.memory, self.rank, self.size)
        return IpcLinks(group, offers, self.device, ISSUE_SECONDS)

    @classmethod
    def over(cls, host: Transport, local_rank: int) -> IpcTransport:
        """Chooses this rank's device, connects it by NCCL and maps peer memory. Collective.

        Args:
            host: connects all ranks of the job.
            local_rank: index among the ranks of this machine; chooses among its devices.

        Raises:
            NotSupported: a rank has no device or no NCCL, or no two can map each other's memory;
                the same on all ranks.
            UsageError: ranks would share a device, and NCCL is not configured for that; the same
                on all ranks.
        """
        if host.size > 1 and not host.concurrent:
            raise NotSupported(
                f"transport 'ipc' needs a '{host.name}' that several threads may call concurrently"
                " (MPI_THREAD_MULTIPLE); use 'nccl'"
            )
        base = NcclTransport.over(host, local_rank, cls.name)
        place = find_peers(host, native.CudaDriver(), base.device.index, BLOCK_BYTES)
        return cls(base, place, sorted(place.near), world=True)

    def _of(self, tensors: Sequence[Tensor]) -> Transport:
        return self._base

    def _on_device(self, tensors: Sequence[Tensor]) -> bool:
        return {each.device.type for each in tensors} == {"cuda"}

    def _check(self, call: str, tensor: Tensor, *, strided: bool = False) -> None:
        self._base._check(call, tensor, strided=strided)

    def _subgroup(self, members: Sequence[int]) -> IpcTransport:
        near = [place for place, member in enumerate(members) if member in self._near]
        return type(self)(self._base._subgroup(members), self._place, near, world=False)

    def _channel(
        self,
        sends: Sequence[_Pair],
        recvs: Sequence[_Pair],
        tag: int,
    ) -> Channel:
        if self._links is None or not self._on_device([each for _, each in (*sends, *recvs)]):
            return self._base._channel(sends, recvs, tag)
        (sends, far_sends), (recvs, far_recvs) = self._divided(sends), self._divided(recvs)
        if not far_sends and not far_recvs:
            return IpcChannel(self._links, sends, recvs, tag)
        far = self._base._channel(far_sends, far_recvs, tag)
        if not sends and not recvs:
            return far
        return _Both(IpcChannel(self._links, sends, recvs, tag), far)

    def _divided(self, pairs: Sequence[_Pair]) -> tuple[list[_Pair], list[_Pair]]:
        """Splits messages into those with reachable ranks and those with other ranks."""
        reached = {*self._near, self.rank}
        near = [pair for pair in pairs if pair[0] in reached]
        return near, [pair for pair in pairs if pair[0] not in reached]

    def _barrier(self) -> None:
        self._base._barrier()

    def progress(self) -> None:
        """Advances messages of the transport below; see `Transport.progress`."""
        self._base.progress()

    def abort(self, reason: str, exit_code: int) -> None:
        """Ends the job through the transport below; device work ends with the process."""
        self._base.abort(reason, exit_code)

    def close(self) -> None:
        """Closes the group's links, for all ranks also the subgroups'; see `Transport.close`."""
        if self._links is None:
            return
        links, self._links = self._links, None
        place = self._place
        for each in reversed(place.links) if self._world else [links]:
            each.rest()
        if self._world:
            place.links.clear()
            self._base._barrier()  # from here on no rank writes to others
            place.memory.unmap()
            self._base._barrier()  # from here on no rank maps memory of others
            place.memory.release()
        elif links in place.links:
            place.links.remove(links)
        links.offers.close()
        self._base.close()


class _Both(Channel):
    """Channel that combines messages to reachable ranks and to other ranks."""

    def __init__(self, near: Channel, far: Channel) -> None:
        self._parts = (near, far)

    def start(self) -> None:
        """Starts the round in all parts of the channel; see `Channel.start`."""
        for each in self._parts:
            each.start()

    def wait(self) -> None:
        """Waits for the round in all parts of the channel; see `Channel.wait`."""
        for each in self._parts:
            each.wait()

    def close(self) -> None:
        """Closes all parts of the channel; see `Channel.close`."""
        for each in self._parts:
            each.close()
