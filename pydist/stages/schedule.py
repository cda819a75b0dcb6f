"""Schedules: the order in which a stage runs the passes of micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

from pydist.errors import UsageError


class Pass(NamedTuple):
    """A forward or backward pass of a micro-batch on one stage."""

    kind: Literal["forward", "backward"]
    micro_batch: int


def gpipe(stage: int, stages: int, micro_batches: int) -> list[Pass]:
    """Runs all forward passes, then all backward passes.

    Source: Huang et al., GPipe (NeurIPS 2019). Idle are (S - 1) of M + S - 1 passes; all M
    micro-batches are in memory.
    """
    numbers = range(micro_batches)
    return [Pass("forward", m) for m in numbers] + [Pass("backward", m) for m in numbers]


def one_f_one_b(stage: int, stages: int, micro_batches: int) -> list[Pass]:
    """Runs min(M, S - stage) forward passes, then a backward and a forward pass in turn.

    Source: Narayanan et al., PipeDream (SOSP 2019), with a flush after each step. It takes as long
    as GPipe, and keeps at most S - stage micro-batches in memory.
    """
    ahead = min(micro_batches, stages - stage)
    passes = [Pass("forward", m) for m in range(ahead)]
    for m in range(micro_batches):
        passes.append(Pass("backward", m))
        if ahead + m < micro_batches:
            passes.append(Pass("forward", ahead + m))
    return passes


SCHEDULES: dict[str, Callable[[int, int, int], list[Pass]]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
}
"""Schedules by name; called with the stage, the numbers of stages and of micro-batches."""


def schedule_of(name: str) -> Callable[[int, int, int], list[Pass]]:
    """Returns the schedule with a name.

    Raises:
        UsageError: it does not exist.
    """
    if name not in SCHEDULES:
        raise UsageError(f"schedule={name!r}; possible are {', '.join(SCHEDULES)}")
    return SCHEDULES[name]


def most_alive(passes: list[Pass]) -> int:
    """Returns the most micro-batches whose forward pass waits for its backward pass."""
    alive = most = 0
    for each in passes:
        alive += 1 if each.kind == "forward" else -1
        most = max(most, alive)
    return most
