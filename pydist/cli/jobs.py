"""Command lines of the jobs that a study starts, and the lines that tell of them."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from pydist.cli.console import Console
from pydist.errors import RankFailed, UsageError
from pydist.launch import launcher_env
from pydist.studies.runs import CommandOf, Outcome, Run, Tell

# Not `python -m`: it searches the current folder first, and in a checkout would find the sources,
# which have no compiled module.
_PROGRAM = (
    "import sys; sys.path[:] = [place for place in sys.path if place]; "
    "from pydist.cli.jobs import main; sys.exit(main(sys.argv[1:]))"
)


def main(arguments: Sequence[str]) -> int:
    """Runs `pydist` as the job of a study: it ends, with a checkpoint, if the study's process does.

    Args:
        arguments: the process id of the study, 0 if another program starts the ranks, and those of
            `pydist`.
    """
    from pydist.cli.main import main as run

    study, *rest = arguments
    if int(study):
        threading.Thread(target=_watch, args=(int(study),), daemon=True).start()
    return run(rest)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os.kill(os.getpid(), signal.SIGTERM)


def training_command(mpi: str = "auto", launcher: str | None = None) -> CommandOf:
    """Returns the function that gives the command line which trains a run.

    Args:
        mpi: as of `pydist train`, which starts the ranks on this machine.
        launcher: command that starts the ranks instead, such as "srun -n {ranks} --exact".

    Raises:
        UsageError: the launcher is no command with {ranks} in it.
    """
    own = [sys.executable, "-c", _PROGRAM]
    if launcher is None:
        return lambda run: [
            *own, str(os.getpid()), "train", str(run.settings), "-n", str(run.ranks), "--mpi", mpi,
        ]  # fmt: skip
    try:
        words = shlex.split(launcher)
        if not any("{ranks}" in word for word in words):
            raise ValueError("{ranks} is missing, which becomes the number of ranks")
    except ValueError as error:
        raise UsageError(f"launcher = {launcher!r}: {error}") from None

    def command(run: Run) -> list[str]:
        start = [word.replace("{ranks}", str(run.ranks)) for word in words]
        return [*start, *own, "0", "train", str(run.settings)]

    return command


def module_command(run: Run, mpi: str, module: str, arguments: Sequence[str]) -> list[str]:
    """Returns the command line that runs a module on the ranks of a run, with its settings.

    Args:
        run: the run.
        mpi: as of `pydist run`.
        module: its name.
        arguments: of the module, after the file with the settings.
    """
    start = [sys.executable, "-c", _PROGRAM, str(os.getpid()), "run", "-n", str(run.ranks)]
    return [*start, "--mpi", mpi, "-m", module, str(run.settings), *arguments]


def on_pack(command: Sequence[str], pack: Path, mount: Path) -> list[str]:
    """Returns the command line that runs another one, of `module_command`, on a pack as a folder.

    Args:
        command: the command line.
        pack: folder of the pack.
        mount: where the pack's files appear.
    """
    own = [sys.executable, "-c", _PROGRAM]
    job = command[len(own) + 1 :]  # the outer process looks after the study
    around = [*own, str(os.getpid()), "store", "exec", "--packs", str(pack), "--mount", str(mount)]
    return [*around, "--", *own, "0", *job]


def teller(console: Console, width: int) -> Tell:
    """Returns the function that prints a line when a run starts and when it ends.

    Args:
        console: where it prints.
        width: of the longest name.
    """

    def tell(run: Run, outcome: Outcome | None) -> None:
        text = "starts" if outcome is None else outcome.status
        if outcome is not None and outcome.loss is not None:
            text += f"  step {outcome.steps}  loss {outcome.loss:.4f}  {outcome.seconds:.0f} s"
        if outcome is not None and outcome.reason:
            text += f": {outcome.reason}"
        console.print(f"run        {run.name:<{width}}  {text}", soft_wrap=True, markup=False)

    return tell


def refuse_ranks(command: str) -> None:
    """Raises `UsageError` if this process is one of several ranks, as it starts jobs itself.

    A job of one rank may be the shell of the user, as in `srun --pty bash`.
    """
    who = launcher_env.detect()
    if who is not None and who.size > 1:
        raise UsageError(f"{command} starts its ranks itself: run it once, without a launcher")


def require_done(runs: Sequence[Run], outcomes: Sequence[Outcome]) -> None:
    """Raises `RankFailed` if a run has failed, and names all that have."""
    failed = [
        f"{run.name} ({outcome.reason})"
        for run, outcome in zip(runs, outcomes, strict=True)
        if outcome.status != "done"
    ]
    if failed:
        raise RankFailed(
            f"{len(failed)} of {len(runs)} runs failed: {'; '.join(failed)}; the same command "
            "repeats them alone"
        )
