"""Reads the description of a sweep: one configuration, and the settings that its runs vary."""

from __future__ import annotations

import copy
import itertools
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked

from pydist.errors import UsageError
from pydist.parsing import require_shallow
from pydist.studies.runs import Outcome, Run
from pydist.tables import table
from pydist.train import config_io
from pydist.train.ranks import ranks_a_sample

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_NAME = "name"
_FOLDER = "output.folder"


@checked(frozen=True, config=ConfigDict(extra="forbid"))
class _File:
    """Content that the file has."""

    config: str
    folder: str
    ranks: Annotated[int, Field(ge=1, strict=True)] | None = None
    launcher: str | None = None
    grid: dict[str, Annotated[list[Any], Field(min_length=1)]] = Field(default_factory=dict)
    runs: list[dict[str, Any]] = Field(default_factory=list)


@dataclass(frozen=True)
class Sweep:
    """Sweep that a file describes.

    Attributes:
        folder: of all runs.
        launcher: command that starts the ranks of a run; None for pydist's own.
        runs: the runs.
        settings: the settings of each run that differ from the configuration's.
    """

    folder: Path
    launcher: str | None
    runs: tuple[Run, ...]
    settings: tuple[Mapping[str, Any], ...]


def load_sweep(path: Path) -> Sweep:
    """Reads a sweep from a TOML file.

    Its keys: `config`, the configuration of all runs, relative to the file; `folder`; the table
    `grid`, with a list of values for each setting, such as "optimizer.lr" = [1e-3, 3e-4], of which
    every combination is run; the tables `runs` with the settings of single runs, each of which is
    combined with the grid; optionally `ranks` of a run, and `launcher`.

    Raises:
        UsageError: no such file, not TOML, unknown keys or settings, a setting that a run can't
            have, or two equal runs.
    """
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8-sig"))
        require_shallow(tables)
        found = TypeAdapter(_File).validate_python(tables)
        base_path = path.parent / found.config
        base = tomllib.loads(base_path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise UsageError(f"can't read {error.filename}: {error.strerror}") from error
    except ValidationError as error:
        raise UsageError(f"{path}: {'; '.join(_faults(error))}") from None
    except ValueError as error:
        raise UsageError(f"{path} is not valid TOML: {error}") from error
    config_io.from_tables(base, str(base_path))
    settings = list(_settings(found, path))
    runs = [_run(name, given, base, found, path) for name, given in settings]
    return Sweep(Path(found.folder), found.launcher, tuple(runs), tuple(s for _, s in settings))


def _faults(error: ValidationError) -> Iterator[str]:
    for each in error.errors(include_url=False):
        place = ".".join(map(str, each["loc"]))
        if each["type"] == "unexpected_keyword_argument":
            possible = ", ".join(_File.__dataclass_fields__)
            yield f"unknown key {place!r}; possible are {possible}"
        else:
            yield f"{place}: {each['msg'][:1].lower()}{each['msg'][1:]}"


def _settings(found: _File, path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the name and the settings of each run."""
    names: set[str] = set()
    for single in found.runs or [{}]:
        listed = dict(single)
        given_name = listed.pop(_NAME, None)
        if given_name is not None and not (isinstance(given_name, str) and given_name):
            raise UsageError(f"{path}: {_NAME} = {given_name!r}: a text is expected")
        if both := sorted(listed.keys() & found.grid.keys()):
            raise UsageError(f"{path}: {both[0]!r} is in the table grid and in a run")
        keys = sorted({*listed, *found.grid})
        for outer, key in itertools.product(keys, keys):
            if key.startswith(f"{outer}."):
                raise UsageError(
                    f"{path}: {outer!r} and {key!r} are a table and a setting in it: give each "
                    "setting by its own key"
                )
        for values in itertools.product(*found.grid.values()):
            varied = dict(zip(found.grid, values, strict=True))
            shown = varied if given_name is not None else {**listed, **varied}
            parts = [given_name] if given_name is not None else []
            parts += [f"{key.rpartition('.')[2]}={_value_text(v)}" for key, v in shown.items()]
            name = re.sub(r"[^\w.=,+-]+", "-", ",".join(parts)) or "run"
            if name in names or name in (".", ".."):
                raise UsageError(f"{path}: two runs are {name!r}: give them names")
            names.add(name)
            yield name, {**listed, **varied}


def _value_text(value: Any) -> str:
    """Returns a setting's value as it is shown: 2x1x1 for a list."""
    if isinstance(value, list | tuple):
        return "x".join(map(_value_text, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _run(
    name: str, settings: Mapping[str, Any], base: Mapping[str, Any], found: _File, path: Path
) -> Run:
    """Makes a run of the configuration and its settings."""
    tables = copy.deepcopy(dict(base))
    for key, value in {**settings, _FOLDER: str(Path(found.folder, "runs", name))}.items():
        *places, last = key.split(".")
        if key == _FOLDER and (key in settings or _has_folder(settings)):
            raise UsageError(f"{path}: {_FOLDER}: the sweep chooses the folders of its runs")
        inner = tables
        for place in places:
            inner = inner.setdefault(place, {})
            if not isinstance(inner, dict):
                raise UsageError(f"{path}: {key}: {place} is no table")
        inner[last] = copy.deepcopy(value)  # other runs have the same one
    config = config_io.from_tables(tables, f"{path}: {name}")
    of_sample = ranks_a_sample(config.mesh)
    ranks = found.ranks or of_sample * (config.mesh.data or 1)
    groups = config.mesh.data
    if ranks % of_sample or (groups is not None and ranks != groups * of_sample):
        needed = f"multiples of {of_sample}" if groups is None else f"{groups * of_sample}"
        raise UsageError(f"{path}: {name}: ranks = {ranks}; its mesh needs {needed}")
    return Run(name, config, ranks)


def _has_folder(settings: Mapping[str, Any]) -> bool:
    """Returns whether a table among the settings chooses the run's folder."""
    table, _, key = _FOLDER.partition(".")
    given = settings.get(table)
    return isinstance(given, dict) and key in given


def order_of(outcomes: Sequence[Outcome]) -> list[int]:
    """Returns the numbers of the runs, the best first: by validation, else by training loss."""

    def key(i: int) -> tuple[bool, float]:
        outcome = outcomes[i]
        loss = outcome.validation.get("loss", outcome.loss)
        return outcome.status != "done", float("inf") if loss is None else loss

    return sorted(range(len(outcomes)), key=key)


def sweep_table(sweep: Sweep, outcomes: Sequence[Outcome]) -> str:
    """Formats the runs with their settings and results, the best first."""
    settings = list(dict.fromkeys(key for given in sweep.settings for key in given))
    figures = [
        name
        for name in dict.fromkeys(n for o in outcomes for n in o.validation)
        if any(isinstance(o.validation.get(name), float) for o in outcomes)
    ]
    head = ("run", *settings, "ranks", "steps", "loss", *(f"val. {n}" for n in figures), "s")
    lines = [(*head, "status")]
    for i in order_of(outcomes):
        run, given, outcome = sweep.runs[i], sweep.settings[i], outcomes[i]
        lines.append(
            (
                run.name,
                *(_value_text(given[key]) if key in given else "" for key in settings),
                str(run.ranks),
                str(outcome.steps),
                _number(outcome.loss),
                *(_number(outcome.validation.get(name)) for name in figures),
                f"{outcome.seconds:.1f}",
                outcome.status,
            )
        )
    return table(lines)


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else ""
