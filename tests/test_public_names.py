"""Tests of the package's names: type checkers, `__all__` and the modules agree."""

from __future__ import annotations

import ast
import importlib.util
import inspect

import pytest

import pydist

PACKAGES = [
    "pydist.check",
    "pydist.data",
    "pydist.gradients",
    "pydist.inference",
    "pydist.models",
    "pydist.optim",
    "pydist.packs",
    "pydist.plan",
    "pydist.profile",
    "pydist.slices",
    "pydist.stages",
]


def test_type_checkers_see_every_public_name() -> None:
    tree = ast.parse(inspect.getsource(pydist))
    blocks = [node for node in tree.body if isinstance(node, ast.If)]
    imports = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)]
    seen = {alias.asname or alias.name for node in imports for alias in node.names}
    assert seen == set(pydist.__all__)


def test_every_public_name_is_there() -> None:
    for name in pydist.__all__:
        assert getattr(pydist, name) is not None


@pytest.mark.parametrize("name", PACKAGES)
def test_no_module_has_the_name_of_what_its_package_exports(name: str) -> None:
    """Otherwise documentation and type checkers confuse the module and the export."""
    package = importlib.import_module(name)
    for public in package.__all__:
        assert not inspect.ismodule(getattr(package, public))
        assert importlib.util.find_spec(f"{name}.{public}") is None
