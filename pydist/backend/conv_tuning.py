"""Measures the candidate kernels of convolutions for the autotuner.

Large ones are measured on a part of their planes, and the seconds are scaled up: a call of some
50 ms is as informative as one of seconds. So all measuring takes less time than ten steps.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pydist import memory
from pydist.backend.autotuner import Autotuner
from pydist.backend.conv import DGRAD, FORWARD, WGRAD, in_format
from pydist.backend.conv_kernels import (
    CONVERT,
    Candidate,
    ConvKernels,
    by_rule,
    candidates_of,
    is_possible,
    pick,
    worth_choosing,
)
from pydist.backend.problem import ConvProblem
from pydist.backend.records import key_of

if TYPE_CHECKING:
    from pydist.comm import Transport

# Below this, a convolution takes less than a few milliseconds, and the rule is as good.
_MEASURED_FLOPS = 200_000_000
# Flops of the part of a convolution that is measured: 10 to 50 ms of one core.
_PART_FLOPS = 1_000_000_000
# From here on, several threads are faster than one.
_FLOPS_OF_THREADS = 2_000_000_000
# One visit makes calls for this time. The very first call may include setup, but candidates are
# visited several times.
_SECONDS = 0.005


@dataclass(frozen=True)
class ConvSubject:
    """Convolution that one rank computes, as a subject of the autotuner.

    Attributes:
        problem: the convolution.
        threads: the possible numbers of threads.
        ranks: number of ranks of a host, which compute at the same time.
    """

    problem: ConvProblem
    threads: tuple[int, ...]
    ranks: int

    @cached_property
    def key(self) -> str:
        """Key that names the problem, libraries, CPU, threads and ranks; see `Subject.key`."""
        return f"{self.choice_key}-{self.ranks}"

    @cached_property
    def choice_key(self) -> str:
        """Key that leaves out the number of ranks; see `Subject.choice_key`."""
        facts = {
            "problem": {name: str(value) for name, value in asdict(self.problem).items()},
            "torch": torch.__version__,
            "cpu": [platform.processor(), torch.backends.cpu.get_cpu_capability()],
            "cores": os.cpu_count(),
            "threads": self.threads,
            # Fresh memory pages cost some kernels more than others.
            "keeps_freed_memory": memory.is_kept(),
        }
        return key_of("conv", facts)

    @cached_property
    def by_name(self) -> dict[str, Candidate]:
        """Candidates that compute the convolution, by their names."""
        return {str(each): each for each in candidates_of(self.problem, self.threads)}

    @property
    def candidates(self) -> Sequence[str]:
        """Names that identify kernel, memory format and threads; see `Subject.candidates`."""
        return list(self.by_name)

    def rivals(self, candidate: str) -> Sequence[str]:
        """Returns the candidates of the same role; see `Subject.rivals`."""
        role = self.by_name[candidate].role
        return [name for name, each in self.by_name.items() if each.role == role]


def choose(
    tuner: Autotuner,
    problems: Sequence[ConvProblem],
    group: Transport,
    x: Tensor,
    weight: Tensor,
    ranks: int,
    learns: bool = True,
) -> ConvKernels | None:
    """Chooses the kernels of a convolution. Collective over `group`.

    Args:
        tuner: of the mesh.
        problems: of every rank of the group.
        group: the ranks that hold one sample.
        x: this rank's input, or at least the planes of `measured_part`; its values do not matter.
        weight: the weights.
        ranks: of a host, of this group and others, which measure at the same time.
        learns: whether to measure unknown candidates; the value of the group's first rank counts.

    Returns:
        This rank's kernels, in the memory format of all ranks. `None` if not measured yet.
    """
    ruled = by_rule(problems, group.rank)
    if not worth_choosing(problems, group.rank, _MEASURED_FLOPS):
        return ruled
    threads = thread_counts(problems)
    subjects = [ConvSubject(problem, threads, ranks) for problem in problems]
    mine = subjects[group.rank]
    visits = Visits(mine, x.detach(), weight.detach())

    def picked(times: Mapping[str, Mapping[str, float]]) -> list[dict[str, Any]]:
        by_candidate = [
            {each: times[subject.key][name] for name, each in subject.by_name.items()}
            for subject in subjects
        ]
        return [_dumped(kernels) for kernels in pick(problems, by_candidate)]

    def possible(choices: Sequence[Any]) -> bool:
        try:
            made = [_loaded(p, c) for p, c in zip(problems, choices, strict=True)]
            one_format = len({kernels.channels_last for kernels in made}) == 1
            return one_format and all(is_possible(kernels, threads) for kernels in made)
        except (TypeError, ValueError):  # the file was edited
            return False

    choice, is_final = tuner.choose(
        group,
        [[subject] for subject in subjects],
        lambda _, name: visits(name),
        picked,
        possible,
        learns,
    )
    if choice is not None:
        return _loaded(mine.problem, choice)
    return ruled if is_final else None


def _dumped(kernels: ConvKernels) -> dict[str, Any]:
    return {k: v for k, v in vars(kernels).items() if k != "problem"}


def _loaded(problem: ConvProblem, choice: Mapping[str, Any]) -> ConvKernels:
    return ConvKernels(problem, **choice)


def thread_counts(problems: Sequence[ConvProblem]) -> tuple[int, ...]:
    """Returns the numbers of threads among which kernels of some ranks' convolutions are chosen."""
    threads = torch.get_num_threads()
    large = max(problem.flops for problem in problems) >= _FLOPS_OF_THREADS
    return (threads,) if threads == 1 or large else (threads, 1)


