"""Ranks with a CUDA device each: tensors there travel by NCCL, others over the host's transport.

NCCL is opened when it is needed, the copy that torch has loaded if there is one; nothing links to
it. What ranks need to find each other in it travels over the host's transport.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from pydist._loader import native
from pydist.comm.interface.transport import Transport
from pydist.comm.transports.nccl.device import DeviceTransport
from pydist.comm.transports.nccl.place import Place, agree
from pydist.comm.transports.routed import RoutedTransport
from pydist.errors import UsageError

CONNECT_SECONDS = 120.0
"""Within which all ranks have come to a new group, or those that have raise `RankLost`."""
ISSUE_SECONDS = 600.0
"""Within which an operation is on its way: at the first one, ranks wait for those they talk to."""
_ABORT_SECONDS = 5.0


class NcclTransport(RoutedTransport):
    """One rank of a group, on one CUDA device.

    Tensors of the device are carried by NCCL, in the order in which ranks start to: of two
    exchanges between the same ranks, all start the same one first, whatever their tags, and on the
    same side of a `barrier`, which looks whether they have. Tensors of host memory, bytes, and
    single messages (`send`, `recv`) travel over the host's transport.

    Each group has a communicator and a stream of its own, so that gradients, which have a group for
    themselves, do not queue behind halos.
    """

    name = "nccl"
    device: torch.device

    def __init__(self, host: Transport, place: Place, *, owns_host: bool = False) -> None:
        """Connect the devices of all ranks of a transport. Collective.

        Args:
            host: connects the same ranks, in host memory.
            place: this rank's device, and the libraries that drive it.
            owns_host: whether closing this one closes `host`.
        """
        self.rank, self.size = host.rank, host.size
        self.host, self.device = host, place.device
        self._place, self._owns_host = place, owns_host
        # A rank on its own may never need it.
        self._made: DeviceTransport | None = self._connect() if self.size > 1 else None

    @classmethod
    def over(cls, host: Transport, local_rank: int, name: str = "nccl") -> NcclTransport:
        """Choose this rank's device and connect it to those of the others. Collective.

        Args:
            host: connects all ranks of the job.
            local_rank: index among the ranks of this machine; chooses among its devices.
            name: of the transport that stands on this one, for messages.

        Raises:
            NotSupported: a rank has no device or no NCCL; the same on all ranks.
            UsageError: ranks would share a device; the same on all ranks.
        """
        return cls(host, agree(host, local_rank, name))

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
            raise UsageError("tensors of one call lie in host memory and on a CUDA device")
        return self._on_device if "cuda" in kinds else self.host

    def _subgroup(self, members: Sequence[int]) -> NcclTransport:
        return NcclTransport(self.host._subgroup(members), self._place, owns_host=True)

    def _barrier(self) -> None:
        # Comes before files are written: a place to see whether what they will hold is right.
        # The transport over all ranks looks at all groups: where it waits, all are at rest.
        made = [] if self._made is None else [self._made]
        for each in made if self._owns_host else self._place.groups:
            each.check_order()
        self.host._barrier()

    def progress(self) -> None:
        """See `Transport.progress`; NCCL needs none."""
        self.host.progress()

    def abort(self, reason: str, exit_code: int) -> None:
        """End what is under way on the device, then the job as the host's transport does."""
        # On a thread: a device that hangs must not keep the job from ending.
        thread = threading.Thread(target=_abort_all, args=(list(self._place.groups),), daemon=True)
        thread.start()
        thread.join(_ABORT_SECONDS)
        self.host.abort(reason, exit_code)

    def captured_in(self, graph: torch.cuda.CUDAGraph) -> None:
        """See `Transport.captured_in`; holds for all groups of the device."""
        self._place.graphs.add(graph)

    def forget_capture(self) -> None:
        """See `Transport.forget_capture`."""
        super().forget_capture()
        if self._made is not None:
            self._made.forget_capture()

    def close(self) -> None:
        """See `Transport.close`; the transport over all ranks closes what was split off it too."""
        for graph in list(self._place.graphs):
            graph.reset()
        self._place.graphs.clear()
        groups = self._place.groups
        made = [] if self._made is None else [self._made]
        self._made = None
        # The last one first, as on all ranks: each waits for the others.
        for each in made if self._owns_host else reversed(groups[:]):
            if each in groups:
                groups.remove(each)
                each.close()
        if self._owns_host:
            self.host.close()


def _abort_all(groups: Sequence[DeviceTransport]) -> None:
    for each in groups:
        each.abort("", 0)
