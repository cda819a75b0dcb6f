"""Tests of the assignment of GPUs to ranks: one answer for all ranks, in one line."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pydist.comm.transports.nccl.device_assignment import (
    SHARE_VARIABLE,
    FoundDevices,
    check_devices,
    missing,
)
from pydist.errors import NotSupported, UsageError
from support.jobs.children import child_environment

A = FoundDevices(machine="n07", gpus=2, gpu="GPU-a", version=22705)
B = replace(A, gpu="GPU-b")


def test_a_gpu_for_each_rank_is_taken() -> None:
    check_devices([A, B, replace(A, machine="n08"), replace(B, machine="n08", version=22703)], {})


def test_ranks_that_would_share_a_gpu_are_named() -> None:
    with pytest.raises(UsageError) as caught:
        check_devices([A, B, A], {SHARE_VARIABLE: "0"})
    assert str(caught.value) == (
        "3 ranks on n07 for 2 GPUs (ranks 0, 2 would share one), and NCCL accepts one rank per GPU:"
        f" start fewer ranks there, or set {SHARE_VARIABLE}=1 to let them share (NCCL 2.30 or"
        " newer)"
    )
    with pytest.raises(UsageError, match=r"2\.30 or newer, which this one, 22705, is not"):
        check_devices([A, B, A], {SHARE_VARIABLE: "1"})
    newer = [replace(each, version=23000) for each in (A, B, A)]
    check_devices(newer, {SHARE_VARIABLE: "1"})


def test_the_first_rank_without_a_gpu_is_named() -> None:
    bare = FoundDevices("torch has no CUDA", "n08")
    with pytest.raises(NotSupported, match="device memory: rank 1 on n08: torch has no"):
        check_devices([A, bare, bare], {})
    with pytest.raises(NotSupported, match=r"device memory: torch .*; use 'mpi' or 'c10d'"):
        check_devices([bare], {})


def test_versions_of_nccl_must_agree() -> None:
    with pytest.raises(
        UsageError, match="NCCL differs between the ranks: 22705 on rank 0, 22105 on rank 1"
    ):
        check_devices([A, replace(B, version=22105)], {})


@pytest.mark.skipif(missing() == "", reason="there is a GPU")
def test_a_job_without_gpus_ends_with_one_line(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text("import pydist; pydist.init(transport='nccl')")
    result = subprocess.run(
        [sys.executable, "-m", "pydist.launch", "2", "gloo", str(script)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env=child_environment(),
        cwd=tmp_path,  # where no source tree hides the installed package
    )
    assert result.returncode == NotSupported.exit_code
    (line,) = result.stderr.splitlines()
    assert "transport 'nccl' carries device memory: rank 0 on " in line
    reason = "has no CUDA" if torch.version.cuda is None else "sees no GPU"
    assert reason in line
