"""The parser of commands that forward most options, without heavy imports."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from pydist.errors import UsageError
from pydist.parsing import byte_count


class OwnOptions(argparse.ArgumentParser):
    """Argument parser that reports errors on one line."""

    def error(self, message: str) -> NoReturn:
        """Raises `UsageError`."""
        raise UsageError(f"{message}; {self.prog} --help tells more")


class RunOptions(OwnOptions):
    """Parser of commands that run a configuration on ranks, with the options of all of them.

    Other options are the configuration's; they are returned as they are.

    Args:
        prog: the command.
        usage: of the command, for errors.
    """

    def __init__(self, prog: str, usage: str) -> None:
        super().__init__(
            prog=prog,
            usage=usage,
            add_help=False,
            allow_abbrev=False,
            epilog="The settings follow, with the values of CONFIG; without one, of the defaults.",
        )
        self._usage_line = usage
        self.add_argument(
            "config",
            nargs="?",
            type=Path,
            metavar="CONFIG",
            help="the TOML file of the run, such as those in examples/",
        )
        self.add_argument(
            "-n",
            dest="ranks",
            type=int,
            metavar="RANKS",
            help="start this many ranks on this machine; without it this process is one rank, of "
            "the job that mpirun, torchrun or srun started, or alone",
        )
        self.add_argument(
            "--mpi",
            default="auto",
            metavar="NAME",
            help="with -n: openmpi, mpich, gloo (no MPI), or auto, the first of these that is "
            "installed",
        )

    def parse(self, arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
        """Returns the command's own options, and those of the configuration.

        If help is requested, prints its own part; the configuration's options print theirs.

        Raises:
            UsageError: no configuration, or a misspelled option of the command.
        """
        options, overrides = self.parse_known_args(arguments)
        if {"-h", "--help"} & set(overrides):
            self.print_help()
            print(flush=True)
        elif options.config is None:
            raise UsageError(f"no configuration file was given; usage: {self._usage_line}")
        # Before the configuration's options are searched for matches.
        for given in (each for each in overrides if each.startswith("-")):
            name = given.partition("=")[0]
            if own := difflib.get_close_matches(name, self._option_string_actions, 1, 0.8):
                raise UsageError(f"unknown option {given}; did you mean {own[0]}?")
        return options, overrides


def size_of(option: str, given: str) -> int:
    """Returns the bytes that an option names, such as 16GB.

    Raises:
        UsageError: it names none.
    """
    try:
        return byte_count(given)
    except ValueError as error:
        raise UsageError(f"{option} {given}: {error}") from None


def arguments_of_ranks(arguments: Sequence[str]) -> list[str]:
    """Returns the arguments with which a command that starts ranks runs on each of them.

    The number of ranks is replaced by ``--mpi auto``, which is without effect there, and not left
    out: an option of several values may be before it, and the files after it.
    """
    words, own = iter(arguments), list[str]()
    for word in words:
        if word == "--":
            return [*own, word, *words]
        if word in ("-n", "--ranks"):
            next(words)
        elif not word.startswith(("-n", "--ranks=")):
            own.append(word)
            continue
        own += ["--mpi", "auto"]
    return own
