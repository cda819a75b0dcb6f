"""Implements the transport that uses NCCL for device tensors, the host's for host tensors.

NCCL is opened when it is needed, preferably the copy that torch has loaded; nothing links to it.
Its unique ids are broadcast over the host's transport.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from pydist._loader import native
from pydist.comm.interface.transport import Transport
from pydist.comm.transports.nccl.device import DeviceTransport
from pydist.comm.transports.nccl.device_assignment import DeviceAssignment, assign_device
from pydist.comm.transports.routed import RoutedTransport
from pydist.errors import UsageError

CONNECT_SECONDS = 120.0
"""Time limit for all ranks to join a new group; those that have joined then raise `RankLost`."""
ISSUE_SECONDS = 600.0
"""Time limit to issue an operation: in the first one, a rank waits for its peers to connect."""
_ABORT_SECONDS = 5.0


class NcclTransport(RoutedTransport):
    """Transport of one rank that has a CUDA device of its own.

    NCCL carries device tensors and matches them in the order in which ranks start: of two exchanges
    between the same ranks, all start the same one first, regardless of tags, and on the same side
    of a `barrier`, which checks this. Host tensors, bytes, and single messages (`send`, `recv`) use
    the host's transport.

    Each group has a communicator and a stream of its own, so that gradients, which have their own
    group, do not queue after halos.
    """

    name = "nccl"
    device: torch.device

    def __init__(
        self, host: Transport, place: DeviceAssignment, *, owns_host: bool = False
    ) -> None:
        """Connects the devices of all ranks of a transport. Collective.

        Args:
            host: connects the same ranks, in host memory.
            place: this rank's device, and the libraries that drive it.
            owns_host: whether closing this one closes `host`.
        """
        self.rank, self.size = host.rank, host.size
        self.host, self.device = host, place.device
        self._place, self._owns_host = place, owns_host
        # A group of one rank may never need it.
        self._made: DeviceTransport | None = self._connect() if self.size > 1 else None

    @classmethod
    def over(cls, host: Transport, local_rank: int, name: str = "nccl") -> NcclTransport:
        """Chooses this rank's device and connects it to the other ranks' devices. Collective.

        Args:
            host: connects all ranks of the job.
            local_rank: index among the ranks of this machine; chooses among its devices.
            name: name of the transport that is built on this one, for messages.

        Raises:
            NotSupported: a rank has no device or no NCCL; the same on all ranks.
            UsageError: ranks would share a device; the same on all ranks.
        """
        return cls(host, assign_device(host, local_rank, name))

    @property
    def _on_device(self) -> DeviceTransport:
        if self._made is None:
            self._made = self._connect()
        return self._made

    def _connect(self) -> DeviceTransport:
        place, host = self._place, self.host
        unique = host.broadcast_bytes(place.library.unique_id() if self.rank == 0 else None)
        group = native.NcclCommunicator(
            place.library,
            place.driver,
            unique,
            self.rank,
            self.size,
            place.device.index,
            CONNECT_SECONDS,
            ISSUE_SECONDS,
        )
        made = DeviceTransport(group, host, place.device)
        place.groups.append(made)
        return made

    def _of(self, tensors: Sequence[Tensor]) -> Transport:
        kinds = {each.device.type for each in tensors}
        if len(kinds) > 1:
            raise UsageError("tensors of one call are in host memory and on a CUDA device")
        return self._on_device if "cuda" in kinds else self.host

    def _subgroup(self, members: Sequence[int]) -> NcclTransport:
        return NcclTransport(self.host._subgroup(members), self._place, owns_host=True)

    def _barrier(self) -> None:
        # Barriers precede the writing of files, so they check that the data is valid. The
        # transport over all ranks checks all groups: at its barrier no exchange is in flight.
        made = [] if self._made is None else [self._made]
        for each in made if self._owns_host else self._place.groups:
            each.check_order()
        self.host._barrier()

    def progress(self) -> None:
        """Advances messages of the host's transport; see `Transport.progress`."""
        self.host.progress()

    def abort(self, reason: str, exit_code: int) -> None:
        """Aborts operations in flight on the device, then ends the job by the host's transport."""
        # On a thread: a device that hangs must not keep the job from ending.
        thread = threading.Thread(target=_abort_all, args=(list(self._place.groups),), daemon=True)
        thread.start()
        thread.join(_ABORT_SECONDS)
        self.host.abort(reason, exit_code)

    def captured_in(self, graph: torch.cuda.CUDAGraph) -> None:
        """Remembers a graph that captured operations of any group; see `Transport.captured_in`."""
        self._place.graphs.add(graph)

    def forget_capture(self) -> None:
        """Forgets operations of a finished capture; see `Transport.forget_capture`."""
        super().forget_capture()
        if self._made is not None:
            self._made.forget_capture()

    def close(self) -> None:
        """Closes the group, and for all ranks the subgroups; see `Transport.close`."""
        for graph in list(self._place.graphs):
            graph.reset()
        self._place.graphs.clear()
        groups = self._place.groups
        made = [] if self._made is None else [self._made]
        self._made = None
        # In reverse order on all ranks, as each `close` waits for the other ranks.
        for each in made if self._owns_host else reversed(groups[:]):
            if each in groups:
                groups.remove(each)
                each.close()
        if self._owns_host:
            self.host.close()


def _abort_all(groups: Sequence[DeviceTransport]) -> None:
    for each in groups:
        each.abort("", 0)
