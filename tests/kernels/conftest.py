"""Fixtures of all kernel tests: the NumPy definitions and thread counts."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from pydist import _native as native


def _load_reference(name: str):
    path = Path(__file__).parents[1] / "reference" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"reference_{name}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module here
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def packing():
    return _load_reference("packing")


@pytest.fixture(scope="session")
def boundary_conv():
    return _load_reference("boundary_conv")


@pytest.fixture(params=[1, 3])
def threads(request):
    before = native.get_num_threads()
    native.set_num_threads(request.param)
    yield request.param
    native.set_num_threads(before)
