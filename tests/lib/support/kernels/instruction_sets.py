"""Comparison of a script's output between the instruction sets of the native kernels."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np


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
