#!/usr/bin/env python3
"""Checks that C++ includes run only the way the architecture allows.

    core <- kernels <- cpu, cuda;  launch -> core;  comm -> core, cpu;  bindings see all.

No file includes torch, MPI or NCCL; CUDA headers and pybind11 stay in the folders made for them.
Imports of Python are checked by import-linter (see pyproject.toml).

Usage: tools/check_layers.py [csrc folder]
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

# What a kernel body needs to know of its launchers: the concept it fulfils, no launcher itself.
BODY_CONTRACT = {"launch/host_device.hpp", "launch/run_body.hpp", "launch/decomposition.hpp"}
# folder -> the folders (or single headers) that it may include, besides its own
ALLOWED: dict[str, set[str]] = {
    "core": set(),
    "io": {"core"},
    "kernels": {"core", *BODY_CONTRACT},
    "launch": {"core"},
    "cpu": {"core", "kernels", "launch"},
    "cuda": {"core", "kernels", "launch"},
    "comm": {"core", "kernels", "launch", "cpu"},
    "exchange": {"core", "comm", "cpu", "cuda"},
    "watchdog": {"core"},
    "bindings": {"core", "io", "kernels", "launch", "cpu", "cuda", "comm", "exchange", "watchdog"},
}
FORBIDDEN = re.compile(r"^(torch|ATen|c10|caffe2)/|^(mpi|nccl)(\.h|/)")
# header -> the only folders that may include it
RESERVED = {
    re.compile(r"^cuda_(fp16|bf16)\.h"): {"cuda", "launch", "kernels"},
    re.compile(r"^(cuda(?!_fp16|_bf16)|cub|thrust|cooperative_groups|nvtx3?)"): {"cuda", "launch"},
    re.compile(r"^(pybind11/|Python\.h)"): {"bindings"},
}
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')
SOURCES = {".hpp", ".cpp", ".cuh", ".cu", ".h"}


def check_include(folder: str, bracket: str, header: str) -> str | None:
    """What is wrong with a file in `folder` including `header`, or None."""
    if FORBIDDEN.match(header):
        return f"{header}: no native file includes torch, MPI or NCCL"
    for pattern, folders in RESERVED.items():
        if bracket == "<" and pattern.match(header) and folder not in folders:
            return f"{header}: only for {', '.join(sorted(folders))}"
    if bracket == "<":
        return None
    target = header.split("/", maxsplit=1)[0]
    if "/" not in header or target not in ALLOWED:
        return f'"{header}": write it as folder/file, with a folder of csrc'
    if target != folder and not {target, header} & ALLOWED[folder]:
        allowed = ", ".join(sorted(ALLOWED[folder])) or "nothing else"
        return f"{header}: {folder} may include {allowed}"
    return None


def check(root: Path) -> list[str]:
    """All violations below `root`, as `file:line: what is wrong`."""
    problems = []
    for path in sorted(root.rglob("*")):
        if path.suffix not in SOURCES:
            continue
        folder = path.relative_to(root).parts[0]
        if folder not in ALLOWED:
            problems.append(f"{path}:1: folder {folder} has no place in the layers")
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            match = INCLUDE.match(line)
            if match and (problem := check_include(folder, *match.groups())):
                problems.append(f"{path}:{number}: {problem}")
    return problems


def main() -> int:
    """Prints the violations; 1 if there are any."""
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1] / "csrc"
    problems = check(root)
    print("\n".join(problems) if problems else "layers: ok")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
