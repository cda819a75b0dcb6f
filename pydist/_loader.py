"""Loads the native module, or says why it is not there."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

__all__ = ["native"]

PACKAGE = Path(__file__).resolve().parent


def load_native() -> ModuleType:
    """The module `pydist._native`.

    Raises:
        ImportError: it was not built, or built for another Python; the message says what to do.
    """
    try:
        return importlib.import_module("pydist._native")
    except ImportError as error:
        raise ImportError(_explain(PACKAGE, error), name="pydist._native") from error


def _explain(package: Path, error: ImportError) -> str:
    """One line on why the module in `package` can't be imported and how to mend it."""
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
