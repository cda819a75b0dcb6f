"""Tests of tools/gpu_check.sh: it reports a missing GPU, or runs and counts all parts."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Copies the script into a tree in which every part is a line of shell."""
    for name in ("gpu_check.sh", "gpu_summary.py"):
        (tmp_path / "tools").mkdir(exist_ok=True)
        shutil.copy(ROOT / "tools" / name, tmp_path / "tools" / name)
    native = tmp_path / "build/dev/tests/native/gpu"
    native.mkdir(parents=True)
    program(tmp_path / "tools/dev-build", 'echo "$@"')
    program(native / "pydist_gpu_tests", "echo 40 passed, 0 failed")
    program(tmp_path / "bin/nvidia-smi", "echo 'NVIDIA H200, 580.159.04, 9.0'")
    program(tmp_path / "bin/compute-sanitizer", "echo '========= ERROR SUMMARY: 0 errors'")
    program(
        tmp_path / "bin/python3",
        f'case $1 in tools/*) exec "{sys.executable}" "$@" ;; '
        '-m) echo "$@"; echo "3 passed, 1 skipped" ;; esac',
    )
    return tmp_path


def program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def run(tree: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    kept = {"PATH": f"{tree / 'bin'}:{os.environ['PATH']}", "HOME": str(tree), "COMMIT": "abc"}
    command = ["sh", str(tree / "tools/gpu_check.sh"), *arguments]
    return subprocess.run(
        command, env={**kept, **environment}, capture_output=True, text=True, check=False
    )


def parts_of(folder: Path) -> dict[str, dict]:
    found = json.loads((folder / "gpu_check.json").read_text())["parts"]
    return {part["name"]: part for part in found}


TOGETHER = {
    "tests_kernels", "tests_operators", "tests_steps", "tests_ranks", "tests_transports",
    "tests_split_operators", "memcheck", "racecheck", "initcheck", "synccheck",
}  # fmt: skip
"""Parts that run at the same time, and end in any order."""
BEFORE = ["build", "kernels"]
AFTER = [
    "tests_profile", "gpu_step", "gpu_boundary", "gpu_pack", "gpu_overlap", "gpu_shards",
    "gpu_unet", "gpu_transports", "gpu_whole", "gpu_input",
]  # fmt: skip
PARTS = [*BEFORE, *TOGETHER, *AFTER]


def check_order(parts: list[str]) -> None:
    assert parts[: len(BEFORE)] == BEFORE
    assert set(parts[len(BEFORE) : -len(AFTER)]) == TOGETHER
    assert parts[-len(AFTER) :] == AFTER


def test_every_gpu_benchmark_is_run():
    scripts = {path.stem for path in (ROOT / "benchmarks/python").glob("gpu_*.py")}
    assert scripts == {name for name in PARTS if name.startswith("gpu_")}


def test_every_gpu_test_is_run(tree):
    run(tree, str(tree / "out"))
    said = "".join((tree / f"out/logs/{name}.log").read_text() for name in PARTS)
    modules = re.findall(r"tests/gpu/(\w+)\.py", said)
    assert sorted(modules) == sorted(p.stem for p in (ROOT / "tests/gpu").glob("test_*.py"))


def test_without_a_gpu_it_is_one_line_and_exit_code_2(tree):
    program(tree / "bin/nvidia-smi", "exit 9")
    found = run(tree, str(tree / "out"))
    assert found.returncode == 2
    assert (found.stdout, found.stderr) == ("", "gpu_check: no GPU (nvidia-smi finds none)\n")
    assert run(tree).returncode == 2


def test_all_parts_are_run_and_counted(tree):
    found = run(tree, str(tree / "out"))
    assert found.returncode == 0, found.stdout + found.stderr
    result = json.loads((tree / "out/gpu_check.json").read_text())
    assert result["device"] == "NVIDIA H200"
    assert (result["driver"], result["compute_capability"]) == ("580.159.04", "9.0")
    assert result["commit"] == "abc"
    parts = parts_of(tree / "out")
    check_order(list(parts))
    assert {part["verdict"] for part in parts.values()} == {"passed"}
    assert parts["kernels"]["passed"] == 40
    assert (parts["tests_ranks"]["passed"], parts["tests_ranks"]["skipped"]) == (3, 1)
    assert parts["memcheck"]["errors"] == 0
    assert "-DPYDIST_CUDA_ARCHITECTURES=90" in (tree / "out/logs/build.log").read_text()
    assert "22 of 22 parts passed" in found.stdout


def test_parts_can_be_run_alone(tree):
    found = run(tree, str(tree / "out"), GPU_CHECK_PARTS="gpu_step tests_ranks")
    assert found.returncode == 0, found.stdout + found.stderr
    assert list(parts_of(tree / "out")) == ["tests_ranks", "gpu_step"]


def test_a_failure_is_shown_and_does_not_end_it(tree):
    program(tree / "bin/compute-sanitizer", "echo ERROR SUMMARY: 2 errors; exit 9")
    found = run(tree, str(tree / "out"))
    assert found.returncode == 1
    parts = parts_of(tree / "out")
    check_order(list(parts))
    assert (parts["racecheck"]["verdict"], parts["racecheck"]["errors"]) == ("FAILED", 2)
    assert parts["gpu_input"]["verdict"] == "passed"
    assert "18 of 22 parts passed" in found.stdout


def test_what_is_out_of_time_still_says_what_it_has_found(tree):
    program(tree / "tools/dev-build", "trap 'echo found; exit 2' INT; sleep 60 & wait")
    run(tree, str(tree / "out"), GPU_CHECK_SECONDS="6")
    assert parts_of(tree / "out")["build"]["verdict"] == "out of time"
    assert (tree / "out/logs/build.log").read_text() == "found\n"


def test_what_there_is_no_time_for_is_told(tree):
    program(tree / "tools/dev-build", "exec sleep 60")
    found = run(tree, str(tree / "out"), GPU_CHECK_SECONDS="6")
    assert found.returncode == 1
    parts = parts_of(tree / "out")
    assert parts["build"]["verdict"] == "out of time"
    assert {part["verdict"] for name, part in parts.items() if name != "build"} == {"no time"}
