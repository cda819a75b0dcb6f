"""Tests that docs/environment.md lists exactly the environment variables that the code reads."""

from __future__ import annotations

import ast
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PRINT = "from pydist._loader import native; print(native.cpu_isa())"
NAME = re.compile(r"PYDIST_[A-Z_]*[A-Z]")


def read_by_python() -> set[str]:
    trees = (ast.parse(path.read_text()) for path in (ROOT / "pydist").rglob("*.py"))
    texts = (node.value for tree in trees for node in ast.walk(tree) if is_text(node))
    return {text for text in texts if NAME.fullmatch(text)}


def is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def matches(pattern: str, *paths: Path) -> set[str]:
    return {name for path in paths for name in re.findall(pattern, path.read_text())}


def test_the_page_lists_all_and_no_others() -> None:
    read = read_by_python()
    read |= matches(r'getenv\("(PYDIST_\w+)"\)', *(ROOT / "csrc").rglob("*.cpp"))
    read |= matches(r'env = "(PYDIST_\w+)"', ROOT / "pyproject.toml")
    read |= matches(r"\$\{(PYDIST_\w+)", ROOT / "tools" / "bootstrap")
    rows = (ROOT / "docs" / "environment.md").read_text().splitlines()
    listed = {
        name for row in rows if row.startswith("| `") for name in NAME.findall(row.split("|")[1])
    }
    assert listed == read


X86_ONLY = pytest.mark.skipif(
    platform.machine() != "x86_64", reason="other processors have one instruction set"
)


@X86_ONLY
@pytest.mark.parametrize("value", ["base", "x86-64-v3", "x86_64_v3"])
def test_pydist_isa_lowers_the_instruction_set(value: str) -> None:
    ended = run_with_isa(value)
    assert ended.stdout.strip() in ("base", value.replace("-", "_")), ended.stderr


@X86_ONLY
def test_an_unknown_instruction_set_is_refused() -> None:
    said = "PYDIST_ISA=avx512: possible are base, x86_64_v3 and x86_64_v4"
    assert said in run_with_isa("avx512", "-m", "pydist", "env").stderr.splitlines()[0]
    assert said in run_with_isa("avx512", "-c", "import pydist; pydist.init()").stderr


def run_with_isa(value: str, *program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *(program or ("-c", PRINT))],
        cwd=Path(__file__).parent,  # here no folder named pydist hides the installed package
        env={**os.environ, "PYDIST_ISA": value, "PYTHONPATH": ":".join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
