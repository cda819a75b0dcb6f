"""Launches a script as `pydist run` does: `python -m pydist.launch N MPI SCRIPT [ARGUMENT ...]`."""

from __future__ import annotations

import sys

from pydist.launch.supervisor import launch

if __name__ == "__main__":
    ranks, mpi, *argv = sys.argv[1:]
    sys.exit(launch(int(ranks), argv, mpi))
