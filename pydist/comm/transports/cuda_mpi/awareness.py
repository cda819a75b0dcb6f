"""Queries whether the MPI of this process is CUDA-aware."""

from __future__ import annotations

import ctypes
import os
import re
from pathlib import Path

from mpi4py import MPI

_KINDS = "mpi_memory_alloc_kinds"
"""The info key of MPI 4.1 for the supported kinds of memory, as in "mpi,system,cuda:device"."""
_QUESTION = "MPIX_Query_cuda_support"
"""An extension of Open MPI, MPICH and their derivatives: 1 if built with CUDA and usable."""
_MAPS = Path("/proc/self/maps")


def missing() -> str:
    """Returns why this MPI carries no device memory, on one line; "" if it is CUDA-aware."""
    if "cuda" in (kind.split(":")[0] for kind in memory_kinds().split(",")):
        return ""
    library = MPI.Get_library_version().split("\n")[0].split(",")[0].strip()
    library = re.sub(r"\s+", " ", library.replace(" Version:", ""))
    answer = query()
    if answer is None:
        return f"{library} does not report that it is CUDA-aware (it has no {_QUESTION})"
    return "" if answer else f"{library} is not CUDA-aware ({_QUESTION} gives {answer})"


def memory_kinds() -> str:
    """Returns the kinds of memory that the library reports as supported; "" if it reports none."""
    info = MPI.COMM_WORLD.Get_info()
    try:
        return info.Get(_KINDS) or ""
    finally:
        info.Free()


def query() -> int | None:
    """Returns the library's answer to the query function; None if it has no such function."""
    for library in _loaded():
        try:
            function = getattr(library, _QUESTION)
        except AttributeError:
            continue
        function.restype, function.argtypes = ctypes.c_int, []
        return int(function())
    return None


def _loaded() -> list[ctypes.CDLL]:
    """Returns handles of the MPI libraries that this process has loaded, and loads none."""
    libraries = [ctypes.CDLL(None)]
    if _MAPS.exists():
        files = {line.split(maxsplit=5)[-1].strip() for line in _MAPS.read_text().splitlines()}
        for file in sorted(each for each in files if re.search(r"/libmpi[^/]*\.so[^/]*$", each)):
            libraries.append(ctypes.CDLL(file, mode=os.RTLD_NOLOAD | os.RTLD_LAZY))
    return libraries
