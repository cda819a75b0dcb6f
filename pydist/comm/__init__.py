"""What carries bytes between ranks: collectives and messages; it knows no mesh and no layout.

`interface` says what every transport is; `transports` has those that there are (local, mpi, c10d,
nccl, ipc, cuda_mpi). What is built on them is in `pydist.exchange` and `pydist.gradients`.
"""

from __future__ import annotations

from pydist.comm.interface.handles import Channel, Work
from pydist.comm.interface.reduction import ReduceOp
from pydist.comm.interface.transport import Transport
from pydist.comm.transports.local.run import run_local
from pydist.comm.transports.local.transport import LocalTransport

__all__ = ["Channel", "LocalTransport", "ReduceOp", "Transport", "Work", "run_local"]
