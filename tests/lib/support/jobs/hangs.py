"""Hangs in every phase of a job: which rank is named, and when all processes have ended.

    PYTHONPATH=tests/lib python -m support.jobs.hangs [--limit SECONDS] [--mpi NAME ...] [PHASE ...]

runs the full matrix, with `pydist run` and with each launcher by itself, and prints a table.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from socket import gethostname

from pydist.comm.interface.ledger import DIFFERENT
from pydist.data import UniverseOptions, generate_universes
from pydist.errors import RankLost, UsageError
from pydist.launch.backends import available
from support.jobs.children import child_environment
from support.jobs.programs import path_of

PHASES = (
    "join", "opening", "tuning", "halo", "reduction", "backward", "buckets", "optimizer", "saving",
    "validation", "loader", "finalize",
)  # fmt: skip
FAULTS = ("stop", "spin", "caught", "return")
LAUNCHERS = ("openmpi", "mpich", "gloo")
SCRIPT = path_of("hanging")
PATIENT = {"opening": 3, "tuning": 3, "saving": 3, "validation": 3, "finalize": 3}
"""How many limits a phase may stay silent for, if not one."""
IN_SECOND_STEP = ("halo", "reduction", "backward", "buckets")
"""Phases of a loop in which the fault strikes in the second step."""
SLACK = 2.0
"""Seconds beyond the limit, on a machine with a core per running process."""


@dataclass
class Outcome:
    code: int
    seconds: float
    """Time from the fault to the end of the last process."""
    stderr: str
    left: list[int]
    """Processes that still exist."""
    pids: dict[int, int]
    """Process ids by rank."""

    @property
    def is_named(self) -> bool:
        return "rank 1" in self.stderr

    def complaint(self, phase: str, fault: str, limit: float) -> str:
        """Returns the problem with the outcome, or ""."""
        if self.seconds < 0:
            return "the job ended before the fault"
        # No rank waits for one that leaves after pydist has ended; the exit code is then the
        # launcher's choice.
        leaves = phase == "finalize" and fault in ("caught", "return") and self.code in (0, 1)
        if not self.is_named and not (leaves and self.code == 0):
            return "rank 1 is not named"
        # Ranks that continue after an exception call different operations, which they detect.
        differ = (
            fault == "caught"
            and self.code == UsageError.exit_code
            and (DIFFERENT in self.stderr or "a backward() that raised" in self.stderr)
        )
        if not (self.code == RankLost.exit_code or differ or leaves):
            return f"exit code {self.code}"
        if self.left:
            return f"processes {self.left} are left"
        if why := self.unsaid(phase, fault):
            return why
        most = seconds_allowed(phase, limit)
        return f"{self.seconds:.1f} s, more than {most:.1f}" if self.seconds > most else ""

    def unsaid(self, phase: str, fault: str) -> str:
        """Returns what the watchdog's report lacks, or ""."""
        reports = self.stderr.count("pydist: hang: no rank of ")
        by_launcher = "rank 1 stopped (state T) after the others" in self.stderr
        # A broken connection may be detected first.
        if fault not in ("stop", "spin") or (phase == "finalize" and by_launcher):
            return "" if reports <= 1 else f"{reports} reports"
        if reports != 1:
            return f"{reports} reports"
        blocked = "is in a call that does not return"
        ends = "has (reached the end of its program|ended)"
        waits = {"join": blocked, "finalize": ends}.get(phase, "waits for other ranks")
        # In the loader, one of its threads has the fault, and holds the interpreter's lock.
        shared = rf"(computes|sleeps, and waits for no rank|{blocked})"
        runs = {"finalize": waits, "loader": shared}.get(phase, "computes")
        faulty = (r"is stopped \(state T", "") if fault == "stop" else (runs, " in fault")
        expected = {0: (waits, ""), 1: faulty}
        if phase == "join":
            if "  has not reached pydist.init: rank 1\n" not in self.stderr:
                return "rank 1 is not missed"
            del expected[1]
        for rank, (how, function) in expected.items():
            place = (
                rf"  rank {rank} \(host {re.escape(gethostname())}, process {self.pids[rank]}\) "
            )
            step = r"\d+" if phase not in IN_SECOND_STEP or rank == 0 else "2"
            if not re.search(rf"^{place}{how}.*: step {step}, phase '.+'", self.stderr, re.M):
                return f"what rank {rank} does is not said"
            stack = re.search(rf"^\[rank {rank}\]   File .*{function}$", self.stderr, re.M)
            if phase != "finalize" and bool(stack) == (rank == 1 and fault == "stop"):
                return f"stack of rank {rank}: {stack}"
        return ""


