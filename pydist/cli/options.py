"""Parses command line options into dataclasses, with one-line errors."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from contextlib import redirect_stderr
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any, TypeVar, get_args

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from pydist.errors import UsageError
from pydist.train import config_io
from pydist.train.config import Config, StagesConfig
from pydist.train.gradients import FORMS, GradientsConfig, name_of

_T = TypeVar("_T")


def parse(kind: type[_T], arguments: Sequence[str], prog: str, default: _T | None = None) -> _T:
    """Parses command line arguments into a dataclass.

    Args:
        kind: the dataclass; its fields are the options.
        arguments: the command line. ``--help`` prints all options and exits.
        prog: the command's name in help.
        default: the values of options that are not given.

    Raises:
        UsageError: an unknown option (with a likely correction) or an invalid value.
    """
    complaint = io.StringIO()
    # Of mutually exclusive tables (the networks') only the default's options are shown.
    settings = (tyro.conf.AvoidSubcommands,)
    try:
        with redirect_stderr(complaint), _types():
            if default is None:
                return tyro.cli(kind, prog=prog, args=list(arguments), config=settings)
            return tyro.cli(kind, prog=prog, args=list(arguments), default=default, config=settings)
    except SystemExit as stop:
        if not stop.code:
            raise
        raise UsageError(_plain(complaint.getvalue())) from None


def override(config: Config, arguments: Sequence[str], prog: str) -> Config:
    """Applies options such as ``--train.steps 20`` to a configuration; see `parse`."""
    overridden = parse(Config, arguments, prog, _with_chosen(config, arguments))
    return config_io.from_tables(config_io.to_dict(overridden), source="command line")


def _with_chosen(config: Config, arguments: Sequence[str]) -> Config:
    """Replaces the tables whose `name` is given, such as "sgd", by tables of that class.

    Settings that both classes have keep their values.
    """
    for table, registry in config_io.CHOSEN.items():
        option, before = f"--{table}.name", getattr(config, table)
        names = [b for a, b in pairwise(arguments) if a == option]
        names += [a.removeprefix(f"{option}=") for a in arguments if a.startswith(f"{option}=")]
        if not names or names[-1] == before.name:
            continue
        if names[-1] not in registry.names:
            raise UsageError(f"{option} {names[-1]}: possible are {', '.join(registry.names)}")
        kind = registry.get(names[-1])
        shared = {f.name for f in fields(kind)} & {f.name for f in fields(before)} - {"name"}
        config = replace(config, **{table: kind(**{n: getattr(before, n) for n in shared})})
    return config


def _types() -> ConstructorRegistry:
    """Returns the types of options that tyro has not: stages and gradients, in TOML."""
    registry = ConstructorRegistry()

    @registry.primitive_rule
    def _(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
        if info.type not in (FORMS, GradientsConfig, get_args(FORMS)[0]):
            return None
        return PrimitiveConstructorSpec(
            nargs=1,
            metavar="NAME|TABLE",
            instance_from_str=lambda given: config_io.value(given[0]),
            is_instance=lambda given: True,
            str_from_instance=lambda given: [name_of(given)],
        )

    @registry.primitive_rule
    def _(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
        if info.type != StagesConfig | None:
            return None
        return PrimitiveConstructorSpec(
            nargs=1,
            metavar="INT|LIST",
            instance_from_str=lambda given: (
                None if given == ["None"] else config_io.value(given[0])
            ),
            is_instance=lambda given: given is None or isinstance(given, int | tuple),
            str_from_instance=lambda given: [repr(given)],
        )

    return registry


def _plain(box: str) -> str:
    """Extracts one line from the framed text that tyro prints."""
    lines = [line.strip("│╭╮╰╯─ \t") for line in box.splitlines()]
    lines = [line for line in lines if line.strip("-")]  # rules are dashes in ASCII output
    text = " ".join(" ".join(lines[1:]).split())  # after the frame's title
    text = re.split(r" Argument helptext| For full helptext| Got errors", text)[0]
    text = re.sub(r"^Error parsing [a-z._]+: ", "", text)  # of a table: the rest names the option
    text, *suggestion = text.split("Perhaps you meant: ")
    return text.strip() + (f"; did you mean {suggestion[0].split()[0]}?" if suggestion else "")
