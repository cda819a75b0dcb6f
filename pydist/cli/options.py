"""Parses command line options into dataclasses, with one-line errors."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from contextlib import redirect_stderr
from dataclasses import MISSING, fields, replace
from itertools import pairwise
from types import NoneType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args, get_origin

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from pydist.errors import UsageError

if TYPE_CHECKING:
    from pydist.train.config import Config

_T = TypeVar("_T")

_PRESET = "--data.augment.preset"
_ARGUMENT = re.compile(r"--model\.args\.(\w+)(?:=(.*))?", re.DOTALL)
_VALUE_OF_SWITCH = re.compile("Unrecognized options: (true|false|yes|no|on|off|0|1)", re.IGNORECASE)

_VALUE = re.compile(
    r"Error parsing (?P<option>-\S+): "
    r"(?:no type matching (?:{None}\|)?(?P<types>.+) could be .+ from"
    r"|invalid literal for (?P<INT>int)\(\) .*:|could not convert string to (?P<FLOAT>float):) "
    r"(?P<given>.+)"
)
"""Complaints about a value that are in the words of Python."""


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
        # Only the options of configurations have a default. Their types take time to import.
        with redirect_stderr(complaint), _types(of_configuration=default is not None):
            if default is None:
                return tyro.cli(kind, prog=prog, args=list(arguments), config=settings)
            return tyro.cli(kind, prog=prog, args=list(arguments), default=default, config=settings)
    except SystemExit as stop:
        if not stop.code:
            raise
        text = _plain(complaint.getvalue())
        better = _required(text, kind) or _switch_with_value(text, arguments)
        raise UsageError(better or text) from None


def override(config: Config, arguments: Sequence[str], prog: str) -> Config:
    """Applies options such as ``--train.steps 20`` to a configuration; see `parse`.

    An argument of a factory that the configuration does not have is given in TOML, as in
    ``--model.args.width 32``.
    """
    from pydist.train import config_io
    from pydist.train.config import Config

    config, lists = _without_lists_of_tables(_with_chosen(config, arguments))
    config, arguments = _with_preset(config, arguments)
    chosen, rest = _with_new_arguments(config, arguments)
    tables = config_io.to_dict(parse(Config, rest, prog, chosen))
    if lists:
        tables["model"]["args"] = {**lists, **tables["model"]["args"]}
    return config_io.from_tables(tables, source="command line")


def _without_lists_of_tables(config: Config) -> tuple[Config, dict[str, Any]]:
    """Takes the arguments of a factory that are lists with tables, which tyro can't show.

    They are given in TOML, as new arguments are.
    """
    from pydist.train.config import FactoryConfig

    if not isinstance(config.model, FactoryConfig):
        return config, {}
    lists = {
        name: value
        for name, value in config.model.args.items()
        if isinstance(value, list | tuple) and any(isinstance(x, dict | list) for x in value)
    }
    others = {name: value for name, value in config.model.args.items() if name not in lists}
    return replace(config, model=replace(config.model, args=others)), lists


def _with_chosen(config: Config, arguments: Sequence[str]) -> Config:
    """Replaces the tables whose `name` is given, such as "sgd", by tables of that class.

    Settings that both classes have keep their values.
    """
    from pydist.train import config_io

    for table, registry in config_io.CHOSEN.items():
        option, before = f"--{table}.name", getattr(config, table)
        names = [b for a, b in pairwise(arguments) if a == option]
        names += [a.removeprefix(f"{option}=") for a in arguments if a.startswith(f"{option}=")]
        if table == "model" and not names:  # as in a file, the factory implies the name
            names = ["factory" for a in arguments if a.partition("=")[0] == "--model.factory"]
        if not names or names[-1] == before.name:
            continue
        if names[-1] not in registry.names:
            raise UsageError(f"{option} {names[-1]}: possible are {', '.join(registry.names)}")
        kind = registry.get(names[-1])
        shared = {f.name for f in fields(kind)} & {f.name for f in fields(before)} - {"name"}
        kept = {n: getattr(before, n) for n in shared}
        needed = {f.name for f in fields(kind) if f.default is f.default_factory is MISSING}
        kept |= dict.fromkeys(needed - kept.keys(), tyro.MISSING)
        config = replace(config, **{table: kind(**kept)})
    return config


def _with_preset(config: Config, arguments: Sequence[str]) -> tuple[Config, Sequence[str]]:
    """Completes the augmentation by a preset that is named; returns the other options as well.

    As in a file, settings that are not the defaults are changes of the preset.
    """
    from pydist.data.augment.options import AugmentOptions

    words = [part for word in arguments for part in _parts(word, _PRESET)]
    if _PRESET not in words:
        return config, arguments
    place = words.index(_PRESET)
    if len(words) == place + 1 or _PRESET in words[place + 1 :]:
        raise UsageError(f"{_PRESET}: one name is expected")
    default, before = AugmentOptions(), config.data.augment
    changes = {name: value for name, value in vars(before).items() if value != vars(default)[name]}
    augment = AugmentOptions.preset(words[place + 1], **changes)
    config = replace(config, data=replace(config.data, augment=augment))
    return config, words[:place] + words[place + 2 :]


def _parts(word: str, option: str) -> list[str]:
    """Returns an option and its value if the word is option=value, else the word alone."""
    return word.split("=", 1) if word.startswith(f"{option}=") else [word]


def _with_new_arguments(config: Config, arguments: Sequence[str]) -> tuple[Config, Sequence[str]]:
    """Adds arguments of a factory to a configuration; returns it, and the other options."""
    from pydist.train import config_io
    from pydist.train.config import FactoryConfig

    if not isinstance(config.model, FactoryConfig):
        return config, arguments
    given: dict[str, Any] = {}
    rest: list[str] = []
    words = iter(arguments)
    for word in words:
        found = _ARGUMENT.fullmatch(word)
        if found is None or found[1] in config.model.args:
            rest.append(word)
            continue
        text = next(words, None) if found[2] is None else found[2]
        if text is None:
            raise UsageError(f"{word}: a value is expected, in TOML")
        given[found[1]] = config_io.value(text)
    model = replace(config.model, args={**config.model.args, **given})
    return replace(config, model=model), rest


def _required(complaint: str, kind: type) -> str | None:
    """Returns the missing arguments in argparse's words, if that is the complaint.

    tyro prints the help of each, and names a positional one by its type alone.
    """
    found = re.match(r"Missing from (pydist[a-z -]*)[^:]*:", complaint)
    if found is None:
        return None
    *missing, _ = complaint[found.end() :].split("(required)")
    options = [re.match(r" (?:(-\w) \S+, )?(--\S+) ", each) for each in missing]
    names = ["/".join(filter(None, option.groups())) for option in options if option]
    # A tuple may be empty, so it is never missing; the last ones of the others are.
    positional = [
        each.name
        for each in fields(kind)
        if each.default is each.default_factory is MISSING
        and re.match(r"tyro\.conf\.Positional\[(?!tuple)", str(each.type))
    ]
    names[:0] = positional[len(positional) - options.count(None) :]
    help_of = f"{found[1].strip()} --help tells more"
    return f"the following arguments are required: {', '.join(names)}; {help_of}"


def _switch_with_value(complaint: str, arguments: Sequence[str]) -> str | None:
    """Returns what is possible, if the complaint is about a value such as false of a switch."""
    found = _VALUE_OF_SWITCH.fullmatch(complaint)
    words = [part for word in arguments for part in word.split("=", 1)]
    for option, value in pairwise(words):
        if found and value == found[1] and option.startswith("--"):
            *tables, name = option.removeprefix("--").split(".")
            name = name.removeprefix("no-")
            on, off = (".".join((*tables, each)) for each in (name, f"no-{name}"))
            return f"{option} {value}: it takes no value; possible are --{on} and --{off}"
    return None


def _types(of_configuration: bool) -> ConstructorRegistry:
    """Returns types of options that tyro lacks, or shows otherwise."""
    registry = ConstructorRegistry()
    if of_configuration:
        _add_tables(registry)

    @registry.primitive_rule
    def _(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
        """Lists the choices of an optional one in the order of their type, not of a set."""
        choice, *others = get_args(info.type) or (None,)
        if get_origin(choice) is not Literal or others != [NoneType]:
            return None
        choices = ("None", *get_args(choice))
        return PrimitiveConstructorSpec(
            nargs=1,
            metavar="{" + ",".join(choices) + "}",
            instance_from_str=lambda given: None if given == ["None"] else given[0],
            is_instance=lambda given: str(given) in choices,
            str_from_instance=lambda given: [str(given)],
            choices=choices,
        )

    return registry


def _add_tables(registry: ConstructorRegistry) -> None:
    """Adds the types of stages and gradients, which are given in TOML."""
    from pydist.train import config_io
    from pydist.train.config import StagesConfig
    from pydist.train.config.gradients import FORMS, GradientsConfig, name_of

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


def _plain(box: str) -> str:
    """Extracts one line from the framed text that tyro prints."""
    box = re.sub(r"\x1b\[[0-9;]*m", "", box)  # colors, on a terminal
    lines = [line.strip("│╭╮╰╯─ \t") for line in box.splitlines()]
    lines = [line for line in lines if line.strip("-")]  # rules are dashes in ASCII output
    text = " ".join(" ".join(lines[1:]).split())  # after the frame's title
    text = re.split(r" Argument helptext| For full helptext| Got errors", text)[0]
    text = re.sub(r"^Error parsing [a-z._]+: ", "", text)  # of a table: the rest names the option
    if found := _VALUE.fullmatch(text):
        types = found["types"] or (found["INT"] or found["FLOAT"]).upper()
        given = " ".join(re.findall("'(.*?)'", found["given"]))
        expected = " or ".join(each.strip("{}") for each in types.split("|"))
        return f"{found['option']} {given}: {expected} is expected"
    text, *suggestion = text.split("Perhaps you meant: ")
    return text.strip() + (f"; did you mean {suggestion[0].split()[0]}?" if suggestion else "")
