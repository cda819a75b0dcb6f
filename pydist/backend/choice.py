"""Which convolution kernels, and which memory format: chosen by measurement, and remembered.

All ranks of a sample group choose together. The memory format is one for all of them, as halos
travel in it; the kernels are the same wherever ranks hold equal blocks, whose copies must not
differ in a bit. What was measured is kept in a file, so that the next run chooses the same and
gives the same bits; where no file can be kept, nothing is measured and a fixed rule chooses.
"""

from __future__ import annotations

import json
import math
import os
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from pydist import memory
from pydist.backend.conv import (
    DGRAD,
    FORWARD,
    WGRAD,
    candidates,
    formats,
    in_format,
    transposed,
)
from pydist.backend.problem import ConvProblem
from pydist.backend.store import NEVER, UNKNOWN, Store, agree
from pydist.parsing import parse_json

if TYPE_CHECKING:
    from pydist.comm import Transport

# Below this a convolution takes less than a few milliseconds, and the rule is as good.
_MEASURED_FLOPS = 200_000_000
# Runs after the first: at least two, and as many as go into that time. All kernels take turns this
# often, as what else runs on the machine comes and goes.
_FEWEST, _MOST, _SECONDS, _TURNS = 2, 8, 0.03, 2
_ROLES = ("forward", "dgrad", "wgrad")
# A kernel that is this much slower than the best is run once only.
_HOPELESS = 2.0
# What is to replace the best guess has to be faster by this: in a network, caches are cold.
_MARGIN = 1.1


@dataclass(frozen=True)
class ConvKernels:
    """What computes one convolution on this rank.

    Attributes:
        problem: the convolution.
        channels_last: the memory format of its input, its result and their gradients.
        forward: name of the kernel, as `dgrad` and `wgrad`; see `pydist.backend.conv`.
        dgrad: for dL/dx.
        wgrad: for dL/dweight.
        threads: how many threads compute; `None` for as many as torch is set to.
    """

    problem: ConvProblem
    channels_last: bool
    forward: str
    dgrad: str
    wgrad: str
    threads: int | None = None

    def in_format(self, x: Tensor) -> Tensor:
        """The same tensor in the memory format chosen; a copy only if it has another one."""
        return in_format(x, self.channels_last)

    def run_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The convolution of `x` with zero padding."""
        weight = self._lying(weight)
        return self._run(lambda: FORWARD[self.forward](self.problem, x, weight, bias))

    def run_dgrad(self, x: Tensor, grad: Tensor, weight: Tensor) -> Tensor:
        """dL/dx from `grad` = dL/dy."""
        weight = self._lying(weight)
        return self._run(lambda: DGRAD[self.dgrad](self.problem, x, grad, weight))

    def run_transposed(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The transposed convolution of `x`, the adjoint of the problem's convolution."""
        weight = self._lying(weight)
        return self._run(lambda: transposed(self.problem, x, weight, bias))

    def run_wgrad(self, x: Tensor, grad: Tensor, weight: Tensor) -> Tensor:
        """dL/dweight from `grad` = dL/dy."""
        weight = self._lying(weight)
        return self._run(lambda: WGRAD[self.wgrad](self.problem, x, grad, weight))

    def _lying(self, weight: Tensor) -> Tensor:
        """The weight as the kernels take it: oneDNN's in plain memory, cuDNN's as activations."""
        return in_format(weight, self.channels_last and self.problem.device != "cpu")

    def _run(self, kernel: Callable[[], Tensor]) -> Tensor:
        before = torch.get_num_threads()
        if self.threads is None or self.threads == before:
            return kernel()
        torch.set_num_threads(self.threads)
        try:
            return kernel()
        finally:
            torch.set_num_threads(before)


def by_rule(problems: Sequence[ConvProblem], rank: int) -> ConvKernels:
    """The choice without measuring: the best guess of every list.

    Args:
        problems: of every rank of the group.
        rank: this one's place in it.
    """
    mine = problems[rank]
    largest = max(problems, key=lambda p: p.flops)
    channels_last = next(f for f in formats(largest) if all(f in formats(p) for p in problems))
    forward, dgrad, wgrad = (names[0] for names in candidates(mine, channels_last))
    return ConvKernels(mine, channels_last, forward, dgrad, wgrad)


def choose(
    problems: Sequence[ConvProblem],
    group: Transport,
    x: Tensor,
    weight: Tensor,
    measure: bool = True,
) -> ConvKernels | None:
    """Measures the possible kernels on every rank and picks the fastest. Collective over `group`.

    Args:
        problems: of every rank of the group.
        group: the ranks that hold one sample.
        x: this rank's input; its values do not matter.
        weight: the weights.
        measure: whether to measure what is not remembered; the group's first rank says so for all.

    Returns:
        What this rank uses; its memory format is that of all. `None` if it is yet to be measured.
    """
    ruled = by_rule(problems, group.rank)
    possible = math.prod(len(names) for names in candidates(ruled.problem, ruled.channels_last))
    options = len(formats(ruled.problem)) * possible * len(_thread_counts())
    worth_it = max(p.flops for p in problems) >= _MEASURED_FLOPS
    same = all(set(formats(p)) == set(formats(ruled.problem)) for p in problems)
    if not worth_it or not same or (options == 1 and group.size == 1):
        return ruled
    state = agree(
        _store(problems),
        group,
        partial(_measure, ruled.problem, x, weight),
        partial(_pick, problems),
        measure,
    )
    if state in (UNKNOWN, NEVER):
        return None if state == UNKNOWN else ruled
    return ConvKernels(ruled.problem, **json.loads(state)[problems.index(ruled.problem)])


