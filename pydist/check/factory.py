"""Loads the factory of a network by FILE.py:NAME or MODULE:NAME."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from pydist.errors import DoesNotFit, UsageError, in_words, out_of_memory

_LISTED = 10
"""Most names of a module that an error lists."""


def load_factory(name: str) -> Callable[..., nn.Module]:
    """Loads the function that creates the network.

    Args:
        name: FILE.py:NAME or MODULE:NAME; NAME is a function or a class, or an existing
            `nn.Module`.

    Raises:
        UsageError: there is no such file, module or name, or it can't be called.
        DoesNotFit: there is not enough memory to import it.
    """
    found = load_object(name)
    if isinstance(found, nn.Module):
        return lambda: found
    if not callable(found):
        raise UsageError(f"{name} is no function: {found!r}")
    return partial(_made, found, name)


def load_object(name: str) -> Any:
    """Loads an object of a file or module by FILE.py:NAME or MODULE:NAME.

    Raises:
        UsageError: there is no such file, module or name.
        DoesNotFit: there is not enough memory to import it.
    """
    where, colon, attribute = name.rpartition(":")
    if not colon or not where or not attribute:
        raise UsageError(f"{name!r}: expected FILE.py:NAME or MODULE:NAME")
    module = _load(where)
    found = getattr(module, attribute, None)
    if found is None:
        names = [n for n, v in vars(module).items() if callable(v) and not n.startswith("_")]
        if len(names) <= _LISTED:
            hint = f"it has: {', '.join(names) or 'nothing'}"
        elif close := difflib.get_close_matches(attribute, names):
            hint = f"did you mean {' or '.join(close)}?"
        else:
            hint = f"it has {len(names)} other names, none like it"
        raise UsageError(f"{where} has no {attribute!r}; {hint}")
    return found


def _made(factory: Callable[..., object], name: str, **arguments: Any) -> nn.Module:
    model = factory(**arguments)
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


_loading = threading.RLock()  # a file may load another


def _load_file(path: Path) -> ModuleType:
    """Imports a file, once as long as it does not change; ranks can be threads."""
    name = f"{path.stem} ({path}, {path.stat().st_mtime_ns})"
    with _loading:
        if name in sys.modules:
            return sys.modules[name]
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # where dataclasses look for it
        sys.path.insert(0, str(path.parent))  # for imports of its neighbors, as if it were run
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
        finally:
            sys.path.remove(str(path.parent))
    return module
