"""Tests of the layer check: it finds each kind of forbidden include, and none in the tree."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOL = runpy.run_path(str(ROOT / "tools" / "check_layers.py"))
check = TOOL["check"]


def write(root: Path, path: str, *includes: str) -> None:
    source = root / path
    source.parent.mkdir(parents=True, exist_ok=True)
    source.write_text("\n".join(["#pragma once", *(f"#include {name}" for name in includes), ""]))


def test_the_tree_keeps_its_layers():
    assert check(ROOT / "csrc") == []


@pytest.mark.parametrize(
    ("path", "include", "complaint"),
    [
        ("core/file.hpp", '"ops/pack/body.hpp"', "core may include nothing else"),
        ("core/file.hpp", '"launch/host_device.hpp"', "core may include nothing else"),
        ("launch/file.hpp", '"ops/common/half.hpp"', "launch may include core"),
        ("isa/file.hpp", '"ops/conv/isa_tables.hpp"', "isa may include core, launch/"),
        ("ops/common/file.hpp", '"launch/cpu.hpp"', "ops/common may include core, launch/"),
        ("ops/common/file.hpp", '"ops/pool/windows.hpp"', "ops/common may include core, launch/"),
        ("ops/pool/body.hpp", '"launch/cpu.hpp"', "bodies of ops/pool may include bodies of"),
        ("ops/pool/body.hpp", '"ops/pool/cpu_plan.hpp"', "bodies of ops/pool may include"),
        ("ops/pool/body.hpp", '"isa/isa.hpp"', "bodies of ops/pool may include"),
        ("ops/pool/body.hpp", '"ops/conv/problem.hpp"', "bodies of ops/pool may include"),
        ("ops/pool/cpu.cpp", '"ops/conv/problem.hpp"', "CPU code of ops/pool may include"),
        ("ops/pool/cpu.cpp", '"ops/pool/cuda.cuh"', "CPU code of ops/pool may include"),
        ("ops/pool/cpu.cpp", '"bindings/on_device.hpp"', "CPU code of ops/pool may include"),
        ("ops/pool/cuda.cu", '"ops/pool/cpu_plan.hpp"', "CUDA code of ops/pool may include"),
        ("ops/pool/cuda.cu", '"ops/pool/isa_tables.hpp"', "CUDA code of ops/pool may include"),
        ("ops/pool/isa_sum.cpp", '"launch/cpu.hpp"', "ISA loops of ops/pool may include"),
        ("ops/pool/isa_sum.cpp", '"isa/isa.hpp"', "ISA loops of ops/pool may include"),
        (
            "ops/pool/isa_sum.cpp",
            "<algorithm>",
            "so possible are cstdint",
        ),
        ("isa/vectors.hpp", "<vector>", "so possible are cstdint"),
        ("ops/pool/bind.cpp", '"ops/pool/cpu_plan.hpp"', "bindings of ops/pool may include"),
        ("ops/pool/bind.cpp", '"comm/local/hub.hpp"', "bindings of ops/pool may include"),
        ("bindings/file.cpp", '"ops/pool/kernels.hpp"', "bindings may include"),
        ("comm/local/file.hpp", '"comm/driver/cuda_driver.hpp"', "comm/local may include core"),
        ("comm/driver/file.hpp", '"comm/nccl/abi.hpp"', "comm/driver may include core"),
        ("comm/nccl/file.hpp", '"comm/ipc/channel.hpp"', "comm/nccl may include comm/driver, core"),
        ("ops/pool/cpu.cpp", "<torch/extension.h>", "torch"),
        ("comm/local/file.cpp", "<mpi.h>", "MPI"),
        ("comm/nccl/file.cpp", "<nccl.h>", "NCCL"),
        ("ops/pool/body.hpp", "<cuda_runtime.h>", "only for CUDA code, launch"),
        ("ops/pool/cpu.cpp", "<cuda_runtime.h>", "only for CUDA code, launch"),
        ("core/file.hpp", "<cuda_fp16.h>", "only for CUDA code, launch, ops/common"),
        ("core/file.hpp", "<pybind11/pybind11.h>", "only for bindings"),
        ("ops/pool/kernels.hpp", "<pybind11/pybind11.h>", "only for bindings"),
        ("core/file.hpp", '"box.hpp"', "folder/file"),
        ("core/file.hpp", '"ops/half.hpp"', "folder/file"),
        ("attic/file.hpp", "<vector>", "no place in the layers"),
        ("ops/file.hpp", "<vector>", "no place in the layers"),
        ("comm/file.hpp", "<vector>", "no place in the layers"),
        ("comm/attic/file.hpp", "<vector>", "no place in the layers"),
    ],
)
def test_a_forbidden_include_is_named(tmp_path, path, include, complaint):
    write(tmp_path, path, include)
    (problem,) = check(tmp_path)
    assert complaint in problem


def test_allowed_includes_pass(tmp_path):
    everywhere = ("<cstdint>", '"launch/host_device.hpp"', '"ops/common/half.hpp"')
    for path in ("ops/pool/body.hpp", "ops/pool/cpu.cpp", "ops/pool/cuda.cu", "ops/pool/bind.cpp"):
        write(tmp_path, path, *everywhere, '"core/box.hpp"', '"ops/pool/windows.hpp"')
    write(tmp_path, "ops/pool/isa_sum.cpp", *everywhere, '"ops/pool/isa_tables.hpp"')
    write(tmp_path, "ops/pool/cpu_max.cpp", '"isa/isa.hpp"', '"ops/pool/isa_tables.hpp"')
    write(tmp_path, "ops/pool/bind_max.cpp", "<pybind11/pybind11.h>", '"bindings/on_device.hpp"')
    write(tmp_path, "ops/pool/cuda.cuh", "<cuda_runtime.h>", '"launch/cuda.cuh"')
    write(tmp_path, "comm/ipc/file.hpp", '"comm/driver/cuda_driver.hpp"', '"core/errors.hpp"')
    write(tmp_path, "bindings/file.cpp", '"comm/ipc/channel.hpp"', '"watchdog/watcher.hpp"')
    assert check(tmp_path) == []


def test_kernels_are_launched_in_one_file(tmp_path):
    for path in ("launch/cuda.cuh", "ops/pool/cuda.cu"):
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).write_text("// (<<<>>>)\nrun<<<static_cast<int>(n), 32>>>(body);\n")
    (problem,) = check(tmp_path)
    assert problem.endswith("cuda.cu:2: kernels are launched in launch/cuda.cuh alone")


SOURCES = [path for path in (ROOT / "csrc").rglob("*") if path.suffix in TOOL["SOURCES"]]


def test_every_file_begins_with_what_it_is():
    assert [str(path) for path in SOURCES if not path.read_text().startswith("// ")] == []


def test_the_proofs_that_comments_name_exist():
    named = {
        path
        for source in SOURCES
        for path in re.findall(r"\b(?:tests|docs|tools|csrc)/[\w/]+\.\w+", source.read_text())
    }
    assert len(named) > 20
    assert sorted(path for path in named if not (ROOT / path).exists()) == []