_Times = list[dict[str, Any]]
"""Seconds by setting: {"channels_last", "threads", "convert", "forward": {name: s}, ...}."""


def _pick(problems: Sequence[ConvProblem], times: Sequence[_Times]) -> list[dict[str, Any]]:
    """The choice of every rank; equal problems get equal choices."""
    # The first rank of those with equal problems speaks for them.
    speakers = [times[problems.index(p)] for p in problems]
    best = [[_best(setting) for setting in each] for each in speakers]
    formats_in_order = dict.fromkeys(c["channels_last"] for _, c in best[0])
    channels_last = _clearly_least(
        {
            cl: sum(min(s for s, c in each if c["channels_last"] == cl) for each in best)
            for cl in formats_in_order
        }
    )
    picked = []
    for each in best:
        options = [(s, c) for s, c in each if c["channels_last"] == channels_last]
        picked.append(options[_clearly_least({i: s for i, (s, _) in enumerate(options)})][1])
    return picked


_Key = TypeVar("_Key")


def _clearly_least(seconds: dict[_Key, float]) -> _Key:
    """Which took the least time; the first, the best guess, if none is better by the margin."""
    first, least = next(iter(seconds)), min(seconds, key=seconds.__getitem__)
    return least if seconds[least] * _MARGIN < seconds[first] else first


def _best(setting: dict[str, Any]) -> tuple[float, dict[str, Any]]:
    """Seconds of all roles with the fastest kernels of one setting, and their names."""
    choice = {"channels_last": setting["channels_last"], "threads": setting["threads"]}
    total = setting["convert"]
    for role in _ROLES:
        name = _clearly_least(setting[role])
        choice[role] = name
        total += setting[role][name]
    return total, choice


@torch.no_grad()
def _measure(problem: ConvProblem, x: Tensor, weight: Tensor) -> _Times:
    x, weight = x.detach(), in_format(weight.detach(), channels_last=False)
    found: dict[tuple[bool, int], dict[str, Any]] = {}
    before = torch.get_num_threads()
    try:
        for _ in range(_TURNS):
            for channels_last in formats(problem):
                begin = time.perf_counter()
                source = in_format(x, channels_last)
                convert = time.perf_counter() - begin if source is not x else 0.0
                for threads in _thread_counts(before):
                    torch.set_num_threads(threads)
                    setting = found.setdefault(
                        (channels_last, threads),
                        {"channels_last": channels_last, "threads": threads, "convert": convert}
                        | {role: {} for role in _ROLES},
                    )
                    setting["convert"] = min(setting["convert"], convert)
                    _measure_roles(problem, source, weight, setting)
    finally:
        torch.set_num_threads(before)
    return list(found.values())


def _measure_roles(problem: ConvProblem, x: Tensor, weight: Tensor, times: dict[str, Any]) -> None:
    """Adds the seconds of every kernel to `times`, by role and name."""
    forward, dgrad, wgrad = candidates(problem, times["channels_last"])
    for name in forward:
        _time(times["forward"], name, partial(FORWARD[name], problem, x, weight, None))
    grad = FORWARD[forward[0]](problem, x, weight, None)
    for name in dgrad:
        _time(times["dgrad"], name, partial(DGRAD[name], problem, x, grad, weight))
    for name in wgrad:
        _time(times["wgrad"], name, partial(WGRAD[name], problem, x, grad, weight))


def _time(seconds: dict[str, float], name: str, run: Callable[[], Tensor]) -> None:
    best = seconds.get(name, math.inf)
    others = min((s for of, s in seconds.items() if of != name), default=math.inf)
    start = time.perf_counter()
    for count in range(1 + _MOST):
        if math.inf > best > _HOPELESS * others:
            break
        begin = time.perf_counter()
        if count > _FEWEST and begin - start > _SECONDS:
            break
        run()
        best = min(best, time.perf_counter() - begin)
    seconds[name] = best


def _thread_counts(threads: int | None = None) -> list[int]:
    threads = threads or torch.get_num_threads()
    return [threads] if threads == 1 else [threads, 1]


def _store(problems: Sequence[ConvProblem]) -> Store:
    """The file that remembers the choice for one list of problems."""
    facts = {
        "problems": [{k: str(v) for k, v in asdict(p).items()} for p in problems],
        "torch": torch.__version__,
        "cpu": [platform.processor(), torch.backends.cpu.get_cpu_capability()],
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        # Fresh pages cost some kernels more than others.
        "keeps_freed_memory": memory.is_kept(),
    }
    return Store("conv", facts, partial(_is_usable, problems))


def _is_usable(problems: Sequence[ConvProblem], content: bytes) -> bool:
    """Whether it is whole, and names kernels that are still to choose from."""
    try:
        choices = parse_json(content)
        formats_used = {choice["channels_last"] for choice in choices}
        return (
            len(choices) == len(problems)
            and len(formats_used) == 1
            and all(map(_fits, problems, choices))
        )
    except (ValueError, TypeError, KeyError):
        return False


def _fits(problem: ConvProblem, choice: dict[str, Any]) -> bool:
    names = candidates(problem, choice["channels_last"])
    return (
        choice["channels_last"] in formats(problem)
        and all(choice[role] in of for role, of in zip(_ROLES, names, strict=True))
        and choice["threads"] in _thread_counts()
        and len(choice) == len(_ROLES) + 2
    )
