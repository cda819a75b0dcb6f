"""Tests of cmake/PydistCuda.cmake: the architectures that the CUDA kernels are compiled for."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

FILE = Path(__file__).parents[2] / "cmake/PydistCuda.cmake"

pytestmark = pytest.mark.skipif(shutil.which("cmake") is None, reason="needs cmake")


def configured(folder: Path, code: str) -> tuple[int, str]:
    """Runs functions of the file; returns cmake's exit status and all that it has printed."""
    script = folder / "run.cmake"
    script.write_text(f"set(PYDIST_CUDA OFF)\ninclude({FILE})\n{code}\n")
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    found = subprocess.run(
        ["cmake", "-P", script], capture_output=True, text=True, env=environment, check=False
    )
    return found.returncode, " ".join((found.stdout + found.stderr).split())


@pytest.mark.parametrize(
    ("capabilities", "architectures", "left_out"),
    [
        ("8.0 9.0 9.0", "80;90", ""),
        ("7.5 8.0", "80", "7.5"),
        ("7.0", "80", "7.0"),
        ("10.0 12.0", "100;120", ""),
        ("", "80", ""),
    ],
)
def test_the_gpus_in_sight_that_can_run_the_kernels(
    tmp_path: Path, capabilities: str, architectures: str, left_out: str
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\nprintf '%s\\n' {capabilities}\n")
    program.chmod(0o755)
    code = 'pydist_default_architectures(found)\nmessage("architectures: ${found}.")'
    status, said = configured(tmp_path, code)
    assert status == 0
    assert f"architectures: {architectures}." in said
    expected = f"no kernels for the GPU of compute capability {left_out}: they need 8.0 or later"
    assert (expected in said) == bool(left_out)


@pytest.mark.parametrize("named", ["75", "70-virtual", "all", "all-major"])
def test_architectures_without_the_instructions_are_refused(tmp_path: Path, named: str) -> None:
    status, said = configured(tmp_path, f"pydist_check_architectures(80 {named})")
    assert status != 0
    assert f"has {named}: the kernels need compute capability 8.0 or later" in said


@pytest.mark.parametrize("named", ["", "80-real 90", "90a", "100 120f", "native"])
def test_others_are_accepted(tmp_path: Path, named: str) -> None:
    assert configured(tmp_path, f"pydist_check_architectures({named})")[0] == 0
