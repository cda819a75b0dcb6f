"""Transports: what carries bytes between ranks, and the exchanges built on it."""

from __future__ import annotations

from pydist.comm.local import LocalTransport, run_local
from pydist.comm.transport import Channel, ReduceOp, Transport, Work

__all__ = ["Channel", "LocalTransport", "ReduceOp", "Transport", "Work", "run_local"]
