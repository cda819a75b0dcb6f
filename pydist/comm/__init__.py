"""What carries bytes between ranks, and what is built on it.

Read bottom to top; imports run downwards only:

======================  ======================================================================
`gradients`             the reducer: buckets of gradients, whole or shared by the ranks
`exchange`              the exchanger: a plan with its buffers; adjoints for autograd
`transports`            those that there are: local, mpi, c10d, nccl, ipc, cuda_mpi
`interface`             what every transport is; exchange and gradients know no more of one
======================  ======================================================================
"""

from __future__ import annotations

from pydist.comm.interface.handles import Channel, Work
from pydist.comm.interface.reduction import ReduceOp
from pydist.comm.interface.transport import Transport
from pydist.comm.transports.local.run import run_local
from pydist.comm.transports.local.transport import LocalTransport

__all__ = ["Channel", "LocalTransport", "ReduceOp", "Transport", "Work", "run_local"]
