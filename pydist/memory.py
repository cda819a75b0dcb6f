"""Settings of the C library's allocator for memory that a training step frees.

By default glibc returns large blocks to the system immediately. A step allocates and frees the same
gigabytes repeatedly, and the system must clear every page again. `pydist.init()` therefore calls
`keep_freed_memory`; `init(keep_freed_memory=False)` or PYDIST_KEEP_FREED_MEMORY=0 in the
environment leaves the allocator's settings unchanged, for use where memory is scarce. Then backward
on several ranks also returns free memory during the pass (`relieve`), since glibc keeps blocks
below 32 MiB: shards are small, so gaps that deep layers leave would add a fifth to the peak, which
occurs when backward reaches the first layers.

Measured on CosmoFlow (variant "paper", batch 4, at 128³ batch 2; Adam; one thread per rank; split
over the depth; a thread that makes the batches), glibc 2.36, default → kept. Faults and system time
are those of one step of one rank:

=====  =====  ==================  ====================  =================  ==================
cube   ranks  page faults         system time           peak RSS           RSS between steps
=====  =====  ==================  ====================  =================  ==================
32³    1      16,400 → 650        0.029 → 0.001 s       567 → 575 MiB      566 → 575 MiB
32³    2      20,900 → 280        0.050 → 0.014 s       578 → 578 MiB      578 → 578 MiB
64³    1      105,800 → 340       0.185 → 0.002 s       886 → 1002 MiB     700 → 1002 MiB
64³    2      39,100 → 780        0.098 → 0.022 s       715 → 720 MiB      633 → 720 MiB
128³   1      449,000 → 16,400    0.761 → 0.029 s       1626 → 1985 MiB    762 → 1982 MiB
128³   2      136,500 → 35        0.331 → 0.013 s       1126 → 1309 MiB    730 → 1309 MiB
=====  =====  ==================  ====================  =================  ==================

So the cost is resident memory: used memory stays resident, and gaps between blocks of different
sizes add up to a fifth to the peak. `give_back` returns free memory.

The settings apply to the heap of the main thread. Blocks of other threads (a loader's batches)
still come from the system if they exceed 64 MiB: the 16,400 faults are such a batch. One heap for
all threads (M_ARENA_MAX = 1) avoids most of these but costs more memory: 2404 MiB instead of
2085 MiB (plain torch, 128³). Raising the mmap threshold instead is not enough: its limit is 32 MiB,
and that run still had 309,000 faults per step.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

from pydist.errors import UsageError

VARIABLE = "PYDIST_KEEP_FREED_MEMORY"

_GROWTH_BYTES = 4 << 20
"""Growth from which a search for free memory pays, which takes about a millisecond."""

_PROBE_BYTES = 8 << 20
"""Size of a test allocation, more than other threads free during the test."""

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
_SETTINGS = ("mmap_max", "mmap_threshold", "trim_threshold", "top_pad")


_kept: list[bool] = []
"""Whether freed memory is kept; empty until `keep_freed_memory` has set it."""


class _DlInfo(ctypes.Structure):
    """`Dl_info` of <dlfcn.h>: the library that contains a symbol."""

    _fields_ = (
        ("dli_fname", ctypes.c_char_p),
        ("dli_fbase", ctypes.c_void_p),
        ("dli_sname", ctypes.c_char_p),
        ("dli_saddr", ctypes.c_void_p),
    )


class _MallInfo2(ctypes.Structure):
    """Structure that `mallinfo2` of <malloc.h> returns."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd",
            "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    )  # fmt: skip

    def in_use(self) -> int:
        """Returns the number of allocated bytes."""
        return int(self.uordblks + self.hblkhd)


def keep_freed_memory() -> bool:
    """Keeps freed memory in the process, from now on.

    Does nothing if the allocator is not glibc's own (musl, a preloaded jemalloc), if the user has
    set one of the same values (MALLOC_MMAP_MAX_, GLIBC_TUNABLES=glibc.malloc.mmap_max=..., or those
    of the mmap threshold, the trim threshold and the top pad), or if PYDIST_KEEP_FREED_MEMORY is 0.

    Returns:
        Whether memory is kept.

    Raises:
        UsageError: PYDIST_KEEP_FREED_MEMORY is neither 0 nor 1.
    """
    wanted = os.environ.get(VARIABLE, "1")
    if wanted not in ("0", "1"):
        raise UsageError(f"{VARIABLE}={wanted}: 0 or 1 is possible")
    if wanted == "0" or _set_by_user():
        return False
    libc = _glibc_in_use()
    if libc is None:
        return False
    # Blocks of any size come from the heap, and the heap never shrinks. Either setting alone is not
    # enough: a large block at the end of the heap would be returned as soon as it is free.
    _kept[:] = [bool(libc.mallopt(_M_MMAP_MAX, 0) and libc.mallopt(_M_TRIM_THRESHOLD, -1))]
    return is_kept()


