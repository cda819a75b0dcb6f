"""Runs the `pydist` command: dispatches subcommands, turns errors into a line and an exit code.

Subcommands are imported when they are called: `pydist --help` must not wait for torch.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import os
import sys
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pydist._loader import native
from pydist.cli import streams
from pydist.errors import UsageError, disk_is_full, exit_code_of, output_is_gone
from pydist.launch import failures, launcher_env


class Command(NamedTuple):
    """Subcommand that `function(arguments)` in `module` runs; it returns the exit code."""

    module: str
    function: str
    help: str


COMMANDS = {
    "data universes": Command("pydist.cli.data", "universes", "make synthetic universes"),
    "data ct": Command("pydist.cli.data", "ct", "make synthetic CT volumes with labels"),
    "data nifti": Command("pydist.cli.data", "nifti", "convert NIfTI images and labels"),
    "data pack": Command("pydist.cli.data", "pack", "pack many small files into a few large ones"),
    "data stage": Command("pydist.cli.stage", "stage", "copy a node's part of a pack to its disk"),
    "data serve": Command("pydist.cli.serve", "serve", "serve a pack's partitions to other nodes"),
    "data dicom": Command("pydist.cli.data", "dicom", "convert DICOM series and labels"),
    "data index": Command("pydist.cli.data", "index", "make a data set of existing files"),
    "data convert": Command("pydist.cli.data", "convert", "copy a data set into another format"),
    "data info": Command("pydist.cli.data", "info", "describe a data set"),
    "data verify": Command("pydist.cli.data", "verify", "compare a data set with its checksums"),
    "train": Command("pydist.cli.train", "train", "train a network from a TOML file"),
    "status": Command("pydist.cli.status", "status", "tell how far a run is, from outside"),
    "predict": Command("pydist.cli.predict", "predict", "predict volumes, images or samples"),
    "serve": Command("pydist.cli.serve_model", "serve_model", "predict for requests over HTTP"),
    "export": Command("pydist.cli.export", "export", "extract the weights from a checkpoint"),
    "profile": Command("pydist.cli.profile", "profile", "measure a training step by layer"),
    "balance": Command("pydist.cli.balance", "balance", "suit parts to ranks of unequal speed"),
    "plan": Command("pydist.cli.plan", "plan", "predict time and memory of every mesh"),
    "bench sample-size": Command(
        "pydist.cli.bench", "sample_size", "compare whole samples with sub-cubes of them"
    ),
    "bench scaling": Command(
        "pydist.cli.bench", "scaling", "measure and model how training scales"
    ),
    "sweep": Command("pydist.cli.sweep", "sweep", "train with many settings, side by side"),
    "check": Command("pydist.cli.check", "check", "compare a split network with one device"),
    "store exec": Command("pydist.cli.store", "execute", "run a program on packs as files"),
    "env": Command("pydist.cli.env", "env", "report versions and hardware, for bug reports"),
    "run": Command("pydist.cli.run", "run", "start a Python script on several ranks"),
    "demo unet": Command("pydist.cli.demo_unet", "demo_unet", "learn to segment synthetic CT"),
    "demo": Command("pydist.cli.demo", "demo", "train on 4 ranks, compare with 1, draw the result"),
}

_HELP = ("-h", "--help", "help")

EXIT_CODES = """exit codes:
  0 ok   2 usage   65 bad data   66 does not fit in memory   71 a rank raised
  72 a rank died or hung   73 checkpoint   74 disk   75 stopped, checkpoint saved (requeue)"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        arguments: the arguments after the program's name; by default as this process got them.

    Returns:
        The exit code (see `pydist.errors`).
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    streams.prepare()
    try:
        if launcher_env.detect() is None:
            return _flushed(arguments)
        # This process is a rank: an error must end the other ranks too.
        with failures.guarded():
            return _flushed(arguments)
    except (Exception, KeyboardInterrupt) as error:
        code = exit_code_of(error)
        with contextlib.suppress(OSError):
            sys.stderr.write(failures.describe(error))
        if output_is_gone(error) or disk_is_full(error):
            # The interpreter would try to flush the rest again when it ends.
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return code


def _flushed(arguments: Sequence[str]) -> int:
    """Runs a command and flushes its output while errors can still be handled."""
    try:
        return _dispatch(arguments)
    finally:
        if sys.stdout is not None:
            sys.stdout.flush()


def _dispatch(arguments: Sequence[str]) -> int:
    if not arguments or arguments[0] in _HELP:
        print(_usage())
        return 0 if arguments else UsageError.exit_code
    if arguments[0] == "--version":
        import pydist

        print(f"pydist {pydist.__version__}")
        return 0
    native.cpu_isa()  # raises an error for an unknown PYDIST_ISA
    for words in (2, 1):
        command = COMMANDS.get(" ".join(arguments[:words]))
        if command is not None:
            function = getattr(importlib.import_module(command.module), command.function)
            return int(function(arguments[words:]))
    group = [name for name in COMMANDS if name.startswith(f"{arguments[0]} ")]
    if group and (len(arguments) == 1 or arguments[1] in _HELP):
        print(_group_usage(arguments[0], group))
        return 0 if len(arguments) > 1 else UsageError.exit_code
    given = " ".join(arguments[: 2 if group else 1])
    possible = ", ".join(group or COMMANDS)
    raise UsageError(f"no command {given!r}; {_likely(arguments) or f'there are: {possible}'}")


def _likely(arguments: Sequence[str]) -> str:
    """Returns a question about the commands that were likely meant; nothing without any."""
    for words in (2, 1):
        given = " ".join(arguments[:words])
        if found := difflib.get_close_matches(given, COMMANDS, cutoff=0.75):
            return f"did you mean {' or '.join(found)}?"
    return ""


def _described(names: Iterable[str]) -> list[str]:
    return [f"  {name:<19}{COMMANDS[name].help}" for name in names]


def _group_usage(word: str, names: Sequence[str]) -> str:
    """Returns the help of commands that share their first word."""
    lines = [f"usage: pydist {word} COMMAND ...", "", "commands:", *_described(names)]
    return "\n".join([*lines, "", f"pydist {word} COMMAND --help tells more"])


def _usage() -> str:
    lines = ["usage: pydist COMMAND ...", "", "commands:"]
    lines += _described(COMMANDS)
    lines += ["", "pydist COMMAND --help tells more; pydist --version", "", EXIT_CODES]
    return "\n".join(lines)
