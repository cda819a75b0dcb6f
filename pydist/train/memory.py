"""Tells the C library's allocator to keep what a step frees for the next one."""

from __future__ import annotations

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4
_TOP_PAD = 64 << 20


def keep_freed_memory() -> bool:
    """Keeps freed memory in the process, from now on.

    By default glibc hands large blocks back to the system at once. A training step allocates and
    frees the same gigabytes again and again, and would wait for the system to clear each page anew:
    measured on CosmoFlow 32³, a fifth of a step's CPU time and three quarters of its page faults.

    Returns:
        Whether the allocator could be told; only glibc's can.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return False
    # All three, whatever the first ones return: each helps by itself.
    taken = [
        mallopt(_M_MMAP_MAX, 0),
        mallopt(_M_TRIM_THRESHOLD, -1),
        mallopt(_M_TOP_PAD, _TOP_PAD),
    ]
    return all(taken)
