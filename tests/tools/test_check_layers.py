"""The layer check finds each kind of forbidden include, and none in the tree itself."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
check = runpy.run_path(str(ROOT / "tools" / "check_layers.py"))["check"]


def test_the_tree_keeps_its_layers():
    assert check(ROOT / "csrc") == []


@pytest.mark.parametrize(
    ("folder", "include", "complaint"),
    [
        ("core", '"kernels/pack.hpp"', "core may include nothing else"),
        ("kernels", '"cpu/pack.hpp"', "kernels may include core"),
        ("kernels", '"launch/cpu.hpp"', "kernels may include core"),
        ("cpu", "<torch/extension.h>", "torch"),
        ("comm", "<mpi.h>", "MPI"),
        ("comm", "<nccl.h>", "NCCL"),
        ("kernels", "<cuda_runtime.h>", "only for cuda, launch"),
        ("core", "<cuda_fp16.h>", "only for cuda, kernels, launch"),
        ("core", "<pybind11/pybind11.h>", "only for bindings"),
        ("core", '"box.hpp"', "folder/file"),
        ("attic", "<vector>", "no place in the layers"),
    ],
)
def test_a_forbidden_include_is_named(tmp_path, folder, include, complaint):
    source = tmp_path / folder / "file.hpp"
    source.parent.mkdir()
    source.write_text(f"#pragma once\n#include {include}\n")
    (problem,) = check(tmp_path)
    assert complaint in problem


def test_allowed_includes_pass(tmp_path):
    for folder in ("core", "cpu", "cuda", "bindings"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "file.hpp").write_text('#include <vector>\n#include "core/box.hpp"\n')
    assert check(tmp_path) == []
