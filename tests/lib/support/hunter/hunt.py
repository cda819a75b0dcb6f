"""The hunt: runs programs from seeds until time is up, and writes a small script per failure."""

from __future__ import annotations

import collections
import contextlib
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from support.hunter.generator import draft_of, program_of
from support.hunter.isolation import each_isolated
from support.hunter.judge import BAD, Verdict, judge, legal, settings, without
from support.hunter.program import Program
from support.hunter.shrink import shrunk
from support.random_networks.spot import call

LIMIT = 60.0
"""Seconds after which the process of one program is killed."""

LEAST_SHARE = 0.6
"""A hunt with a smaller share of conclusive programs is itself a failure."""

REFUSALS = 4
"""Maximum number of refused statements to remove from a program before running the rest."""


@dataclass
class Tally:
    """Tally of a hunt, which counts programs by outcome and lists the failures.

    Attributes:
        outcomes: number of programs by outcome.
        refused: number of refusals by message.
        shortened: number of programs that are equal after removal of refused statements.
        found: seed and verdict of each program that failed.
    """

    outcomes: collections.Counter[str] = field(default_factory=collections.Counter)
    refused: collections.Counter[str] = field(default_factory=collections.Counter)
    found: list[tuple[int, Verdict]] = field(default_factory=list)
    shortened: int = 0

    @property
    def programs(self) -> int:
        return self.outcomes.total()

    @property
    def share(self) -> float:
        """Share of the programs that are conclusive: equal as generated, or raised."""
        counted = self.outcomes["equal"] - self.shortened + self.outcomes["raised"]
        return counted / (self.programs or 1)

    def count(self, seed: int, answer: Answer, *, quiet: bool = False) -> None:
        """Adds a program, and prints its verdict if it failed."""
        verdict = answer.verdict
        self.outcomes[verdict.outcome] += 1
        self.shortened += verdict.outcome == "equal" and bool(answer.refused)
        if verdict.bad:
            self.found.append((seed, verdict))
            if not quiet:
                print(f"seed {seed}: {verdict.outcome}: {verdict.detail}", flush=True)

    def lines(self) -> Iterator[str]:
        parts = ", ".join(f"{n} {name}" for name, n in self.outcomes.most_common())
        wrong = sum(self.outcomes[name] for name in BAD)
        yield f"{self.programs} programs: {parts}; {wrong} failed"
        yield f"{self.shortened} of the equal ones without statements that were refused"
        for message, n in self.refused.most_common(12):
            yield f"  refused {n} times: {message}"


Task = tuple[int, tuple[str, ...]]
"""A seed, and the allowed ingredients of its program."""


class Answer(NamedTuple):
    """The verdict on a program, after removal of the statements that were refused."""

    verdict: Verdict
    refused: list[str]
    program: Program | None


def examine(task: Task) -> Answer:
    """Generates the program of a seed and judges it, removing refused statements."""
    program = program_of(*task)
    refused: list[str] = []
    while program is not None:
        verdict = judge(program)
        # A program with different data is a single loop.
        if verdict.outcome != "refused" or program.differs or len(refused) == REFUSALS:
            return Answer(verdict, refused, program)
        refused.append(verdict.detail)
        program = legal(without(program, verdict.statement))
    return Answer(Verdict("illegal"), refused, None)


def _made(task: Task) -> Program | None:
    return program_of(*task)


def answered(task: Task, answer: Answer | Verdict) -> Answer:
    """Returns the answer to a task; its process may have died."""
    if isinstance(answer, Answer):
        return answer
    return Answer(blamed(answer, draft_of(*task)), [], None)


def blamed(verdict: Verdict, draft: Program) -> Verdict:
    """Returns the verdict on a program whose process died: illegal if plain torch dies too."""
    if verdict.outcome == "crash" and draft.reference == "torch":
        ((_, answer),) = each_isolated(legal, [draft], LIMIT)
        if isinstance(answer, Verdict):
            return Verdict("illegal", f"torch itself: {answer.detail}")
    return verdict


def warm_up() -> None:
    """Initializes what every program needs, once for all children."""
    layers = (call("nn.Conv3d", 1, 2, 3, padding=1), call("nn.BatchNorm3d", 2), call("nn.ReLU"))
    statements = (
        "m0 = ready(net('m0'))",
        "opt = torch.optim.Adam(params(m0))",
        "checkpointed(m0, cut(0)).square().mean().backward()",
        "opt.step()",
        "see_model('m0', m0)",
    )
    with settings():
        verdict = judge(Program(statements, {"m0": layers}, (1, 4, 2, 2)))
    assert verdict.outcome == "equal", verdict


def hunt(
    tasks: Iterable[Task],
    seconds: float,
    workers: int = 1,
    most: int = 10**9,
    *,
    quiet: bool = False,
) -> Tally:
    """Examines programs until the tasks, the time or the allowed failures run out, or Ctrl-C."""
    warm_up()
    deadline = time.monotonic() + seconds
    tally = Tally()

    def in_time() -> Iterator[Task]:
        for task in tasks:
            if time.monotonic() > deadline or len(tally.found) >= most:
                return
            yield task

    with contextlib.suppress(KeyboardInterrupt):
        for task, answer in each_isolated(examine, in_time(), LIMIT, workers):
            seed, found = task[0], answered(task, answer)
            tally.refused.update(_short(text) for text in found.refused)
            tally.count(seed, found, quiet=quiet)
    return tally


def minimise(task: Task, outcome: str, seconds: float) -> str | None:
    """Returns a script of the smallest program found that fails like the seed's program."""
    ((_, answer),) = each_isolated(examine, [task], LIMIT)
    program = answer.program if isinstance(answer, Answer) else None
    if program is None:  # its process died
        ((_, made),) = each_isolated(_made, [task], LIMIT)
        program = made if isinstance(made, Program) else None
    if program is None:
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
    """Returns a refusal without the parts that differ between programs."""
    text = message.split("; ", maxsplit=1)[0]
    text = re.sub(r" (in module \S+|at [^()]*?:\d+|\(shapes [^)]*\))", "", text)
    return re.sub(r"\d+(, \d+)*", "n", text)[:160]
