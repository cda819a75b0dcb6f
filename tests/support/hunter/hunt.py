"""The hunt: programs from seeds until the time is over, and a small script of each that fails."""

from __future__ import annotations

import argparse
import collections
import re
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from random_spot import call

from hunter.generator import INGREDIENTS, KNOWN, program_of
from hunter.isolation import each_isolated
from hunter.job import run_job
from hunter.judge import BAD, Run, Verdict, judge, legal, run_whole, settings, verdict_of, without
from hunter.program import Program
from hunter.shrink import shrunk

LIMIT = 60.0
"""Seconds after which the process of one program is killed."""

BATCH = 100
"""Programs of one MPI job."""

REFUSALS = 4
"""So many refused statements are taken out of a program, and the rest run again."""


@dataclass
class Tally:
    """What a hunt found.

    Attributes:
        outcomes: number of programs by outcome.
        refused: number of refusals by message.
        found: seed, program and verdict of each that failed.
    """

    outcomes: collections.Counter[str] = field(default_factory=collections.Counter)
    refused: collections.Counter[str] = field(default_factory=collections.Counter)
    found: list[tuple[int, Verdict]] = field(default_factory=list)

    @property
    def programs(self) -> int:
        return self.outcomes.total()

    def count(self, seed: int, answer: Answer) -> None:
        """Adds a program, and says so where it failed."""
        verdict = answer.verdict
        self.outcomes[verdict.outcome] += 1
        if verdict.bad:
            self.found.append((seed, verdict))
            print(f"seed {seed}: {verdict.outcome}: {verdict.detail}", flush=True)

    def lines(self) -> Iterator[str]:
        parts = ", ".join(f"{n} {name}" for name, n in self.outcomes.most_common())
        wrong = sum(self.outcomes[name] for name in BAD)
        yield f"{self.programs} programs: {parts}; {wrong} failed"
        for message, n in self.refused.most_common(12):
            yield f"  refused {n} times: {message}"


Task = tuple[int, tuple[str, ...]]
"""A seed, and the ingredients that its program may have."""


class Answer(NamedTuple):
    """The verdict on a program, without the statements that were refused on the way."""

    verdict: Verdict
    refused: list[str]
    program: Program | None


def examine(task: Task) -> Answer:
    """Makes the program of a seed and judges it; what is refused is taken out."""
    program = program_of(*task)
    refused: list[str] = []
    while program is not None:
        verdict = judge(program)
        if verdict.outcome != "refused" or len(refused) == REFUSALS:
            return Answer(verdict, refused, program)
        refused.append(verdict.detail)
        program = legal(without(program, verdict.statement))
    return Answer(Verdict("illegal"), refused, None)


def _made(task: Task) -> Program | None:
    return program_of(*task)


def warm_up() -> None:
    """Loads what every program needs, once for all children."""
    layers = (call("nn.Conv3d", 1, 2, 3, padding=1), call("nn.BatchNorm3d", 2), call("nn.ReLU"))
    statements = (
        "m0 = ready(net('m0'))",
        "opt = torch.optim.Adam(params(m0))",
        "checkpoint(m0, cut(0), use_reentrant=False).square().mean().backward()",
        "opt.step()",
        "see_model('m0', m0)",
    )
    with settings():
        verdict = judge(Program(statements, {"m0": layers}, (1, 4, 2, 2)))
    assert verdict.outcome == "equal", verdict


def hunt(tasks: Iterable[Task], seconds: float, workers: int = 1, most: int = 10**9) -> Tally:
    """Examines programs until the tasks or the time are over, or so many have failed."""
    warm_up()
    deadline = time.monotonic() + seconds
    tally = Tally()

    def in_time() -> Iterator[Task]:
        for task in tasks:
            if time.monotonic() > deadline or len(tally.found) >= most:
                return
            yield task

    for (seed, _), answer in each_isolated(examine, in_time(), LIMIT, workers):
        found = Answer(answer, [], None) if isinstance(answer, Verdict) else answer
        tally.refused.update(_short(text) for text in found.refused)
        tally.count(seed, found)
    return tally


def hunt_mpi(tasks: Iterable[Task], seconds: float, workers: int, ranks: int, mpi: str) -> Tally:
    """As `hunt`, and programs for so many ranks that are equal there run as an MPI job as well."""
    warm_up()
    deadline = time.monotonic() + seconds
    tally, waiting = Tally(), list[tuple[int, Program]]()
    for (seed, _), answer in each_isolated(examine, tasks, LIMIT, workers):
        found = Answer(answer, [], None) if isinstance(answer, Verdict) else answer
        program = found.program
        over = time.monotonic() > deadline
        if found.verdict.outcome == "equal" and program is not None and program.ranks == ranks:
            waiting.append((seed, program))
        if waiting and (over or len(waiting) == BATCH):
            for seed_of, verdict in judged_under_mpi(waiting, ranks, mpi):
                tally.count(seed_of, Answer(verdict, [], None))
            waiting.clear()
        if over:
            break
    return tally


