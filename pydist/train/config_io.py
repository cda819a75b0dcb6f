"""Reads a configuration from TOML and writes the resolved one."""

from __future__ import annotations

import copy
import dataclasses
import difflib
import json
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_type_hints

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from pydist.errors import UsageError
from pydist.parsing import require_shallow
from pydist.registry import MODELS, OPTIMIZERS
from pydist.train import ranks
from pydist.train.config import Config, FactoryConfig, StageConfig
from pydist.train.config.gradients import TABLES as FORMS_OF_GRADIENTS
from pydist.train.config.mesh import LIST_OF_STAGES, NUMBER_OF_STAGES

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


_BARE_KEY = re.compile("[A-Za-z0-9_-]+")

CHOSEN = {"model": MODELS, "optimizer": OPTIMIZERS}
"""Tables whose `name` chooses their class. pydantic adds the name to the location of an error."""


def load(path: Path) -> Config:
    """Reads a configuration file.

    Args:
        path: a TOML file with the tables of `Config`; omitted keys have their defaults.

    Raises:
        UsageError: no such file, not TOML, or keys or values that `Config` does not have; all of
            them are named, with likely corrections.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")  # editors write a byte order mark
    except OSError as error:
        raise UsageError(f"can't read the configuration {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not valid TOML: {error}") from error
    return loads(text, str(path))


def loads(text: str, source: str) -> Config:
    """Reads a configuration from TOML text; `source` names it in errors (see `load`)."""
    try:
        tables = tomllib.loads(text)
        require_shallow(tables)
    except RecursionError:
        raise UsageError(f"{source} is not valid TOML: nested too deeply") from None
    except ValueError as error:  # base of tomllib's error, and raised for too many digits
        raise UsageError(f"{source} is not valid TOML: {error}") from error
    return from_tables(tables, source)


def from_tables(tables: dict[str, Any], source: str) -> Config:
    """Converts nested dicts to a `Config`; `source` names them in errors (see `load`)."""
    for table, registry in CHOSEN.items():
        given = tables.get(table)
        name = given.get("name") if isinstance(given, dict) else None
        if name in registry.names:
            registry.get(name)  # raises the reason if its package can't be imported
    try:
        config: Config = TypeAdapter(Config).validate_python(tables)
    except ValidationError as error:
        lines = [_explain(e) for e in error.errors(include_url=False)]
        raise UsageError(f"{source}: " + "; ".join(lines)) from None
    _check_texts(to_dict(config), source)
    if isinstance(config.model, FactoryConfig):
        _check_arguments(config.model.args, f"{source}: model.args")
    try:
        config.data.check()
        ranks.check_settings(config)
        config.optimizer.check()
        config.model.loss(config.train)
    except UsageError as error:
        raise UsageError(f"{source}: {error}") from None
    return config


def _check_texts(given: Any, source: str, name: str = "") -> None:
    """Raises `UsageError` for paths and texts that the run's files can't hold."""
    if isinstance(given, dict):
        for key, each in given.items():
            _check_texts(each, source, f"{name}.{key}" if name else key)
    elif isinstance(given, list | tuple):
        for each in given:
            _check_texts(each, source, name)
    elif isinstance(given, str | Path):
        if isinstance(given, Path) and "\0" in str(given):
            raise UsageError(f"{source}: {name} = {str(given)!r}: a path has no zero character")
        if any("\ud800" <= character <= "\udfff" for character in str(given)):
            kind = "path" if isinstance(given, Path) else "text"
            raise UsageError(
                f"{source}: {name} = {str(given)!r}: a {kind} that is not UTF-8 can't be written "
                "to the run's files; rename it, or set PYTHONUTF8=1"
            )


def _check_arguments(given: Any, where: str) -> None:
    """Raises `UsageError` for values that checkpoints and the log can't store: dates and times."""
    if isinstance(given, dict):
        for key, each in given.items():
            _check_arguments(each, f"{where}.{key}")
    elif isinstance(given, list | tuple):
        for each in given:
            _check_arguments(each, where)
    elif not isinstance(given, str | int | float):  # bool is an int
        raise UsageError(
            f"{where} = {given}: texts, numbers, booleans, lists and tables are possible"
        )


