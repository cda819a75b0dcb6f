"""Instruction sets: scripts whose output is compared between them, and dtypes that need one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from pydist.backend.problem import onednn_has

OF_ONEDNN = [
    torch.float32,
    pytest.param(
        torch.bfloat16,
        marks=pytest.mark.skipif(
            not onednn_has(torch.bfloat16), reason="oneDNN has no bfloat16 on this processor"
        ),
    ),
]
"""The dtypes that oneDNN may have, for tests of its choice; torch's own kernels have the others."""


def assert_all_agree(script: str, rtol: float) -> None:
    """Runs a script with each instruction set; it prints `native.cpu_isa()` and then numbers.

    Args:
        script: Python source.
        rtol: relative tolerance against the numbers of the base set.
    """
    results: dict[str, list[float]] = {}
    for isa in ["base", "x86-64-v3", "x86-64-v4"]:
        done = subprocess.run(
            [sys.executable, "-c", script],
            cwd=Path(__file__).parent,  # not the checkout, whose sources would hide the package
            env={"PYDIST_ISA": isa, "PYTHONPATH": ":".join(filter(None, sys.path))},
            check=True,
            capture_output=True,
            text=True,
        )
        name, *values = done.stdout.split()
        results[isa] = [float(value) for value in values]
        if isa == "base":
            assert name == "base"
    for isa, sums in results.items():
        np.testing.assert_allclose(sums, results["base"], rtol=rtol, err_msg=isa)