class Visits:
    """Function object that measures candidates of one convolution.

    Args:
        subject: the convolution.
        x: its input, or at least the planes of `measured_part`.
        weight: its weight.
    """

    def __init__(self, subject: ConvSubject, x: Tensor, weight: Tensor) -> None:
        self._subject, self._whole, self._given = subject, x, weight
        self._operands: dict[bool, tuple[Tensor, Tensor]] = {}

    @torch.no_grad()
    def __call__(self, name: str) -> float:
        """Returns the seconds of a candidate, scaled to the full convolution."""
        candidate = self._subject.by_name[name]
        before = torch.get_num_threads()
        torch.set_num_threads(candidate.threads)
        try:
            return seconds_of(self._call_of(candidate)) * self._scale
        finally:
            torch.set_num_threads(before)

    @cached_property
    def _part(self) -> ConvProblem:
        return measured_part(self._subject.problem)

    @cached_property
    def _scale(self) -> float:
        return self._subject.problem.flops / self._part.flops

    @cached_property
    def _x(self) -> Tensor:
        return self._whole.narrow(2, 0, self._part.input[2])

    @cached_property
    def _weight(self) -> Tensor:
        return in_format(self._given, channels_last=False)

    def _call_of(self, candidate: Candidate) -> Callable[[], object]:
        if candidate.role == CONVERT:
            return lambda: in_format(self._x, candidate.channels_last)
        part, weight = self._part, self._weight
        x, grad = self._operands_in(candidate.channels_last)
        if candidate.role == "forward":
            return lambda: FORWARD[candidate.kernel](part, x, weight, None)
        kernel = (DGRAD if candidate.role == "dgrad" else WGRAD)[candidate.kernel]
        return lambda: kernel(part, x, grad, weight)

    def _operands_in(self, channels_last: bool) -> tuple[Tensor, Tensor]:
        if channels_last not in self._operands:
            x = in_format(self._x, channels_last)
            grad = x.new_ones(()).expand(self._part.output)
            self._operands[channels_last] = x, in_format(grad.clone(), channels_last)
        return self._operands[channels_last]


def measured_part(problem: ConvProblem) -> ConvProblem:
    """Returns the convolution of enough input planes to measure, at most all of them.

    Its candidates are the kernels of the full convolution.
    """
    planes = problem.input[2]
    wanted = -(-planes * _PART_FLOPS // max(1, problem.flops))
    for count in range(max(wanted, 2 * (problem.reach[0] + 1)), planes // 2 + 1):
        part = replace(problem, input=(*problem.input[:2], count, *problem.input[3:]))
        kinds = ("torch_is_slow", "folds", "is_wide", "padding_is_modest", "is_ordinary")
        if all(getattr(part, kind) == getattr(problem, kind) for kind in kinds):
            return part
    return problem


def seconds_of(run: Callable[[], object]) -> float:
    """Returns the least seconds of one or more calls."""
    best, start, ended = float("inf"), time.perf_counter(), 0.0
    while ended - start < _SECONDS:
        began = time.perf_counter()
        run()
        ended = time.perf_counter()
        best = min(best, ended - began)
    return max(best, 1e-9)
