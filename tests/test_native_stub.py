"""Tests of the stub: it lists all public names, kinds, arguments and defaults of the module."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest

from pydist import _native

STUB = Path(_native.__file__).with_name("_native.pyi")
TYPE_ALIASES = {"Lendable"}


def signature(function: ast.FunctionDef) -> list[str]:
    """Returns the argument names in order; a name with a default ends in `=`."""
    arguments = function.args.posonlyargs + function.args.args
    required = len(arguments) - len(function.args.defaults)
    return [a.arg + "=" * (i >= required) for i, a in enumerate(arguments)]


def stub_members(body: list[ast.stmt]) -> dict[str, list[str] | str | dict]:
    """Maps a stub's public names to arguments of functions, members of classes, or the kind."""
    members: dict[str, list[str] | str | dict] = {}
    for node in body:
        if isinstance(node, ast.ClassDef):
            members[node.name] = stub_members(node.body)
        elif isinstance(node, ast.FunctionDef):
            decorators = {ast.unparse(decorator) for decorator in node.decorator_list}
            members[node.name] = "property" if "property" in decorators else signature(node)
        elif isinstance(node, ast.AnnAssign) and ast.unparse(node.target) not in TYPE_ALIASES:
            members[ast.unparse(node.target)] = "attribute"
    return {name: member for name, member in members.items() if is_public(name)}


def is_public(name: str) -> bool:
    return not name.startswith("_") or name == "__init__"


def native_signature(routine) -> list[str]:
    """Parses the signature that pybind11 writes in the first line of the docstring."""
    line = routine.__doc__.splitlines()[0]
    assert not line.startswith("Overloaded"), f"overloads of {routine} need a look by hand"
    assert "::" not in line, f"a C++ type has no form in Python: {line}"
    code = re.sub(r"= <[^>]*>", "= ...", line)
    (function,) = ast.parse(f"def {code}: ...").body
    assert isinstance(function, ast.FunctionDef)
    return signature(function)


def native_members(owner) -> dict[str, list[str] | str | dict]:
    members: dict[str, list[str] | str | dict] = {}
    for name, value in vars(owner).items():
        # pybind11 gives a class without constructors the slot of `object`, which refuses.
        if not is_public(name) or isinstance(value, type(object.__init__)):
            continue
        if inspect.isclass(value):
            members[name] = native_members(value)
        elif isinstance(value, property):
            members[name] = "property"
        elif isinstance(value, staticmethod):
            members[name] = native_signature(value.__func__)
        elif callable(value):
            members[name] = native_signature(value)
        else:
            members[name] = "attribute"
    return members


STUB_MEMBERS = stub_members(ast.parse(STUB.read_text(encoding="utf-8")).body)
NATIVE_MEMBERS = native_members(_native)


def test_the_stub_has_every_public_name_and_no_other():
    assert sorted(STUB_MEMBERS) == sorted(NATIVE_MEMBERS)


@pytest.mark.parametrize("name", sorted(NATIVE_MEMBERS))
def test_members_and_arguments_are_those_of_the_module(name):
    assert STUB_MEMBERS[name] == NATIVE_MEMBERS[name]
