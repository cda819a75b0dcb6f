"""Tests of the error for a missing native module: it names the situation and the remedy."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pydist import _loader
from support.jobs.children import child_environment

ERROR = ImportError("undefined symbol: f")


def test_the_native_module_is_loaded():
    assert _loader.native is importlib.import_module("pydist._native")


def test_a_source_tree_that_hides_the_install_is_named(tmp_path):
    (tmp_path / "pyproject.toml").touch()
    message = _loader._explain(tmp_path / "pydist", ERROR)
    assert str(tmp_path / "pydist") in message
    assert "hides an installed pydist" in message
    assert "tools/dev-build" in message


def test_a_source_tree_without_a_module_takes_that_of_an_install_of_the_same_interface(tmp_path):
    """This happens when Python runs in the root of a clone after `make demo`."""
    tree, place = tmp_path / "tree", tmp_path / "site"
    shutil.copytree(
        _loader.PACKAGE, tree / "pydist", ignore=shutil.ignore_patterns("*.so", "__pycache__")
    )
    (tree / "pyproject.toml").touch()
    (place / "pydist").mkdir(parents=True)
    for name in (Path(_loader.native.__file__).name, "_native.pyi"):
        shutil.copy(Path(_loader.native.__file__).with_name(name), place / "pydist" / name)

    def found() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", "import pydist.partition as p; print(p.Box, p.native.__file__)"],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            cwd=tree,
            env=child_environment() | {"PYTHONPATH": f"{tree}:{place}"},
        )

    assert str(place / "pydist") in found().stdout
    (tree / "pydist" / "_native.pyi").write_text("# of another version\n")
    assert "hides an installed pydist" in found().stderr


def test_a_module_for_another_python_is_named(tmp_path):
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "pydist").mkdir()
    (tmp_path / "pydist" / "_native.cpython-27-x.so").touch()
    message = _loader._explain(tmp_path / "pydist", ERROR)
    assert "_native.cpython-27-x.so" in message
    assert "undefined symbol: f" in message


def test_a_broken_install_asks_for_another(tmp_path):
    assert "install pydist again" in _loader._explain(tmp_path / "pydist", ERROR)


def test_the_import_fails_with_the_explanation(monkeypatch):
    monkeypatch.setitem(sys.modules, "pydist._native", None)
    with pytest.raises(ImportError, match="native module") as caught:
        _loader.load_native()
    assert caught.value.name == "pydist._native"
