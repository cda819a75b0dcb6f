"""Profiles a training step by layer and part, as a table and as a trace.

`Profiler` measures any training loop; `pydist profile` measures configured runs.
"""

from pydist.profile.profiler import Profiler

__all__ = ["Profiler"]
