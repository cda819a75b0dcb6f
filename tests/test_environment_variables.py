"""Tests that docs/environment.md lists exactly the environment variables that the code uses."""

from __future__ import annotations

import ast
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PRINT = "from pydist._loader import native; print(native.cpu_isa())"
OWN = re.compile(r"PYDIST_[A-Z_]*[A-Z]")
NAME = re.compile(r"(?!SC_)[A-Z][A-Z0-9]*(_[A-Za-z0-9_]+)+")  # SC_PAGE_SIZE is for os.sysconf
NATIVE = (".cpp", ".hpp", ".cu", ".cuh")
_SHELL = r"\$\{([A-Z]\w+):?[-?+]"
PATTERNS = {
    ".toml": r'env = "(\w+)"', ".cmake": r"\$ENV\{(\w+)\}", ".sh": _SHELL, "": _SHELL,
}  # fmt: skip
FOLDERS = {
    "library": ("pydist", "csrc", "cmake"),
    "launcher": ("pydist/launch",),
    "build": ("pyproject.toml",),
    "tools": ("tools",),
    "tests": ("tests",),
    "benchmarks": ("benchmarks/native", "benchmarks/python"),
}


def files_of(user: str) -> Iterator[Path]:
    """Yields the files of a user of variables; those of the launcher are not the library's."""
    for folder in FOLDERS[user]:
        path = ROOT / folder
        found = [path] if path.is_file() else sorted(path.rglob("*"))
        for each in found:
            inside = str(each.relative_to(ROOT))
            is_text = each.suffix in ("", ".py", ".sh", ".toml", ".cmake", *NATIVE)
            launches = user == "library" and inside.startswith("pydist/launch/")
            if each.is_file() and is_text and not launches and each != Path(__file__).resolve():
                yield each


def texts_of(code: str) -> set[str]:
    nodes = ast.walk(ast.parse(code))
    return {n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)}


def used_in(path: Path, user: str) -> set[str]:
    """Returns the variables that a file uses; in shells, those that may be unset."""
    if path.suffix == ".py":
        return used_in_python(path.read_text(), user)
    pattern = PATTERNS.get(path.suffix, r'getenv\("(\w+)"\)')
    return set(re.findall(pattern, path.read_text(errors="ignore")))


def used_in_python(code: str, user: str) -> set[str]:
    """Returns the constants of the form of a name, where the code mentions `environ`.

    Tests, benchmarks and tools have many other constants, so there a foreign name counts only if
    it is read by itself.
    """
    reads = bool(re.search(r"\benviron\b", code))
    if not reads and "PYDIST_" not in code:
        return set()
    texts = texts_of(code)
    own = {text for text in texts if OWN.fullmatch(text)}
    if user in ("library", "launcher"):
        return own | ({text for text in texts if NAME.fullmatch(text)} if reads else set())
    literal = re.findall(r"environ(?:\.get\(|\.setdefault\(|\[)\"(\w+)\"(?!\] =)", code)
    literal += re.findall(r"\"(\w+)\" in os\.environ", code)
    return {*literal, *(own if reads else ())}


def used_by(user: str) -> set[str]:
    return set().union(*(used_in(path, user) for path in files_of(user))) - {"PATH"}


def listed() -> dict[str, list[str]]:
    """Returns the users of each variable of the table."""
    found: dict[str, list[str]] = {}
    for row in (ROOT / "docs/environment.md").read_text().splitlines():
        if row.startswith("| `"):
            _, names, users, *_ = row.split("|")
            for name in re.findall(r"`(\w+)`", names):
                assert name not in found, f"{name} is listed twice"
                found[name] = users.strip().split(", ")
    return found


def test_the_table_lists_all_variables() -> None:
    table = listed()
    missing = set()
    for user in FOLDERS:
        found = used_by(user)
        # Tests, benchmarks and tools may set, and look at, what the library uses.
        needed = found if user in ("library", "launcher", "build") else found - table.keys()
        missing |= {f"{name}, used by {user}" for name in needed if user not in table.get(name, [])}
    assert missing == set()


def test_the_table_lists_no_others() -> None:
    texts = {
        user: "\n".join(path.read_text(errors="ignore") for path in files_of(user))
        for user in FOLDERS
    }
    assert {
        f"{name}, not in the files of {user}"
        for name, users in listed().items()
        for user in users
        if not re.search(rf"\b{name}\b", texts[user])
    } == set()


def test_the_search_finds_reads(tmp_path: Path) -> None:
    source = tmp_path / "source.py"
    source.write_text('os.environ.get("FIRST"), os.environ["SECOND"]\nVARIABLE = "PYDIST_THIRD"\n')
    assert used_in(source, "tests") == {"FIRST", "SECOND", "PYDIST_THIRD"}
    source.write_text('VARIABLE = "SOME_NAME"\nos.environ[VARIABLE]\n')
    assert used_in(source, "library") == {"SOME_NAME"}
    header = tmp_path / "header.cuh"
    header.write_text('std::getenv("FOURTH_ONE")\n')
    assert used_in(header, "library") == {"FOURTH_ONE"}
    script = tmp_path / "script"
    script.write_text("python=${PYTHON:-python3}; $other ${folder:-x}\n")
    assert used_in(script, "tools") == {"PYTHON"}


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
