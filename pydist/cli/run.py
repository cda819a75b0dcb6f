"""`pydist run`: starts a Python program on several ranks of this machine."""

from __future__ import annotations

from collections.abc import Sequence

from pydist.cli.own_options import OwnOptions
from pydist.errors import UsageError
from pydist.launch.supervisor import launch

_OPTIONS = ("-n", "--mpi")


def run(arguments: Sequence[str]) -> int:
    """Runs `pydist run`; see `pydist run --help`."""
    parser = OwnOptions(
        prog="pydist run",
        usage="pydist run -n RANKS [--mpi NAME] [--] SCRIPT | -m MODULE [ARGUMENT ...]",
        description="Starts a Python program on several ranks of this machine. "
        "In the program, pydist.init() joins the job.",
        allow_abbrev=False,
    )
    parser.add_argument("-n", dest="ranks", type=int, required=True, help="number of ranks")
    parser.add_argument(
        "--mpi",
        default="auto",
        help="openmpi, mpich, gloo (no MPI), or auto: the first of these that is installed",
    )
    own, program = _split(arguments)
    options = parser.parse_args(own)
    if not program:
        raise UsageError("no script was given, as in: pydist run -n 4 script.py")
    return launch(options.ranks, program, options.mpi)


def _split(arguments: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Splits off the launcher's options from the program and its arguments."""
    i = 0
    while i < len(arguments) and arguments[i].startswith(_OPTIONS):
        i += 2 if arguments[i] in _OPTIONS else 1  # "-n4" and "--mpi=gloo" have their value
    if i < len(arguments) and arguments[i] in ("-h", "--help"):
        i += 1
    program = arguments[i:]
    return arguments[:i], program[1:] if program[:1] == ["--"] else program
