"""Transports: what carries bytes between ranks, and the exchanges built on it."""

from __future__ import annotations

from pydist.comm.handles import Channel, Work
from pydist.comm.local import LocalTransport, run_local
from pydist.comm.transport import ReduceOp, Transport

__all__ = ["Channel", "LocalTransport", "ReduceOp", "Transport", "Work", "run_local"]
