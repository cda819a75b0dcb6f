"""Whether the MPI of this process takes memory of CUDA devices: it is asked, never assumed."""

from __future__ import annotations

import ctypes
import os
import re
from pathlib import Path

from mpi4py import MPI

_KINDS = "mpi_memory_alloc_kinds"
"""What MPI 4.1 and newer say of the memory that they take: such as "mpi,system,cuda:device"."""
_QUESTION = "MPIX_Query_cuda_support"
"""An extension of Open MPI, MPICH and those made from them: 1 if built with CUDA, and usable."""
_MAPS = Path("/proc/self/maps")


def missing() -> str:
    """Why this MPI carries no device memory, as one line; "" if it says that it does."""
    if "cuda" in (kind.split(":")[0] for kind in memory_kinds().split(",")):
        return ""
    library = MPI.Get_library_version().split("\n")[0].split(",")[0].strip()
    library = re.sub(r"\s+", " ", library.replace(" Version:", ""))
    answer = query()
    if answer is None:
        return f"{library} does not say that it is CUDA-aware ({_QUESTION} is not there)"
    return "" if answer else f"{library} is not CUDA-aware ({_QUESTION} gives {answer})"


def memory_kinds() -> str:
    """What the library says of the memory that it takes; "" if it says nothing."""
    info = MPI.COMM_WORLD.Get_info()
    try:
        return info.Get(_KINDS) or ""
    finally:
        info.Free()


def query() -> int | None:
    """What the library answers to the question; None if it has no such function."""
    for library in _loaded():
        try:
            function = getattr(library, _QUESTION)
        except AttributeError:
            continue
        function.restype, function.argtypes = ctypes.c_int, []
        return int(function())
    return None


def _loaded() -> list[ctypes.CDLL]:
    """Handles of the MPI that this process has loaded, whoever did so, and of nothing else."""
    libraries = [ctypes.CDLL(None)]
    if _MAPS.exists():
        files = {line.split(maxsplit=5)[-1].strip() for line in _MAPS.read_text().splitlines()}
        for file in sorted(each for each in files if re.search(r"/libmpi[^/]*\.so[^/]*$", each)):
            libraries.append(ctypes.CDLL(file, mode=os.RTLD_NOLOAD | os.RTLD_LAZY))
    return libraries
