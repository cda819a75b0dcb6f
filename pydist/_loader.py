"""The loader of the native module, which explains why it can't be loaded.

In a source tree without a built module, as after `make demo`, the module of an installed pydist is
loaded if it has the same interface, as Python in the tree's root imports the tree.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterable
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

__all__ = ["native"]

PACKAGE = Path(__file__).resolve().parent
_INTERFACE = "_native.pyi"


def load_native() -> ModuleType:
    """Loads the module `pydist._native`.

    Raises:
        ImportError: it was not built, or for another Python; the message says what to do.
    """
    try:
        return importlib.import_module("pydist._native")
    except ImportError as error:
        installed = _installed_beside(PACKAGE, sys.path)
        if installed is None:
            raise ImportError(_explain(PACKAGE, error), name="pydist._native") from error
        return _load(installed)


def _installed_beside(package: Path, places: Iterable[str]) -> Path | None:
    """Returns the native module of an installed pydist with this tree's interface, if any."""
    if not (package.parent / "pyproject.toml").exists() or any(package.glob("_native.*.so")):
        return None
    interface = (package / _INTERFACE).read_bytes()
    for place in places:
        other = Path(place or ".").resolve() / package.name
        if other == package or not (other / _INTERFACE).is_file():
            continue
        found = [other / f"_native{suffix}" for suffix in EXTENSION_SUFFIXES]
        found = [path for path in found if path.is_file()]
        if found and (other / _INTERFACE).read_bytes() == interface:
            return found[0]
    return None


def _load(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("pydist._native", file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _explain(package: Path, error: ImportError) -> str:
    """Returns one line on why the module in `package` can't be imported and how to fix this."""
    version = f"{sys.implementation.name} {sys.version_info.major}.{sys.version_info.minor}"
    built = sorted(path.name for path in package.glob("_native.*") if path.suffix == ".so")
    if not (package.parent / "pyproject.toml").exists():
        return (
            f"pydist in {package} has no native module that {version} can load "
            f"(found: {', '.join(built) or 'none'}; {error}): install pydist again with this Python"
        )
    if built:
        return (
            f"the native module in the source tree {package} ({', '.join(built)}) can't be loaded "
            f"by {version} ({error}): run tools/dev-build with this Python"
        )
    return (
        f"Python imports pydist from the source tree {package}, which hides an installed pydist, "
        "and the tree has no native module: run Python from another directory (or python -P), "
        "or build the module in place with tools/dev-build"
    )


if TYPE_CHECKING:
    from pydist import _native as native
else:
    native = load_native()
