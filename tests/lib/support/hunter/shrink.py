"""Minimizes a failing program: fewer statements, layers and ranks, and a smaller sample."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from support.hunter.program import Program


def shrunk(program: Program, fails: Callable[[Program], bool], seconds: float = 120) -> Program:
    """Returns the smallest program found that still fails; every intermediate step fails, too.

    Args:
        program: a program that fails.
        fails: returns whether a program fails in the same way.
        seconds: time after which no further candidate is tried.
    """
    deadline = time.monotonic() + seconds
    while True:
        before = program
        for steps in (_fewer_statements, _fewer_layers, _simpler_split, _smaller_sample):
            program = _descend(program, steps, fails, deadline)
        if program == before or time.monotonic() > deadline:
            return program


def _descend(
    program: Program,
    steps: Callable[[Program], Iterator[Program]],
    fails: Callable[[Program], bool],
    deadline: float,
) -> Program:
    """Takes every step that keeps the failure."""
    found = True
    while found:
        found = False
        for candidate in steps(program):
            if time.monotonic() > deadline:
                return program
            if fails(candidate):
                program, found = candidate, True
                break
    return program


def _fewer_statements(program: Program) -> Iterator[Program]:
    """Yields the program without a run of statements: long runs first, from the end."""
    count = len(program.statements)
    size = max(1, count // 2)
    while size >= 1:
        for start in range(count - size, -1, -size):
            kept = program.statements[:start] + program.statements[start + size :]
            yield replace(program, statements=kept)
        size //= 2


def _fewer_layers(program: Program) -> Iterator[Program]:
    for name, layers in program.networks.items():
        if not any(repr(name) in s for s in program.statements):
            rest = {k: v for k, v in program.networks.items() if k != name}
            yield replace(program, networks=rest)
        for i in range(len(layers)):
            kept = layers[:i] + layers[i + 1 :]
            yield replace(program, networks={**program.networks, name: kept})


def _simpler_split(program: Program) -> Iterator[Program]:
    if program.points:
        yield replace(program, points=())
    if program.keep_thin_blocks:
        yield replace(program, keep_thin_blocks=False)
    if program.channel > 1:
        yield replace(program, channel=program.channel - 1)
    if program.looker:
        yield replace(program, looker=0)
    if len(program.groups) > 1:
        yield replace(program, groups=program.groups[:-1])
    for i, n in enumerate(program.groups):
        if n > 1:
            groups = (*program.groups[:i], n - 1, *program.groups[i + 1 :])
            yield replace(program, groups=groups)
    for i, n in enumerate(program.spatial):
        if n > 1:
            spatial = (*program.spatial[:i], n - 1, *program.spatial[i + 1 :])
            yield replace(program, spatial=spatial, points=())


def _smaller_sample(program: Program) -> Iterator[Program]:
    if program.points:
        return
    for i, n in enumerate(program.sample):
        for smaller in {2, n // 2, n - 1} if i else {1}:
            if 0 < smaller < n:
                sample = (*program.sample[:i], smaller, *program.sample[i + 1 :])
                yield replace(program, sample=sample)
