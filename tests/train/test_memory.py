"""Memory that a step frees stays in the process for the next one."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys, torch
from pydist.train.memory import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        torch.ones(8 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults()
print(faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library than glibc")
def test_large_tensors_cost_no_page_faults_the_second_time(tmp_path):
    counts = [
        int(
            subprocess.run(
                [sys.executable, "-c", PROGRAM, mode],
                cwd=tmp_path,
                capture_output=True, text=True, timeout=60, check=True,
            ).stdout
        )
        for mode in ("default", "keep")
    ]  # fmt: skip
    assert counts[1] < counts[0] / 10
