"""Which kernels add the slabs' parts: chosen by measurement on CUDA, and remembered.

All ranks of a sample group choose together, so that ranks with equal slabs take equal kernels (see
`pydist.backend.choice`). On the CPU there is one kernel, and nothing to choose or to exchange.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pydist.backend.conv import in_format
from pydist.backend.slab_problem import SlabProblem
from pydist.backend.slabs import refusal, run
from pydist.backend.store import NEVER, UNKNOWN, Store, agree
from pydist.parsing import parse_json

if TYPE_CHECKING:
    from pydist.comm import Transport

_WARM_UP, _REPEATS = 3, 11

_Times = dict[str, dict[str, float]]
"""Seconds of each kernel, by problem."""


def by_rule(problems: Sequence[SlabProblem]) -> list[str]:
    """The choice without measuring: on CUDA the library's, which nothing may be slower than."""
    return [problem.candidates[0] for problem in problems]


def choose(
    problems: Sequence[Sequence[SlabProblem]], group: Transport, like: Tensor, measure: bool
) -> list[str] | None:
    """Measures the kernels for every slab and picks the fastest. Collective over `group`.

    Args:
        problems: of every rank of the group; all on one type of device.
        group: the ranks that hold one sample.
        like: a tensor on the device that computes.
        measure: whether to measure what is not remembered; the group's first rank says so for all.

    Returns:
        The names for this rank's problems; `None` if they are yet to be measured.
    """
    mine = list(problems[group.rank])
    if all(len(p.candidates) == 1 for each in problems for p in each):
        return by_rule(mine)
    capturing = like.is_cuda and torch.cuda.is_current_stream_capturing()
    store = _store(problems, like)
    state = agree(store, group, partial(_measure, mine, like), pick, measure and not capturing)
    if state in (UNKNOWN, NEVER):
        return None if state == UNKNOWN else by_rule(mine)
    names = json.loads(state)
    return [names[_key(problem)] for problem in mine]


def _key(problem: SlabProblem) -> str:
    return json.dumps({k: str(v) for k, v in asdict(problem).items()}, sort_keys=True)


def pick(times: Sequence[_Times]) -> dict[str, str]:
    """The fastest by problem; the first rank that has one speaks for all that do."""
    picked: dict[str, str] = {}
    for each in times:
        for problem, seconds in each.items():
            picked.setdefault(problem, min(seconds, key=seconds.__getitem__))
    return picked


def _store(problems: Sequence[Sequence[SlabProblem]], like: Tensor) -> Store:
    distinct = {_key(p): p for each in problems for p in each}
    facts = {
        "problems": sorted(distinct),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(like.device) if like.is_cuda else str(like.device),
        "cudnn": torch.backends.cudnn.version() if like.is_cuda else None,
        "benchmark": torch.backends.cudnn.benchmark,
    }

    def is_usable(content: bytes) -> bool:
        try:
            names = parse_json(content)
            return names.keys() == distinct.keys() and all(
                names[key] in problem.candidates for key, problem in distinct.items()
            )
        except (ValueError, AttributeError):
            return False

    return Store("slabs", facts, is_usable)


@torch.no_grad()
def _measure(problems: Sequence[SlabProblem], like: Tensor) -> _Times:
    times: _Times = {}
    for problem in problems:
        if _key(problem) in times:
            continue
        first, second, target = operands(problem, like)
        where = problem.first_lo, problem.target_lo
        times[_key(problem)] = {
            name: seconds_of(partial(run, name, problem, first, second, target, *where))
            for name in problem.candidates
            if not refusal(name, problem, first, second, target)
        }
    return times


def operands(problem: SlabProblem, like: Tensor) -> list[Tensor]:
    """The first and the second operand, and the target, all of the problem's memory format.

    Small numbers: adding them up again and again must not overflow, and zeros run faster.
    """
    shapes = (problem.first, problem.second, problem.target)
    numbers = [torch.randn(shape, device=like.device).mul_(0.1) for shape in shapes]
    return [in_format(each.to(problem.dtype), problem.channels_last) for each in numbers]


def seconds_of(kernel: Callable[[], None]) -> float:
    """The median time of a call on the device."""
    for _ in range(_WARM_UP):
        kernel()
    times = []
    for _ in range(_REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        kernel()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)
