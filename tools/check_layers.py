#!/usr/bin/env python3
"""Checks that C++ includes follow the layers of the architecture.

    core <- launch, ops/common, isa <- the bodies of a family <- its CPU and CUDA code, its bindings
    core <- comm/driver <- comm/nccl, comm/ipc;  core <- comm/local, comm/board, io, watchdog
    io, the opening of libraries in comm/driver <- packs <- preload
    bindings may include all of these except the families, which have their own bindings.

A family (a folder in csrc/ops) includes nothing of another one. No file includes torch, MPI or
NCCL; CUDA headers and pybind11 stay in the parts made for them, and only launch/cuda.cuh launches
kernels (<<<>>>). import-linter checks the imports of Python (see pyproject.toml).

Usage: tools/check_layers.py [csrc folder]
"""

from __future__ import annotations

import re
import sys
from pathlib import Path, PurePosixPath

# A kernel body needs only the concept that it satisfies, and no launcher.
BODY_CONTRACT = {"launch/host_device.hpp", "launch/run_body.hpp", "launch/decomposition.hpp"}

# The parts of a family, by the prefix of a file's name; all other files are its bodies.
PARTS = {"bind": "bindings", "cpu": "CPU code", "cuda": "CUDA code", "isa_": "ISA loops"}
BODIES = "bodies"
# part of a family -> what it may include, besides the bodies of its family
ALLOWED_IN_FAMILY = {
    BODIES: {"core", "ops/common", "launch/device.hpp", *BODY_CONTRACT},
    "ISA loops": {"isa/tables.hpp", "isa/vectors.hpp", "ops/common", "launch/host_device.hpp"},
    "CPU code": {"core", "ops/common", "launch", "isa", "ISA loops"},
    "CUDA code": {"core", "ops/common", "launch"},
    "bindings": {"core", "ops/common", "launch", "bindings"},
}
# folder -> the folders (or single headers) that it may include, besides its own
ALLOWED: dict[str, set[str]] = {
    "core": set(),
    "io": {"core"},
    "watchdog": {"core"},
    "packs": {"core", "io", "comm/driver/dynamic_library.hpp"},
    "preload": {"core", "packs"},
    "launch": {"core"},
    "ops/common": {"core", *BODY_CONTRACT},
    "isa": {"core", "ops/common", *BODY_CONTRACT},
    "comm/board": {"core"},
    "comm/driver": {"core"},
    "comm/local": {"core"},
    "comm/ipc": {"core", "comm/driver"},
    "comm/nccl": {"core", "comm/driver"},
    "bindings": {
        *("core", "io", "packs", "watchdog", "launch", "isa"),
        *("comm/board", "comm/driver", "comm/ipc", "comm/local", "comm/nccl"),
    },
}
FORBIDDEN = re.compile(r"^(torch|ATen|c10|caffe2)/|^(mpi|nccl)(\.h|/)")
# header -> the only places that may include it: folders, and parts of families
RESERVED = {
    re.compile(r"^cuda_(fp16|bf16)\.h"): {"CUDA code", "launch", "ops/common"},
    re.compile(r"^(cuda(?!_fp16|_bf16)|cub|thrust|cooperative_groups|nvtx3?)"): {
        "CUDA code",
        "launch",
    },
    re.compile(r"^(pybind11/|Python\.h)"): {"bindings"},
}
# ISA loops are compiled once per instruction set. An inline function of a header, compiled for
# AVX-512 and not inlined, could be linked where an older CPU calls it. So these files include no
# standard library header with functions that they might call; tools/check_isa_objects.py checks
# the objects.
ISA_LOOPS = "ISA loops"
ISA_HEADERS = {"cstdint", "immintrin.h", "type_traits", "utility"}
PER_ISA = {"isa/tables.hpp", "isa/vectors.hpp"}
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')
LAUNCH = re.compile(r"\w<<<")
SOURCES = {".hpp", ".cpp", ".cuh", ".cu", ".h"}


def place_of(path: str) -> tuple[str, str]:
    """Returns the folder of a file and, for a family's file, its part (else an empty string)."""
    *folders, name = PurePosixPath(path).parts
    if folders[:1] == ["ops"] and folders[1:] != ["common"] and len(folders) == 2:
        part = next((part for start, part in PARTS.items() if name.startswith(start)), BODIES)
        return "/".join(folders), part
    depth = 2 if folders[:1] in (["ops"], ["comm"]) else 1
    return "/".join(folders[:depth]), ""


def may_include(place: tuple[str, str], header: str) -> set[str] | None:
    """Returns None if a file there may include a header of csrc, else what it may include."""
    folder, part = place
    target, target_part = place_of(header)
    if not part:
        fine = target == folder or bool({target, header} & ALLOWED[folder])
        return None if fine else ALLOWED[folder]
    allowed = ALLOWED_IN_FAMILY[part]
    if target == folder:
        fine = target_part in (BODIES, part) or target_part in allowed
    else:
        fine = not target_part and bool({target, header} & allowed)
    return None if fine else {f"bodies of {folder}", *allowed}


def check_system_header(path: str, header: str) -> str | None:
    """Returns the problem with the file at `path` below csrc including `<header>`, or None."""
    folder, part = place_of(path)
    for pattern, places in RESERVED.items():
        if pattern.match(header) and not {folder, part} & places:
            return f"{header}: only for {', '.join(sorted(places))}"
    if (part == ISA_LOOPS or path in PER_ISA) and header not in ISA_HEADERS:
        possible = ", ".join(sorted(ISA_HEADERS))
        return f"{header}: compiled per instruction set, so possible are {possible}"
    return None


def check_include(path: str, bracket: str, header: str) -> str | None:
    """Returns the problem with the file at `path` below csrc including `header`, or None."""
    if FORBIDDEN.match(header):
        return f"{header}: no native file includes torch, MPI or NCCL"
    if bracket == "<":
        return check_system_header(path, header)
    target, target_part = place_of(header)
    if "/" not in header or not (target in ALLOWED or target_part):
        return f'"{header}": write it as folder/file, with a folder of csrc'
    folder, part = place = place_of(path)
    allowed = may_include(place, header)
    if allowed is None:
        return None
    where = f"{part} of {folder}" if part else folder
    return f"{header}: {where} may include {', '.join(sorted(allowed)) or 'nothing else'}"


def check_file(path: str, text: str) -> list[tuple[int, str]]:
    """Returns the violations in one file, with their lines."""
    problems = []
    for number, line in enumerate(text.splitlines(), start=1):
        match = INCLUDE.match(line)
        if match and (problem := check_include(path, *match.groups())):
            problems.append((number, problem))
        if LAUNCH.search(line) and path != "launch/cuda.cuh":
            problems.append((number, "kernels are launched in launch/cuda.cuh alone"))
    return problems


def check(root: Path) -> list[str]:
    """Returns all violations below `root`, as `file:line: problem`."""
    problems = []
    for path in sorted(root.rglob("*")):
        if path.suffix not in SOURCES:
            continue
        name = path.relative_to(root).as_posix()
        place = place_of(name)
        if not (place[0] in ALLOWED or place[1]):
            problems.append(f"{path}:1: folder {place[0]} has no place in the layers")
            continue
        found = check_file(name, path.read_text(encoding="utf-8"))
        problems += [f"{path}:{number}: {problem}" for number, problem in found]
    return problems


def main() -> int:
    """Prints the violations; 1 if there are any."""
    root = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[1] / "csrc"
    problems = check(root)
    print("\n".join(problems) if problems else "layers: ok")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