def value(text: str) -> Any:
    """Returns a value given in TOML, or text that is none, to be refused by `from_tables`."""
    try:
        return tomllib.loads(f"given = {text}")["given"]
    except ValueError:
        return text


def to_dict(config: Config) -> dict[str, Any]:
    """Returns the tables of a configuration as plain dicts, without unset values (None)."""
    return dict(_set_values(config))


def _set_values(table: DataclassInstance) -> Iterator[tuple[str, Any]]:
    for each in dataclasses.fields(table):
        value = _plain(getattr(table, each.name))
        if value is not None:
            yield each.name, value


def _plain(value: Any) -> Any:
    """Returns a value with dicts in place of dataclasses; `None` for one without set values."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dict(_set_values(value)) or None
    if isinstance(value, tuple):
        return tuple(
            _plain(each) or {} if dataclasses.is_dataclass(each) else each for each in value
        )
    return copy.deepcopy(value)  # of the user's own tables, empty ones count, too


def dumps(config: Config) -> str:
    """Returns the configuration as TOML, including defaults; the inverse of `loads`."""
    lines = []
    for table, values in to_dict(config).items():
        lines.append(f"[{table}]")
        lines += [f"{key} = {_toml(value)}" for key, value in values.items()]
        lines.append("")
    return "\n".join(lines)


def _toml(value: object) -> str:
    if isinstance(value, tuple | list):
        return "[" + ", ".join(_toml(v) for v in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_key(key)} = {_toml(v)}" for key, v in value.items()) + "}"
    if isinstance(value, Path):
        value = str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    # JSON strings, numbers and booleans are valid TOML, except that TOML requires DEL escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else _toml(key)


_OF_TOML = {
    "tuple_type": "list",
    "list_type": "list",
    "dict_type": "table",
    "dataclass_type": "table",
    "path_type": "string",
}


def _explain(error: ErrorDetails) -> str:
    location = [p for p in error["loc"] if not str(p).startswith("(")]  # the kind of a value
    if location[0] in CHOSEN and len(location) > 1:
        del location[1]
    elif location[:2] == ["train", "gradients"] and len(location) > 2:
        del location[2]
    where = ".".join(str(part) for part in location)
    if error["type"] == "union_tag_invalid":
        given, possible = error["ctx"]["tag"], error["ctx"]["expected_tags"]
        return f"{where}.name = {given!r}: possible are {possible}"
    if error["type"] == "union_tag_not_found":
        return f"{where} = {error['input']!r}: a table is expected"
    if error["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        return f"{where} is not a setting{_hint(error['loc'])}"
    given = repr(error["input"])
    if error["loc"][-1] == NUMBER_OF_STAGES:
        return f"{where} = {given[:60]}: expected a count >= 1, or a list with the mesh of each"
    if error["type"] in _OF_TOML:  # pydantic says what Python has in its place
        return f"{where} = {given[:60]}: a {_OF_TOML[error['type']]} is expected"
    return f"{where} = {given[:60]}: {error['msg'][0].lower()}{error['msg'][1:]}"


def _hint(location: tuple[int | str, ...]) -> str:
    table: Any = Config
    registry = CHOSEN.get(str(location[0]))
    for part in location[:-1]:
        chosen = registry.get(str(part)) if registry and part in registry.names else None
        hint = chosen or get_type_hints(table).get(str(part))
        if part == LIST_OF_STAGES:
            hint = StageConfig
        elif location[:2] == ("train", "gradients"):
            hint = FORMS_OF_GRADIENTS.get(str(part), hint)
        if dataclasses.is_dataclass(hint):
            table = hint
    names = [f.name for f in dataclasses.fields(table)]
    close = difflib.get_close_matches(str(location[-1]), names, n=1)
    return f'; did you mean "{close[0]}"?' if close else f": choose from {', '.join(names)}"
