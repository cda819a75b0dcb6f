"""Tests of tools/check_spills.py on ptxas-style reports; tests/native/spills uses nvcc's own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[2] / "tools"


def kernel(name: str, arch: str, frame: int = 0, stores: int = 0, callee: str = "") -> str:
    lines = [f"ptxas info    : Compiling entry function '{name}' for 'sm_{arch}'"]
    for function, (stack, bytes_) in {name: (0, 0), callee or name: (frame, stores)}.items():
        spilled = f"{bytes_} bytes spill stores, {bytes_} bytes spill loads"
        lines.append(f"ptxas info    : Function properties for {function}")
        lines.append(f"    {stack} bytes stack frame, {spilled}")
    return "\n".join([*lines, "ptxas info    : Used 40 registers, used 0 barriers"])


def check(folder: Path, *sources: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TOOLS / "check_spills.py"), str(folder)]
    command += ["--sources", *sources, "--arch", "80", "90"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def write(folder: Path, source: str, *kernels: str) -> None:
    (folder / "csrc").mkdir(exist_ok=True)
    (folder / "csrc" / f"{source}.o.ptxas").write_text("\n".join(kernels) + "\n")


def test_kernels_in_registers_pass(tmp_path):
    write(tmp_path, "a.cu", kernel("one", "80"), kernel("one", "90"))
    write(tmp_path, "b.cu", kernel("two", "80"), kernel("two", "90"))
    write(tmp_path, "old.cu", kernel("gone", "80", frame=8))  # its source no longer exists
    found = check(tmp_path, "a.cu", "b.cu")
    assert (found.returncode, found.stderr) == (0, "")
    assert found.stdout == ("2 kernels from 2 files for sm_80, sm_90: no spill, no local memory\n")


@pytest.mark.parametrize(
    ("reported", "message"),
    [
        (
            {"frame": 16, "stores": 24},
            "sm_90: one: 24 bytes of spill stores, 24 of spill loads",
        ),
        ({"frame": 256}, "sm_90: one: 0 bytes of spill stores, 0 of spill loads, 256 of stack"),
        ({"frame": 8, "callee": "part"}, "sm_90: one, in its call of part: 0 bytes"),
    ],
)
def test_local_memory_fails_and_names_kernel_and_architecture(tmp_path, reported, message):
    write(tmp_path, "a.cu", kernel("one", "80"), kernel("one", "90", **reported))
    found = check(tmp_path, "a.cu")
    assert found.returncode == 1
    assert message in found.stderr
    assert "sm_80" not in found.stderr


def test_what_was_not_compiled_or_not_reported_is_no_success(tmp_path):
    write(tmp_path, "a.cu", kernel("one", "80"), kernel("two", "80"), kernel("two", "90"))
    found = check(tmp_path, "a.cu")
    assert found.returncode == 1
    assert "sm_90: 1 kernels missing, such as one" in found.stderr
    assert check(tmp_path, "a.cu", "b.cu").returncode == 2
    write(tmp_path, "a.cu", "ptxas info    : 0 bytes gmem")
    assert "the 1 reports contain no kernel" in check(tmp_path, "a.cu").stderr


def test_the_launcher_keeps_the_report_and_passes_on_the_rest(tmp_path):
    compiler = tmp_path / "nvcc"
    said = kernel("one", "80").replace("\n", "\\n")
    compiler.write_text(f'#!/bin/sh\nprintf "{said}\\nwarning: unused\\n" >&2\nexit 3\n')
    compiler.chmod(0o755)
    target = tmp_path / "a.cu.o"
    command = [str(TOOLS / "ptxas_report"), str(compiler), "-c", "a.cu", "-o", str(target)]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (found.returncode, found.stderr) == (3, "warning: unused\n")
    assert "entry function 'one'" in (tmp_path / "a.cu.o.ptxas").read_text()
