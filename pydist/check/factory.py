"""Loads a network's factory by FILE.py:NAME or MODULE:NAME."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from torch import nn

from pydist.errors import DoesNotFit, UsageError, in_words, out_of_memory


def load_factory(name: str) -> Callable[[], nn.Module]:
    """Loads the function that creates the network.

    Args:
        name: FILE.py:NAME or MODULE:NAME; NAME is a function without arguments, a class that needs
            none, or an existing `nn.Module`.

    Raises:
        UsageError: there is no such file, module or name, or it can't be called.
        DoesNotFit: there is not enough memory to import it.
    """
    where, colon, attribute = name.rpartition(":")
    if not colon or not where or not attribute:
        raise UsageError(f"{name!r}: expected FILE.py:FACTORY or MODULE:FACTORY")
    module = _load(where)
    found = getattr(module, attribute, None)
    if found is None:
        names = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        raise UsageError(f"{where} has no {attribute!r}; it has: {', '.join(names) or 'nothing'}")
    if isinstance(found, nn.Module):
        return lambda: found
    if not callable(found):
        raise UsageError(f"{name} is no function: {found!r}")
    return lambda: _made(found, name)


def _made(factory: Callable[[], object], name: str) -> nn.Module:
    model = factory()
    if not isinstance(model, nn.Module):
        raise UsageError(f"{name} makes a {type(model).__name__}; expected a torch.nn.Module")
    return model


def _load(where: str) -> ModuleType:
    if where.endswith(".py") and not Path(where).is_file():
        raise UsageError(f"{where}: no such file")
    try:
        if where.endswith(".py"):
            return _load_file(Path(where).resolve())
        return importlib.import_module(where)
    except (Exception, SystemExit) as error:  # a user's file may raise anything
        kind = DoesNotFit if out_of_memory(error) else UsageError
        raise kind(f"can't import {where}: {in_words(error)}") from error


def _load_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))  # for imports of its neighbors, as if it were run
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.parent))
    return module
