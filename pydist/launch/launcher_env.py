"""Detects this process's launcher, its rank and the number of ranks.

Only the environment is read. Known pitfalls: the local rank is not the rank modulo any number (Open
MPI maps by slot or by node), and inside a SLURM step the job-level variables are wrong.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from pydist.errors import UsageError


@dataclass(frozen=True)
class Identity:
    """Place that this process has in the job.

    Attributes:
        launcher: "openmpi", "mpich", "torchrun", "slurm", or "pydist" for ranks that pydist starts
            without MPI.
        rank: index in the job.
        size: number of ranks in the job.
        local_rank: index among the ranks of this node.
        local_size: number of ranks on this node.
    """

    launcher: str
    rank: int
    size: int
    local_rank: int
    local_size: int


_VARIABLES = {
    "openmpi": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "pydist": ("PYDIST_RANK", "PYDIST_SIZE", "PYDIST_RANK", "PYDIST_SIZE"),
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "mpich": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "slurm": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
}
_JOINED = "PYDIST_JOINED"
_LOCAL_OF_PMI = ["PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"]  # of Cray's launchers, which start an MPICH


def detect(environment: Mapping[str, str] = os.environ) -> Identity | None:
    """Reads this process's identity from the launcher's variables; None without a launcher.

    Args:
        environment: the variables to read.

    Raises:
        UsageError: the variables are not numbers, or inconsistent.
    """
    for launcher, (rank, size, *local_names) in _VARIABLES.items():
        if rank in environment and size in environment:
            if launcher == "torchrun" and "MASTER_ADDR" not in environment:
                continue  # RANK and WORLD_SIZE alone are set by many tools
            local = local_names
            if launcher == "mpich" and local[0] not in environment:
                if _slurm_sets_pmi(environment):
                    continue
                local = _LOCAL_OF_PMI
            found = Identity(
                launcher,
                _number(environment, rank),
                _number(environment, size),
                _number(environment, local[0]) if local[0] in environment else 0,
                _tasks_of_node(
                    environment.get(local[1], "1"), environment.get("SLURM_NODEID", "0")
                ),
            )
            if found.rank >= found.size:
                raise UsageError(
                    f"the environment has {rank}={found.rank} and {size}={found.size}: ranks count "
                    "from 0; unset both where no launcher has set them"
                )
            return found
    return None


def _slurm_sets_pmi(environment: Mapping[str, str]) -> bool:
    """Returns whether srun has set PMI's variables, as with --mpi=pmi2: both sets are equal."""
    pmi, slurm = (
        [environment.get(name) for name in _VARIABLES[launcher][:2]]
        for launcher in ("mpich", "slurm")
    )
    return pmi == slurm


def without_identity(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables without those that tell a process its place in a job."""
    names = {name for each in (*_VARIABLES.values(), _LOCAL_OF_PMI, [_JOINED]) for name in each}
    return {name: value for name, value in environment.items() if name not in names}


def mark_children() -> None:
    """Marks the environment of this rank's child processes, which inherit its place in the job."""
    os.environ[_JOINED] = str(os.getpid())


def refuse_child(who: Identity) -> None:
    """Raises an error in a child process of a rank, which has the rank's variables.

    Args:
        who: the place in the job that the variables name.

    Raises:
        UsageError: this process is such a child: the ranks of a job that a rank starts are children
            of its launcher.
    """
    joined = os.environ.get(_JOINED)
    main = sys.modules.get("__mp_main__")  # of workers; their parent may be a fork server
    is_worker = main is not None and main.__name__ == "__mp_main__"
    inherited = joined not in (None, str(os.getpid()))  # a rank connects several times
    if inherited and (is_worker or joined == str(os.getppid())):
        raise UsageError(
            f"process {os.getpid()} is a child of rank {who.rank}, and no rank: it can't join the "
            "job. If it is a worker that imports the script, put the script's calls under `if "
            '__name__ == "__main__":`; start a program of its own with `pydist run`'
        )


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment[name]
    if not (text.isascii() and text.isdigit()):
        raise UsageError(f"the environment has {name}={text!r}, and a whole number is needed")
    return int(text)


def _tasks_of_node(text: str, node: str) -> int:
    """Reads a node's number from a text such as SLURM's "4(x2),3": 4 on two nodes, then 3.

    Args:
        text: the numbers of all nodes; other launchers set that of this node alone.
        node: index of this node; the first one counts where there is no such node.
    """
    counts = [
        int(count)
        for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
        for _ in range(int(times or 1))
    ]
    index = int(node) if node.isascii() and node.isdigit() else 0
    return counts[index if index < len(counts) else 0] if counts else 1