def seconds_allowed(phase: str, limit: float) -> float:
    """Returns the limit from fault to end, in seconds; longer if other programs use the cores."""
    busy = os.getloadavg()[0] / (os.cpu_count() or 1)
    return limit * PATIENT.get(phase, 1) + SLACK * max(1.0, busy)


def command(
    launcher: str, argv: list[str], folder: Path, plain: bool
) -> tuple[list[str], dict[str, str]]:
    """Returns the command that starts two ranks, by `pydist run` or by the launcher itself."""
    if not plain:
        return [sys.executable, "-m", "pydist.launch", "2", launcher, *argv], {}
    if launcher == "gloo":
        module = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        return [sys.executable, *module, *argv], {}
    backend = next(each for each in available() if each.name == launcher)
    return backend.command(2, [sys.executable, *argv]), backend.variables(2, folder)


def make_data(folder: Path) -> None:
    """Generates the training data of the program `hanging`, next to its own folder."""
    options = UniverseOptions(count=6, width=32, box_width=32, validation=1 / 3)
    generate_universes(folder / "universes", options)


def hang(
    folder: Path, launcher: str, phase: str, fault: str, limit: float, plain: bool = False
) -> Outcome:
    """Runs the program under a launcher until all its processes have ended."""
    line, variables = command(launcher, [str(SCRIPT), str(folder), phase, fault], folder, plain)
    variables |= {"PYDIST_HANG_LIMIT": str(limit), "PYDIST_CACHE": str(folder / "cache")}
    variables |= {"PYDIST_TUNE": "1" if phase == "tuning" else "0", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        line,
        env=child_environment(**variables),
        cwd=SCRIPT.parent,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with process:
        try:
            _, stderr = process.communicate(timeout=60 + 4 * limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            _, stderr = process.communicate()
            stderr += "\n(the launcher was killed)"
    ended = time.time()
    pids = {int(path.name[3:]): int(path.read_text()) for path in folder.glob("pid*")}
    while (left := [pid for pid in pids.values() if is_alive(pid)]) and time.time() < ended + 2:
        time.sleep(0.02)
    began = folder / "time"
    seconds = time.time() - float(began.read_text()) if began.exists() else -1.0
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return Outcome(process.returncode, seconds, stderr, left, pids)


def is_alive(pid: int) -> bool:
    """Returns whether a process runs, sleeps or is stopped; a zombie counts as ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    return False


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("phases", nargs="*", default=PHASES)
    parser.add_argument("--limit", type=float, default=3)
    parser.add_argument("--mpi", nargs="+", default=LAUNCHERS)
    parser.add_argument("--faults", nargs="+", default=FAULTS)
    parser.add_argument("--plain", action="store_true", help="the launchers without pydist run")
    options = parser.parse_args()
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        make_data(Path(folder))
        for phase in options.phases:
            for fault in options.faults:
                for launcher in options.mpi:
                    place = Path(folder, f"{phase}-{fault}-{launcher}")
                    place.mkdir()
                    outcome = hang(place, launcher, phase, fault, options.limit, options.plain)
                    why = outcome.complaint(phase, fault, options.limit)
                    # No rank waits if the exception follows the last message of a phase.
                    ok = not why or (fault == "caught" and outcome.code == 0)
                    wrong += not ok
                    print(
                        f"{phase:10} {fault:7} {launcher:8} code {outcome.code:3} "
                        f"{outcome.seconds:6.1f} s {'' if ok else 'WRONG: ' + why}",
                        flush=True,
                    )
                    if not ok:
                        sys.stderr.write(outcome.stderr[-1500:])
    print(f"{wrong} wrong")


if __name__ == "__main__":
    main()
