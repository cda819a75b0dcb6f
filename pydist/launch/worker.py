"""Starts each rank: connects to the launcher, installs hooks, runs the program.

Its arguments are the script, or "-m" and the module, and the program's arguments.
"""

from __future__ import annotations

import io
import os
import runpy
import sys
from pathlib import Path

from pydist.launch import failures, forks, launcher_env
from pydist.launch.launcher_socket import VARIABLE, LauncherSocket


def main(argv: list[str]) -> None:
    """Runs a program as one rank of a job.

    Args:
        argv: the script or "-m" and the module, and its arguments.
    """
    who = launcher_env.detect()
    rank, size = (who.rank, who.size) if who is not None else (0, 1)
    connection = LauncherSocket(os.environ[VARIABLE], rank) if VARIABLE in os.environ else None
    if connection is None:
        failures.install(rank, size, abort=_abort)
    else:
        failures.install(rank, size, claim=connection.claim, say=connection.say, abort=_abort)
        forks.at_exit(connection.end)  # first in, last out: the program's own may fail
    for stream in (sys.stdout, sys.stderr):
        # Ranks write complete lines to their pipes, or lines of several ranks would mix.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)
    with failures.guarded():
        _run(argv)


def _run(argv: list[str]) -> None:
    # As the interpreter does, but only after pydist itself is imported.
    place = Path.cwd() if argv[0] == "-m" else Path(argv[0]).resolve().parent
    if not getattr(sys.flags, "safe_path", False):  # Python 3.11
        sys.path.insert(0, str(place))
    if argv[0] == "-m":
        sys.argv = argv[1:]
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = argv
        runpy.run_path(argv[0], run_name="__main__")


def _abort(code: int) -> None:
    """Aborts before `pydist.runtime.connect`: by MPI if the program has initialized it itself."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.COMM_WORLD.Abort(code)
