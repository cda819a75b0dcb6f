"""Tests of names: one word for one thing (`docs/adr/0035-one-word-for-one-thing.md`)."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

import pydist

ROOT = Path(pydist.__file__).parent

TYPES = {
    "Array": "a NumPy or CuPy array, declared in each module that makes universes",
    "IpcChannel": "the Python class wraps the native one",
    "LocalChannel": "the Python class wraps the native one",
    "NcclChannel": "the Python class wraps the native one",
    "Progress": "one signature, of those who write data sets",
}
"""Names of several public types that mean one thing."""

FUNCTIONS = {
    "balance": "the command calls the function",
    "by_rule": "chooses kernels without measuring",
    "check": "the command calls the function",
    "choose": "chooses kernels by measuring",
    "describe": "returns a text for the user about the argument",
    "draw_run": "draws a run of a task",
    "dumps": "encodes the argument, as in the modules `json` and `pickle`",
    "in_format": "returns tensors in a memory format",
    "in_words": "returns one line for the user about the argument",
    "install": "puts pydist's hook in the place that the module names",
    "is_capturing": "whether a CUDA graph is being captured",
    "load": "reads what the module names, and returns or restores it",
    "leaky_relu_": "torch's function",
    "main": "the entry point of a program",
    "missing": "why a transport can't be used, on one line",
    "name_of": "the name that users write",
    "obstacle": "why the argument is not supported, on one line, or None",
    "pack": "the command calls the function",
    "parametric": "PReLU of a norm",
    "read": "reads the file that the module names",
    "register_hook": "torch's function",
    "seconds_of": "measures a call",
    "serve": "the command calls the function",
    "stage": "the command calls the function",
    "train": "the command calls the function",
    "verify": "the command calls the function",
}
"""Names of public functions of several modules, with their one meaning."""


NATIVE_TYPES = {
    "Device": "a device: of a view, and as DLPack's C interface has it",
}
"""Names of several types in public C++ headers that mean one thing."""


def found_in(source: str, file: str) -> tuple[set[str], set[str]]:
    """Returns the public types and functions that a module defines at its top level.

    Native types under their own names (`Box = native.Box`) are not definitions.
    """
    types, functions = set[str](), set[str]()
    for node in ast.parse(source, file).body:
        if isinstance(node, ast.ClassDef):
            types.add(node.name)
        elif isinstance(node, ast.FunctionDef) and file != "_native.pyi":
            functions.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            name = target.id if isinstance(target, ast.Name) else ""
            is_type = name[:1].isupper() and not name.isupper()
            if is_type and ast.unparse(node.value) != f"native.{name}":
                types.add(name)
    hidden = {name for name in types | functions if name.startswith("_")}
    return types - hidden, functions - hidden


def several(sources: dict[str, str]) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Returns the files of public types, and of public functions, that several files define."""
    types, functions = defaultdict[str, list[str]](list), defaultdict[str, list[str]](list)
    for file, source in sources.items():
        for found, names in zip((types, functions), found_in(source, file), strict=True):
            for name in names:
                found[name].append(file)
    return (
        {name: files for name, files in types.items() if len(files) > 1},
        {name: files for name, files in functions.items() if len(files) > 1},
    )


def sources() -> dict[str, str]:
    """Returns the texts of the package's modules, by their paths in it."""
    files = [*ROOT.rglob("*.py"), ROOT / "_native.pyi"]
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in sorted(files)}


def test_a_type_has_a_name_of_its_own() -> None:
    types, _ = several(sources())
    assert {name: files for name, files in types.items() if name not in TYPES} == {}
    assert TYPES.keys() <= types.keys()


def test_functions_of_one_name_mean_one_thing() -> None:
    _, functions = several(sources())
    assert {name: files for name, files in functions.items() if name not in FUNCTIONS} == {}
    assert FUNCTIONS.keys() <= functions.keys()


def test_a_second_plan_is_found() -> None:
    known = {
        "_native.pyi": "class Plan: ...\ndef plan() -> Plan: ...",
        "partition.py": "Plan = native.Plan\nLIMIT = 1\nclass _Part: ...\ndef plan(): ...",
        "layout.py": "class Layout:\n    def plan(self): ...\nLIMIT = 2\nclass Part: ...",
    }
    assert several(known) == ({}, {})
    added = several({**known, "stages/plan.py": "Layout = int\nclass Plan: ...\ndef plan(): ..."})
    assert added == (
        {"Plan": ["_native.pyi", "stages/plan.py"], "Layout": ["layout.py", "stages/plan.py"]},
        {"plan": ["partition.py", "stages/plan.py"]},
    )


def test_native_types_have_different_names() -> None:
    csrc = Path(__file__).parents[1] / "csrc"
    head = r"^(?:class|struct|enum class) (\w+)(?: final)?(?: :[^{;]*)? \{"
    defined = re.compile(head, re.MULTILINE)
    files = defaultdict[str, list[str]](list)
    for path in sorted([*csrc.rglob("*.hpp"), *csrc.rglob("*.cuh")]):
        for name in set(defined.findall(path.read_text())):
            files[name].append(str(path.relative_to(csrc)))
    assert len(files) > 200
    several_files = {name: where for name, where in files.items() if len(where) > 1}
    assert {n: w for n, w in several_files.items() if n not in NATIVE_TYPES} == {}
    assert set(NATIVE_TYPES) <= set(several_files)
