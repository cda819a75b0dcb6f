"""Launches jobs: starts ranks with or without MPI, watches them, ends all when one fails.

Nothing in this package imports torch, so that `pydist run` starts quickly.
"""

from __future__ import annotations

from pydist.launch.backends import Backend, available, backend_named
from pydist.launch.supervisor import launch

__all__ = ["Backend", "available", "backend_named", "launch"]