def judged_under_mpi(
    programs: Sequence[tuple[int, Program]], ranks: int, mpi: str
) -> Iterator[tuple[int, Verdict]]:
    """The verdicts on programs that run one after another in MPI jobs of so many ranks."""
    rest = list(programs)
    while rest:
        with tempfile.TemporaryDirectory(prefix="pydist-hunt-") as folder:
            output, runs = run_job(Path(folder), [p for _, p in rest], ranks, mpi)
        for (seed, program), found in zip(rest, runs, strict=False):
            ((_, verdict),) = each_isolated(_compared, [(program, found)], LIMIT)
            yield seed, verdict
        rest = rest[len(runs) :]
        if rest:  # the job ended at the next one
            yield rest[0][0], Verdict("crash", f"under {mpi}: {output[-500:]}")
            rest = rest[1:]


def _compared(case: tuple[Program, list[Run]]) -> Verdict:
    program, runs = case
    return verdict_of(program, run_whole(program), runs)


def minimise(task: Task, outcome: str, seconds: float) -> str | None:
    """A script of the smallest program found that fails as the seed's does."""
    ((_, answer),) = each_isolated(examine, [task], LIMIT)
    program = answer.program if isinstance(answer, Answer) else None
    if program is None:  # its process died
        ((_, program),) = each_isolated(_made, [task], LIMIT)
    if not isinstance(program, Program):
        return None
    last: list[Verdict] = []

    def fails(candidate: Program) -> bool:
        ((_, verdict),) = each_isolated(judge, [candidate], LIMIT)
        if verdict.outcome == outcome:
            last[:] = [verdict]
        return verdict.outcome == outcome

    if not fails(program):
        return None
    small = shrunk(program, fails, seconds)
    seed = task[0]
    return replace(small, seed=seed).script(f"seed {seed}: {outcome}: {last[0].detail}")


def _short(message: str) -> str:
    """A refusal without what differs from program to program."""
    text = message.split("; ", maxsplit=1)[0]
    text = re.sub(r" (in module \S+|at \S+:\d+|\(shapes [^)]*\))", "", text)
    return re.sub(r"\d+(, \d+)*", "n", text)[:160]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command `tools/hunt`."""
    parser = argparse.ArgumentParser(
        prog="tools/hunt", description="Runs random training programs split against whole."
    )
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--programs", type=int, default=10**9, help="at most so many")
    parser.add_argument("--seconds", type=float, default=120.0, help="start none after so long")
    parser.add_argument(
        "--only", nargs="*", choices=(*INGREDIENTS, *KNOWN), default=INGREDIENTS,
        metavar="INGREDIENT",
        help=f"what programs may have beside networks and steps: {', '.join(INGREDIENTS)}; "
        f"known to differ: {', '.join(KNOWN)}",
    )  # fmt: skip
    parser.add_argument("--failures", type=int, default=10**9, help="end after so many")
    parser.add_argument("--workers", type=int, default=1, help="processes at a time")
    parser.add_argument("--minimise", type=int, default=3, help="of so many failures")
    parser.add_argument("--mpi", help="run programs under this MPI as well: openmpi, mpich, gloo")
    parser.add_argument("--ranks", type=int, default=2, help="of the MPI job")
    parser.add_argument("--out", type=Path, help="folder for scripts of failures, else printed")
    given = parser.parse_args(arguments)
    start = time.monotonic()
    ingredients = tuple(given.only)
    tasks = ((seed, ingredients) for seed in range(given.seed, given.seed + given.programs))
    if given.mpi is None:
        tally = hunt(tasks, given.seconds, given.workers, given.failures)
    else:
        tally = hunt_mpi(tasks, given.seconds, given.workers, given.ranks, given.mpi)
    print(*tally.lines(), sep="\n")
    print(f"seeds from {given.seed}, {time.monotonic() - start:.0f} s", flush=True)
    for seed, verdict in tally.found[: given.minimise]:
        script = minimise((seed, ingredients), verdict.outcome, 120)
        if script is None:
            print(f"seed {seed}: fails not each time, or not with the same outcome")
        elif given.out is None:
            print(f"\n{script}")
        else:
            given.out.mkdir(parents=True, exist_ok=True)
            path = given.out / f"found-{seed}.py"
            path.write_text(script)
            print(f"{path}: {verdict.outcome}")
    return 1 if tally.found else 0


if __name__ == "__main__":
    sys.exit(main())