def is_kept() -> bool:
    """Returns whether freed memory stays in this process, as `keep_freed_memory` has set."""
    return any(_kept)


def give_back() -> bool:
    """Returns free memory to the system, once, for example after training in a notebook.

    Returns:
        Whether any memory was returned; False also if the allocator is not glibc's own.
    """
    libc = _glibc_in_use()
    return libc is not None and bool(libc.malloc_trim(ctypes.c_size_t(0)))


class _Relief:
    """A callable that returns free memory to the system when the process has grown."""

    def __init__(self, libc: ctypes.CDLL) -> None:
        self._trim = libc.malloc_trim
        self._statm = Path("/proc/self/statm").open("rb", buffering=0)  # noqa: SIM115  kept open
        self._page = os.sysconf("SC_PAGE_SIZE")
        self._lowest = 0

    def __call__(self) -> None:
        resident = self._resident()
        if resident > self._lowest + _GROWTH_BYTES:
            self._trim(ctypes.c_size_t(0))
            resident = self._lowest = self._resident()
        self._lowest = min(self._lowest, resident)

    def _resident(self) -> int:
        self._statm.seek(0)
        return int(self._statm.read().split()[1]) * self._page


_relief: list[_Relief] = []
"""The instance of this process, if relief is allowed."""


def allow_relief(allowed: bool = True) -> None:
    """Enables `relieve`, unless another allocator is used or the user has changed settings.

    Args:
        allowed: False disables it.
    """
    libc = None if _set_by_user() or not allowed else _glibc_in_use()
    if libc is not None and not Path("/proc/self/statm").exists():
        libc = None
    _relief[:] = [] if libc is None else [_Relief(libc)]


def relieve() -> None:
    """Returns free memory to the system if `allow_relief` was called and the process has grown.

    For places where much memory was just freed. If the process has not grown, it takes 3 µs.
    """
    for each in _relief:
        each()


def _set_by_user() -> bool:
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    return any(
        f"MALLOC_{name.upper()}_" in os.environ or f"glibc.malloc.{name}=" in tunables
        for name in _SETTINGS
    )


def _glibc_in_use() -> ctypes.CDLL | None:
    """Returns the C library, if it is glibc and the process allocates from it."""
    if not sys.platform.startswith("linux"):
        return None
    process = ctypes.CDLL(None)
    try:
        home = _library_of(process, "gnu_get_libc_version")
        others = {_library_of(process, name) for name in ("posix_memalign", "mallopt")}
        of_malloc = _library_of(process, "malloc")
    except AttributeError:
        return None
    if others != {home}:
        return None
    return process if of_malloc == home or _allocates_here(process) else None


def _allocates_here(process: ctypes.CDLL) -> bool:
    """Returns whether `malloc` takes memory from glibc, by glibc's own count.

    In an executable at a fixed address, such as Debian's Python, the symbol is a jump without a
    library.
    """
    if os.environ.get("LD_PRELOAD") or not hasattr(process, "mallinfo2"):
        return False
    process.mallinfo2.restype = _MallInfo2
    process.malloc.restype = ctypes.c_void_p
    before = process.mallinfo2().in_use()
    block = process.malloc(ctypes.c_size_t(_PROBE_BYTES))
    taken = process.mallinfo2().in_use() - before
    process.free(ctypes.c_void_p(block))
    return bool(taken >= _PROBE_BYTES)


def _library_of(process: ctypes.CDLL, symbol: str) -> int:
    """Returns the base address of the library that provides a symbol, preloaded ones first."""
    info = _DlInfo()
    address = ctypes.cast(getattr(process, symbol), ctypes.c_void_p)
    process.dladdr(address, ctypes.byref(info))
    return info.dli_fbase or 0
