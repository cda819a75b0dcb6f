"""Tests of tools/bootstrap: its error messages, and that it redoes only changed parts."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[2] / "tools"

# Replacement of an interpreter: it makes an "environment" whose pip logs its calls.
FAKE_PYTHON = """#!/bin/sh
case "$1 $2" in
  "-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && chmod +x "$3/bin/python" ;;
  "-m pip") shift 3; echo "$*" >>"$FAKE_PIP_LOG"
    package="$(dirname "$0")/../lib/python3.99/site-packages/pydist"
    mkdir -p "$package" && echo "$*" >"$package/_native.fake.so" ;;
  "-V "*) echo "Python 3.99" ;;
esac
"""


@pytest.fixture
def checkout(tmp_path) -> Path:
    """Makes a small checkout at a path with a space."""
    root = tmp_path / "a checkout"
    for folder in ("tools", "requirements", "cmake", "csrc", "pydist"):
        (root / folder).mkdir(parents=True)
    for file in ("pyproject.toml", "CMakeLists.txt", "requirements/constraints.txt", "csrc/a.cpp"):
        (root / file).write_text(file)
    script = root / "tools" / "bootstrap"
    script.write_bytes((TOOLS / "bootstrap").read_bytes())
    script.chmod(0o755)
    python = tmp_path / "python"
    python.write_text(FAKE_PYTHON)
    python.chmod(0o755)
    return root


def bootstrap(checkout: Path, *arguments: str, code: int = 0, **variables: str) -> tuple[str, str]:
    """Runs the script; returns its output and pip's calls."""
    calls = checkout / "pip-calls"
    calls.write_text("")
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHON": str(checkout.parent / "python"),
        "FAKE_PIP_LOG": str(calls),
        **variables,
    }
    ended = subprocess.run(
        [checkout / "tools" / "bootstrap", *arguments],
        env=environment, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert ended.returncode == code, ended.stderr
    return ended.stdout + ended.stderr, calls.read_text()


def test_the_first_call_installs_and_the_second_does_nothing_but_run_the_command(checkout):
    said, calls = bootstrap(checkout, "echo", "two  words")
    assert "two  words\n" in said
    assert "--no-build-isolation -c requirements/constraints.txt .[laptop,plot]" in calls
    assert f"build-dir={checkout}/.venv/pydist-state/build" in calls
    assert bootstrap(checkout, "echo", "again") == ("again\n", "")


def test_a_changed_source_rebuilds_the_package_without_the_network(checkout):
    bootstrap(checkout)
    (checkout / "csrc" / "a.cpp").write_text("changed")
    _, calls = bootstrap(checkout)
    (call,) = calls.splitlines()
    assert "--no-build-isolation" in call
    assert "--no-deps" in call


def test_python_in_the_checkout_finds_the_module_that_was_built_last(checkout):
    module = checkout / "pydist" / "_native.fake.so"
    bootstrap(checkout)
    assert "[laptop,plot]" in module.read_text()
    (checkout / "csrc" / "a.cpp").write_text("changed")
    bootstrap(checkout)
    assert "--force-reinstall" in module.read_text()
    assert list(module.parent.glob(".*")) == []


def test_changed_dependencies_are_installed(checkout):
    bootstrap(checkout)
    (checkout / "requirements" / "constraints.txt").write_text("torch==9")
    _, calls = bootstrap(checkout)
    assert "--group test" in calls


def test_the_group_dev_holds_the_group_test(checkout):
    _, calls = bootstrap(checkout, "--group", "dev")
    assert "--group dev" in calls
    assert bootstrap(checkout)[1] == ""


def test_a_moved_environment_is_made_again(checkout):
    bootstrap(checkout)
    moved = checkout.parent / "moved here"
    checkout.rename(moved)
    assert "--group test" in bootstrap(moved)[1]


def test_a_failing_step_shows_the_end_of_its_log(checkout):
    python = checkout.parent / "python"
    python.write_text(FAKE_PYTHON.replace('echo "$*"', 'echo "no such package"; exit 1; echo "$*"'))
    said, _ = bootstrap(checkout, code=2)
    assert "no such package" in said
    assert "bootstrap: this failed:" in said


@pytest.mark.parametrize("python", ["/nowhere/python", "false"])
def test_a_python_that_will_not_do_is_named(checkout, python):
    said, _ = bootstrap(checkout, PYTHON=python, code=2)
    assert said == f"bootstrap: PYTHON={python} is not a Python >= 3.10\n"


def test_a_missing_compiler_is_named(checkout):
    said, _ = bootstrap(checkout, CXX="/nowhere/c++", code=2)
    assert "no C++ compiler found (/nowhere/c++)" in said


def test_it_finds_a_python_by_itself(checkout, tmp_path):
    """It skips an old Python that comes first under the usual name."""
    places = tmp_path / "bin"
    places.mkdir()
    (places / "python3").write_text("#!/bin/sh\nexit 1\n")
    (places / "python3").chmod(0o755)
    (places / "python3.14").symlink_to(tmp_path / "python")
    path = f"{places}:{os.environ['PATH']}"
    assert "--group test" in bootstrap(checkout, PYTHON="", PATH=path)[1]


def test_the_tools_are_portable_shell():
    for script in ("bootstrap", "test", "bench", "lint.sh", "native", "native-libraries"):
        subprocess.run(["sh", "-n", TOOLS / script], check=True, timeout=10)
