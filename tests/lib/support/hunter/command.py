"""Implements the command-line interface of `tools/hunt`."""

from __future__ import annotations

import argparse
import functools
import itertools
import multiprocessing
import re
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from support.hunter.generator import INGREDIENTS, KNOWN
from support.hunter.hunt import LEAST_SHARE, LIMIT, Task, hunt, minimise
from support.hunter.mutations import MUTATIONS, Mutation
from support.hunter.under_mpi import hunt_mpi

SOME = 20
"""Minimum number of programs for the check of `LEAST_SHARE`."""

STALE_PATCH = re.compile("(Type|Attribute|Name)Error: ")
"""Errors of a patched function whose arguments have changed."""

MUTANT_PROGRAMS = 400
"""Default maximum number of programs to search for a mutation."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="tools/hunt", description="Runs random training programs on one device and split."
    )
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--programs", type=int, help="maximum number of programs")
    parser.add_argument("--seconds", type=float, default=120.0, help="start none after this time")
    parser.add_argument(
        "--only", nargs="*", choices=(*INGREDIENTS, *KNOWN), metavar="INGREDIENT",
        help=f"allowed parts of programs besides networks and steps: {', '.join(INGREDIENTS)}; "
        f"known to differ: {', '.join(KNOWN)}",
    )  # fmt: skip
    parser.add_argument("--failures", type=int, default=10**9, help="stop after so many")
    parser.add_argument("--workers", type=int, default=1, help="concurrent processes")
    parser.add_argument("--minimise", type=int, default=3, help="number of failures to minimize")
    parser.add_argument("--mpi", help="run programs under this MPI as well: openmpi, mpich, gloo")
    parser.add_argument("--ranks", type=int, default=2, help="ranks of the MPI job")
    parser.add_argument(
        "--mutations", nargs="*", choices=tuple(MUTATIONS), metavar="NAME",
        help="put these known faults into pydist, or all, one at a time, and search for each in up "
        f"to --programs programs (default {MUTANT_PROGRAMS}): {', '.join(MUTATIONS)}",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, help="folder for scripts of failures; default: print")
    given = parser.parse_args(arguments)
    start = time.monotonic()
    ingredients = INGREDIENTS if given.only is None else tuple(given.only)
    most = 10**9 if given.programs is None else given.programs
    tasks: Iterator[Task] = ((seed, ingredients) for seed in itertools.count(given.seed))
    if given.mutations is not None:
        return hunt_mutations(given)
    if given.mpi is None:
        tasks = itertools.islice(tasks, most)
        tally = hunt(tasks, given.seconds, given.workers, given.failures)
    else:
        tally = hunt_mpi(tasks, given.seconds, given.workers, given.ranks, given.mpi, most)
    print(*tally.lines(), sep="\n")
    print(f"seeds from {given.seed}, {time.monotonic() - start:.0f} s", flush=True)
    for seed, verdict in tally.found[: given.minimise]:
        script = minimise((seed, ingredients), verdict.outcome, 120)
        if script is None:
            print(f"seed {seed}: the failure is not reproducible, or its outcome varies")
        elif given.out is None:
            print(f"\n{script}")
        else:
            given.out.mkdir(parents=True, exist_ok=True)
            path = given.out / f"found-{seed}.py"
            path.write_text(script)
            print(f"{path}: {verdict.outcome}")
    empty = tally.programs >= SOME and tally.share < LEAST_SHARE
    if empty:
        print(f"only {tally.share:.0%} of the programs were equal as generated, or raised")
    return 1 if tally.found or empty else 0


def hunt_mutations(given: argparse.Namespace) -> int:
    """Looks for each known fault; returns 1 if one was not found."""
    missed = 0
    names = given.mutations or MUTATIONS
    # A process has one fault at a time.
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(given.workers, context) as pool:
        for programs, text in pool.map(functools.partial(_hunt_mutation, given), names):
            missed += not programs
            print(text, flush=True)
    return 1 if missed else 0


def _hunt_mutation(given: argparse.Namespace, name: str) -> tuple[int, str]:
    """Returns what `found_in` does for a known fault, with the line to print."""
    mutation = MUTATIONS[name]
    most = MUTANT_PROGRAMS if given.programs is None else given.programs
    only = mutation.only if given.only is None else tuple(given.only)
    programs, text = found_in(mutation, only, given.seed, most, given.seconds)
    how = f"found by program {programs}" if programs else "NOT FOUND"
    return programs, f"point {mutation.point}, {name} (--only {' '.join(only)}): {how}: {text}"


def found_in(
    mutation: Mutation, only: Sequence[str], seed: int, most: int, seconds: float
) -> tuple[int, str]:
    """Returns how many programs it takes to find a known fault (0: not found), and a text.

    Args:
        mutation: the fault.
        only: ingredients of the programs.
        seed: the first seed.
        most: maximum number of programs.
        seconds: time after which no program starts.
    """
    deadline, first = time.monotonic() + seconds, seed
    while seed < first + most:
        tasks = [(s, tuple(only)) for s in range(seed, first + most)]
        with mutation.applied():
            tally = hunt(tasks, deadline - time.monotonic(), most=1, quiet=True)
        if not tally.found:
            return 0, f"{seed + tally.programs - first} programs"
        found, verdict = tally.found[0]
        if STALE_PATCH.search(verdict.detail):
            return 0, f"the patch does not fit pydist any more: {verdict.detail}"
        if not hunt([(found, tuple(only))], LIMIT, quiet=True).found:
            return found - first + 1, f"seed {found}, {verdict.outcome}: {verdict.detail}"
        seed = found + 1  # it fails without the fault as well
    return 0, f"{most} programs"


if __name__ == "__main__":
    sys.exit(main())
