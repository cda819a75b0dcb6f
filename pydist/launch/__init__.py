"""The launcher: start ranks under MPI or alone, watch them, end them all when one fails.

Nothing in this package imports torch, so that `pydist run` starts at once.
"""

from __future__ import annotations

from pydist.launch.backends import Backend, available, choose
from pydist.launch.supervisor import launch

__all__ = ["Backend", "available", "choose", "launch"]
