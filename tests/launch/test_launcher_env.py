"""Tests of rank and size under each launcher."""

from __future__ import annotations

import pytest

from pydist.errors import UsageError
from pydist.launch.launcher_env import Identity, detect, without_identity
from pydist.runtime import first_host


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        ({"RANK": "1", "WORLD_SIZE": "2"}, None),  # set by many tools, not only launchers
        (
            {
                "OMPI_COMM_WORLD_RANK": "5",
                "OMPI_COMM_WORLD_SIZE": "8",
                "OMPI_COMM_WORLD_LOCAL_RANK": "2",
                "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
                "SLURM_PROCID": "0",
                "SLURM_STEP_NUM_TASKS": "1",
            },
            Identity("openmpi", 5, 8, 2, 4),
        ),
        (
            {"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"},
            Identity("mpich", 1, 4, 1, 4),
        ),
        (
            {
                "RANK": "3",
                "WORLD_SIZE": "4",
                "LOCAL_RANK": "1",
                "LOCAL_WORLD_SIZE": "2",
                "MASTER_ADDR": "n1",
            },
            Identity("torchrun", 3, 4, 1, 2),
        ),
        ({"PYDIST_RANK": "1", "PYDIST_SIZE": "3"}, Identity("pydist", 1, 3, 1, 3)),
        (
            {
                "SLURM_PROCID": "6",
                "SLURM_NTASKS": "64",  # of the job; the step has fewer
                "SLURM_STEP_NUM_TASKS": "8",
                "SLURM_LOCALID": "2",
                "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
            },
            Identity("slurm", 6, 8, 2, 4),
        ),
        (  # srun --mpi=pmi2
            {
                "PMI_RANK": "6",
                "PMI_SIZE": "8",
                "PMI_LOCAL_RANK": "2",
                "SLURM_PROCID": "6",
                "SLURM_STEP_NUM_TASKS": "8",
                "SLURM_LOCALID": "2",
                "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
            },
            Identity("slurm", 6, 8, 2, 4),
        ),
        (
            {"PMI_RANK": "3", "PMI_SIZE": "8", "PMI_LOCAL_RANK": "1", "PMI_LOCAL_SIZE": "2"},
            Identity("mpich", 3, 8, 1, 2),
        ),
        (  # an allocation of Slurm, in which srun has started a proxy
            {
                "PMI_RANK": "1",
                "PMI_SIZE": "2",
                "SLURM_PROCID": "0",
                "SLURM_STEP_NUM_TASKS": "1",
            },
            Identity("mpich", 1, 2, 0, 1),
        ),
    ],
)
def test_detect(environment: dict[str, str], expected: Identity | None) -> None:
    assert detect(environment) == expected


@pytest.mark.parametrize(
    ("tasks", "node", "expected"),
    [
        ("4,3", 0, 4),
        ("4,3", 1, 3),
        ("2(x2),1", 1, 2),
        ("2(x2),1", 2, 1),
        ("1,8", 1, 8),
        ("3", 5, 3),
        ("", 0, 1),
    ],
)
def test_slurms_nodes_may_have_different_numbers_of_ranks(
    tasks: str, node: int, expected: int
) -> None:
    slurm = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "9", "SLURM_NODEID": str(node)}
    found = detect({**slurm, "SLURM_STEP_TASKS_PER_NODE": tasks})
    assert found is not None
    assert found.local_size == expected


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("n07", "n07"),
        ("n07,n08", "n07"),
        ("n[07-09,12],m3", "n07"),
        ("rack[1,4]-gpu,x", "rack1-gpu"),
        ("a-b[003]", "a-b003"),
    ],
)
def test_first_host_of_a_slurm_node_list(nodelist: str, host: str) -> None:
    assert first_host(nodelist) == host


def test_a_nested_job_has_the_identity_of_its_own_launcher() -> None:
    outer = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "a", "HOME": "/"}
    assert without_identity(outer) == {"MASTER_ADDR": "a", "HOME": "/"}


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"PYDIST_RANK": "2", "PYDIST_SIZE": "2"}, "PYDIST_RANK=2 and PYDIST_SIZE=2: ranks count"),
        ({"PYDIST_RANK": "x", "PYDIST_SIZE": "2"}, "PYDIST_RANK='x', and a whole number"),
        ({"PMI_RANK": "0", "PMI_SIZE": ""}, "PMI_SIZE='', and a whole number"),
        ({"RANK": "-1", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, "RANK='-1', and a whole number"),
    ],
)
def test_an_environment_that_no_launcher_sets(environment: dict[str, str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        detect(environment)
