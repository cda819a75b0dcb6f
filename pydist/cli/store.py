"""`pydist store exec`: runs a program that reads packs as files, or counts its calls on files.

The program is not changed; see docs/packs.md.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydist.cli.mounting import mounted
from pydist.cli.own_options import OwnOptions
from pydist.cli.store_profile import Counters
from pydist.errors import UsageError
from pydist.launch.signal_handlers import handled

_USAGE = (
    "pydist store exec --mount PATH [--packs FOLDER] [--output [NAME=]FOLDER] [--large SIZE] "
    "[--cache SIZE] [--profile FILE] -- PROGRAM [ARGUMENT ...]"
)
_FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)
_SHELL_SIGNAL = 128
"""A shell's exit code of a program that a signal ended is this plus the signal's number."""


def execute(arguments: Sequence[str]) -> int:
    """Runs `pydist store exec`; see `pydist store exec --help`."""
    options, program = _parse(arguments)
    with contextlib.ExitStack() as stack:
        counters = None
        if options.profile is not None:
            counters = stack.enter_context(Counters(Path(options.profile)))
        environment = stack.enter_context(
            mounted(
                options.mount,
                options.packs,
                options.output,
                options.large,
                None if counters is None else counters.file,
                options.cache,
            )
        )
        code = _run(program, environment)
        if counters is not None:
            print(counters.finish(), file=sys.stderr)
    return code


def _parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = OwnOptions(
        prog="pydist store exec",
        usage=_USAGE,
        description="Runs a program, unchanged, that sees a pack as a folder of files. Without "
        "--packs it runs on the files that are there, for --profile.",
        allow_abbrev=False,
    )
    parser.add_argument("--mount", required=True, metavar="PATH", help="where the files appear")
    parser.add_argument("--packs", metavar="FOLDER", help="a pack, made by pydist data pack")
    parser.add_argument(
        "--output",
        metavar="[NAME=]FOLDER",
        help="a folder for results; it appears at the mount point by its own name, or as NAME",
    )
    parser.add_argument(
        "--large", metavar="SIZE", help="larger files are not copied into memory (16MiB)"
    )
    parser.add_argument(
        "--cache",
        metavar="SIZE",
        help="memory for copies of files that were opened (1GiB, or half of what is free)",
    )
    parser.add_argument("--profile", metavar="FILE", help="count calls, and write them as JSON")
    own, program = list(arguments), []
    if "--" in own:
        program = own[own.index("--") + 1 :]
        own = own[: own.index("--")]
    options = parser.parse_args(own)
    if not program:
        raise UsageError(f"no program was given after --; usage: {_USAGE}")
    if options.packs is None and options.profile is None:
        raise UsageError("--packs, --profile or both are needed; pydist store exec --help")
    return options, program


def _run(program: Sequence[str], environment: Mapping[str, str]) -> int:
    """Runs a program to its end, passes signals on to it, and returns its exit code."""
    # The shell finds and starts a program that is in the pack, too: it is preloaded itself.
    command = ["/bin/sh", "-c", 'exec "$@"', "pydist store exec", *program]
    started: list[subprocess.Popen[bytes]] = []
    early: list[int] = []  # signals that have arrived before the program was known here

    def forward(number: int, frame: object) -> None:
        if number == signal.SIGINT:
            return  # the terminal sends Ctrl-C to the program, too
        if started:
            started[0].send_signal(number)
        else:
            early.append(number)

    with handled(_FORWARDED, forward):
        started.append(subprocess.Popen(command, env=dict(environment)))
        for number in early:
            started[0].send_signal(number)
        code = started[0].wait()
    return code if code >= 0 else _SHELL_SIGNAL - code
