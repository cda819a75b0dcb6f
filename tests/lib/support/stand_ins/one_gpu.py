"""Two ranks on one GPU that NCCL can't share between them: halos are copied, the rest staged."""

from __future__ import annotations

import atexit
import functools

import torch

from pydist import _native as native
from pydist.comm import Transport
from pydist.comm.transports.ipc.peer_memory import BLOCK_BYTES, find_peers
from pydist.comm.transports.ipc.transport import IpcTransport
from pydist.comm.transports.staged import StagedTransport
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
    world = IpcTransport(StagedTransport(host, device), place, sorted(place.near), world=True)
    atexit.register(world.close)
    return world
