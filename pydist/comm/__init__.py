"""Communicates between ranks: collectives and messages, with no knowledge of mesh or layout.

`interface` defines the transport interface; `transports` contains the implementations (local, mpi,
c10d, nccl, ipc, cuda_mpi, staged). `pydist.exchange` and `pydist.gradients` build on them.
"""

from __future__ import annotations

from pydist.comm.interface.handles import Channel, Work
from pydist.comm.interface.reduction import ReduceOp
from pydist.comm.interface.transport import Transport
from pydist.comm.transports.local.threads import run_local
from pydist.comm.transports.local.transport import LocalTransport

__all__ = ["Channel", "LocalTransport", "ReduceOp", "Transport", "Work", "run_local"]
