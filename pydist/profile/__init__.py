"""Where a training step goes: per layer and part, as a table and as a trace.

Around a loop of one's own, as `Profiler` shows; for CosmoFlow there is `pydist profile`.
"""

from pydist.profile.profiler import Profiler

__all__ = ["Profiler"]
