"""The kernels that compute one convolution on a rank, and the choice among them.

All ranks of a sample group use the same memory format, as halos are sent in it. Ranks with equal
blocks use the same kernels, as their copies must be bit-identical.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pydist.backend.conv import (
    DGRAD,
    FORWARD,
    WGRAD,
    candidates,
    formats,
    in_format,
    transposed,
)
from pydist.backend.problem import ROLES, ConvProblem

CONVERT = "convert"
"""The role of converting the input to a memory format; it has one candidate."""
# A kernel replaces the best guess only if it is faster by this: in a network, caches are cold.
_MARGIN = 1.1


@dataclass(frozen=True)
class ConvKernels:
    """The kernels that were chosen for one convolution on this rank.

    Attributes:
        problem: the convolution.
        channels_last: the memory format of its input, its result and their gradients.
        forward: name of the forward kernel; see `pydist.backend.conv`.
        dgrad: name of the kernel for dL/dx.
        wgrad: name of the kernel for dL/dweight.
        threads: number of threads; `None` for torch's current setting.
    """

    problem: ConvProblem
    channels_last: bool
    forward: str
    dgrad: str
    wgrad: str
    threads: int | None = None

    @property
    def dgrad_reads_input(self) -> bool:
        """Whether `run_dgrad` gives the input to torch; else it needs no more than its shape."""
        return self.dgrad in ("torch", "widened")

    def in_format(self, x: Tensor) -> Tensor:
        """Returns the tensor in the chosen memory format; a copy only if it has another one."""
        return in_format(x, self.channels_last)

    def run_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Computes the convolution of `x` with zero padding.

        Args:
            x: this rank's input [N, Ci, ...], of the problem's shape.
            weight: [Co, Ci / groups, ...].
            bias: [Co] or `None`.
        """
        weight = self._in_layout(weight)
        return self._run(lambda: FORWARD[self.forward](self.problem, x, weight, bias))

    def run_dgrad(self, x: Tensor, grad: Tensor, weight: Tensor) -> Tensor:
        """Computes dL/dx from `grad` = dL/dy.

        Args:
            x: the input [N, Ci, ...].
            grad: [N, Co, ...].
            weight: [Co, Ci / groups, ...].
        """
        weight = self._in_layout(weight)
        return self._run(lambda: DGRAD[self.dgrad](self.problem, x, grad, weight))

    def run_transposed(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Computes the transposed convolution of `x`, the adjoint of the problem's convolution.

        Args:
            x: [N, Co, ...], of the shape of the problem's output.
            weight: [Co, Ci / groups, ...], as of the problem's convolution.
            bias: [Ci] or `None`.
        """
        weight = self._in_layout(weight)
        return self._run(lambda: transposed(self.problem, x, weight, bias))

    def run_wgrad(self, x: Tensor, grad: Tensor, weight: Tensor) -> Tensor:
        """Computes dL/dweight from `grad` = dL/dy.

        Args:
            x: the input [N, Ci, ...].
            grad: [N, Co, ...].
            weight: [Co, Ci / groups, ...].
        """
        weight = self._in_layout(weight)
        return self._run(lambda: WGRAD[self.wgrad](self.problem, x, grad, weight))

    def _in_layout(self, weight: Tensor) -> Tensor:
        """Returns the weight in the kernels' format: plain for oneDNN, as activations for cuDNN."""
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
    """Chooses kernels by a fixed rule, without measuring: the first of each list of candidates.

    Args:
        problems: of every rank of the group.
        rank: this one's place in it.
    """
    mine = problems[rank]
    largest = max(problems, key=lambda p: p.flops)
    channels_last = next(f for f in formats(largest) if all(f in formats(p) for p in problems))
    forward, dgrad, wgrad = (names[0] for names in candidates(mine, channels_last))
    return ConvKernels(mine, channels_last, forward, dgrad, wgrad)


class Candidate(NamedTuple):
    """A kernel of a convolution that can be timed, with a memory format and a number of threads.

    Attributes:
        channels_last: the memory format.
        threads: number of threads.
        role: one of `ROLES`, or `CONVERT`.
        kernel: name of the kernel.
    """

    channels_last: bool
    threads: int
    role: str
    kernel: str

    def __str__(self) -> str:
        memory_format = "channels-last" if self.channels_last else "plain"
        return f"{memory_format} {self.threads} {self.role} {self.kernel}"


def candidates_of(problem: ConvProblem, threads: Sequence[int]) -> Iterator[Candidate]:
    """Yields all candidates of a convolution, the best guesses first."""
    for channels_last in formats(problem):
        for count in threads:
            yield Candidate(channels_last, count, CONVERT, "copy")
            for role, names in zip(ROLES, candidates(problem, channels_last), strict=True):
                for name in names:
                    yield Candidate(channels_last, count, role, name)


def pick(
    problems: Sequence[ConvProblem], times: Sequence[Mapping[Candidate, float]]
) -> list[ConvKernels]:
    """Returns the fastest kernels of every rank, in the memory format that is fastest overall.

    Args:
        problems: of every rank.
        times: seconds of the candidates; equal for equal problems.
    """
    best = [list(_settings(problem, each)) for problem, each in zip(problems, times, strict=True)]
    in_order = dict.fromkeys(kernels.channels_last for _, kernels in best[0])
    channels_last = _clearly_least(
        {
            last: sum(min(s for s, k in each if k.channels_last == last) for each in best)
            for last in in_order
        }
    )
    picked = []
    for each in best:
        options = [(s, k) for s, k in each if k.channels_last == channels_last]
        picked.append(options[_clearly_least({i: s for i, (s, _) in enumerate(options)})][1])
    return picked


def _settings(
    problem: ConvProblem, times: Mapping[Candidate, float]
) -> Iterator[tuple[float, ConvKernels]]:
    """Yields the fastest kernels of each memory format and number of threads, and their seconds."""
    for channels_last, threads in dict.fromkeys((c.channels_last, c.threads) for c in times):
        total, names = 0.0, {}
        for role in (CONVERT, *ROLES):
            seconds = {
                c.kernel: s
                for c, s in times.items()
                if (c.channels_last, c.threads, c.role) == (channels_last, threads, role)
            }
            names[role] = _clearly_least(seconds)
            total += seconds[names[role]]
        del names[CONVERT]
        yield total, ConvKernels(problem, channels_last, **names, threads=threads)


def _clearly_least(seconds: Mapping[Any, float]) -> Any:
    """Returns the key with the least seconds, or the first key if none beats it by the margin."""
    first, least = next(iter(seconds)), min(seconds, key=seconds.__getitem__)
    return least if seconds[least] * _MARGIN < seconds[first] else first


def is_possible(kernels: ConvKernels, threads: Sequence[int]) -> bool:
    """Returns whether kernels are among the candidates."""
    names = candidates(kernels.problem, kernels.channels_last)
    chosen = kernels.forward, kernels.dgrad, kernels.wgrad
    return (
        kernels.channels_last in formats(kernels.problem)
        and all(name in of for name, of in zip(chosen, names, strict=True))
        and kernels.threads in threads
    )


def worth_choosing(problems: Sequence[ConvProblem], rank: int, least_flops: int) -> bool:
    """Returns whether measuring may pay: not for small convolutions or a single candidate.

    Args:
        problems: the convolution of each rank of the group.
        rank: this rank's index in it.
        least_flops: flops of a forward convolution from which on measuring may pay.
    """
    ruled = by_rule(problems, rank)
    names = candidates(ruled.problem, ruled.channels_last)
    options = len(formats(ruled.problem)) * math.prod(map(len, names))
    same = all(set(formats(p)) == set(formats(ruled.problem)) for p in problems)
    large = max(p.flops for p in problems) >= least_flops
    return large and same and (options > 1 or len(problems) > 1)
