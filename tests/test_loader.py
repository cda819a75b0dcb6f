"""The message of a missing native module names the situation and the way out."""

from __future__ import annotations

import importlib
import sys

import pytest

from pydist import _loader

ERROR = ImportError("undefined symbol: f")


def test_the_native_module_is_loaded():
    assert _loader.native is importlib.import_module("pydist._native")


def test_a_source_tree_that_hides_the_install_is_named(tmp_path):
    (tmp_path / "pyproject.toml").touch()
    message = _loader._explain(tmp_path / "pydist", ERROR)
    assert str(tmp_path / "pydist") in message
    assert "hides an installed pydist" in message
    assert "tools/dev-build" in message


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
