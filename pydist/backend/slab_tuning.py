"""Chooses kernels for the slabs' parts of a convolution, by measurement on CUDA.

All ranks of a sample group choose together, so ranks with equal slabs use equal kernels. On the
CPU there is one kernel, and nothing to choose or to exchange.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pydist.backend.autotuner import Autotuner
from pydist.backend.conv import in_format
from pydist.backend.records import key_of
from pydist.backend.slabs import SlabProblem, run_slab, unsupported

if TYPE_CHECKING:
    from pydist.comm import Transport

_WARM_UP, _REPEATS = 3, 11
_HEAD_START, _MOST_HEAD_START = 2_000_000, 512_000_000
"""Clock cycles that keep the device busy: about a millisecond, and a quarter of a second."""
NEVER = 1e9
"""Time of a kernel that refuses a problem, in seconds, so that it is not chosen."""


@dataclass(frozen=True)
class SlabSubject:
    """Part of a convolution that one slab has, as a subject of the autotuner."""

    problem: SlabProblem
    device: str

    @cached_property
    def key(self) -> str:
        """Key that names the problem, the device and libraries; see `Subject.key`."""
        facts = {
            "problem": {name: str(value) for name, value in asdict(self.problem).items()},
            "torch": torch.__version__,
            "device": self.device,
            "cudnn": torch.backends.cudnn.version(),
            "benchmark": torch.backends.cudnn.benchmark,
            "clock": "device",  # records of earlier releases hold the host's times
        }
        return key_of("slab", facts)

    @property
    def choice_key(self) -> str:
        """Key that is the same; see `Subject.choice_key`."""
        return self.key

    @property
    def candidates(self) -> Sequence[str]:
        """Names of the kernels that are possible; see `Subject.candidates`."""
        return self.problem.candidates

    def rivals(self, candidate: str) -> Sequence[str]:
        """Returns all candidates, as they compute the same; see `Subject.rivals`."""
        return self.candidates


def by_rule(problems: Sequence[SlabProblem]) -> list[str]:
    """Chooses kernels by a fixed rule, without measuring: on CUDA the library's (cuDNN)."""
    return [problem.candidates[0] for problem in problems]


def choose(
    tuner: Autotuner,
    problems: Sequence[Sequence[SlabProblem]],
    group: Transport,
    like: Tensor,
    learns: bool,
) -> list[str] | None:
    """Chooses the kernels of every slab. Collective over `group`.

    Args:
        tuner: of the mesh.
        problems: of every rank of the group; all on one type of device.
        group: the ranks that hold one sample.
        like: a tensor on the device that computes.
        learns: whether to measure unknown candidates; the value of the group's first rank counts.

    Returns:
        The names for this rank's problems; `None` if not measured yet.
    """
    mine = list(problems[group.rank])
    if all(len(p.candidates) == 1 for each in problems for p in each):
        return by_rule(mine)
    capturing = like.is_cuda and torch.cuda.is_current_stream_capturing()
    device = torch.cuda.get_device_name(like.device) if like.is_cuda else str(like.device)
    subjects = [[SlabSubject(problem, device) for problem in each] for each in problems]
    by_key = {subject.key: subject.problem for each in subjects for subject in each}

    def picked(times: Mapping[str, Mapping[str, float]]) -> list[list[str]]:
        return [
            [min(s.candidates, key=times[s.key].__getitem__) for s in each] for each in subjects
        ]

    def possible(choices: Sequence[list[str]]) -> bool:
        return list(map(len, choices)) == list(map(len, problems)) and all(
            name in problem.candidates
            for names, each in zip(choices, problems, strict=True)
            for name, problem in zip(names, each, strict=True)
        )

    choice, is_final = tuner.choose(
        group,
        subjects,
        lambda key, name: seconds_on(by_key[key], name, like),
        picked,
        possible,
        learns and not capturing,
    )
    if choice is not None:
        names: list[str] = choice
        return names
    return by_rule(mine) if is_final else None


@torch.no_grad()
def seconds_on(problem: SlabProblem, name: str, like: Tensor) -> float:
    """Returns the seconds of a kernel on a device; `NEVER` if it refuses the problem.

    Args:
        problem: the slab's part of the convolution.
        name: of the kernel; see `SlabProblem.candidates`.
        like: a tensor on the device.
    """
    first, second, target = operands(problem, like)
    if unsupported(name, problem, first, second, target):
        return NEVER
    where = problem.first_lo, problem.target_lo
    return seconds_of(partial(run_slab, name, problem, first, second, target, *where))


def operands(problem: SlabProblem, like: Tensor) -> list[Tensor]:
    """Returns random operands and the target, all in the problem's memory format.

    The numbers are small, so that repeated sums do not overflow, but not zeros, which run faster.
    They are drawn by a separate generator: the program's random numbers do not depend on tuning.
    """
    draw = torch.Generator(like.device).manual_seed(0)
    shapes = (problem.first, problem.second, problem.target)
    numbers = [torch.randn(shape, generator=draw, device=like.device) for shape in shapes]
    return [in_format(each.mul_(0.1).to(problem.dtype), problem.channels_last) for each in numbers]


def seconds_of(kernel: Callable[[], None]) -> float:
    """Returns the median seconds of a call on the device.

    The device is busy until all calls are queued: otherwise the times would be those of the host,
    and a candidate of two short launches would lose to one long launch.
    """
    for _ in range(_WARM_UP):
        kernel()
    head_start = _HEAD_START
    while True:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(_REPEATS + 1)]
        torch.cuda.synchronize()
        torch.cuda._sleep(head_start)
        for event in events[:-1]:
            event.record()
            kernel()
        is_ahead = not events[0].query()
        events[-1].record()
        events[-1].synchronize()
        if is_ahead or head_start >= _MOST_HEAD_START:
            pairs = itertools.pairwise(events)
            return statistics.median(one.elapsed_time(two) for one, two in pairs) / 1e3
        head_start *= 4
