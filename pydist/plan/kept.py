"""Seconds of convolutions on this machine, as the autotuner has measured and kept them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from pydist.backend.autotuner import autotuner_of
from pydist.backend.conv_kernels import ConvKernels, by_rule, pick
from pydist.backend.conv_tuning import (
    ConvSubject,
    Visits,
    choose,
    measured_part,
    thread_counts,
)  # fmt: skip
from pydist.backend.problem import ROLES, ConvProblem
from pydist.backend.records import Records, is_wanted
from pydist.comm import LocalTransport
from pydist.mesh import Mesh
from pydist.plan.estimate import ConvTimes

_TURNS = 2
"""Measurements of a kernel: the library may compile it at the first, for longer than it runs."""


class KeptConvs:
    """Function object that returns the kept seconds of a convolution's forward, dgrad and wgrad.

    Those of one rank alone are used where ranks have not been measured at the same time.

    Args:
        threads: of a rank.
        measures: whether to measure a convolution that is not known, on this process alone.
    """

    def __init__(self, threads: int, measures: bool) -> None:
        self._threads, self._measures = threads, measures
        self._known: dict[tuple[ConvProblem, int], ConvTimes | None] = {}

    def __call__(self, problem: ConvProblem, ranks: int) -> ConvTimes | None:
        """Returns the seconds; `None` if they are unknown, or the convolution is too small.

        Args:
            problem: the convolution.
            ranks: of a host, which compute at the same time.
        """
        key = problem, ranks
        if key not in self._known:
            before = torch.get_num_threads()
            torch.set_num_threads(self._threads)
            try:
                self._known[key] = self._found(problem, ranks)
            finally:
                torch.set_num_threads(before)
        return self._known[key]

    def _found(self, problem: ConvProblem, ranks: int) -> ConvTimes | None:
        found = self._read(problem, ranks) or self._read(problem, 1)
        if found is None and self._measures and min(problem.input) > 0:
            _measure(problem)
            found = self._read(problem, 1)
        return found

    def _read(self, problem: ConvProblem, ranks: int) -> ConvTimes | None:
        subject = ConvSubject(problem, thread_counts([problem]), ranks)
        seconds = Records().read(subject.key, subject.candidates).seconds
        if seconds.keys() == {*subject.candidates}:
            of_all = {c: seconds[name] for name, c in subject.by_name.items()}
            kernels = pick([problem], [of_all])[0]
        else:
            kernels = _ruled(subject)
            if not seconds.keys() >= {*_names(subject, kernels)}:
                return None
        found = {subject.by_name[name].role: seconds[name] for name in _names(subject, kernels)}
        forward, dgrad, wgrad = (found[role] for role in ROLES)
        return ConvTimes(forward, dgrad, wgrad, kernels, ranks)


def _ruled(subject: ConvSubject) -> ConvKernels:
    """Returns the kernels of a convolution that is too small for the autotuner."""
    return replace(by_rule([subject.problem], 0), threads=subject.threads[0])


def _names(subject: ConvSubject, kernels: ConvKernels) -> Iterator[str]:
    """Yields the names of the candidates that kernels consist of."""
    for name, each in subject.by_name.items():
        is_like = each.channels_last == kernels.channels_last and each.threads == kernels.threads
        if is_like and each.role in ROLES and each.kernel == getattr(kernels, each.role):
            yield name


def _measure(problem: ConvProblem) -> None:
    """Lets the autotuner measure and keep a convolution; measures a small one by itself."""
    mesh = Mesh(LocalTransport())
    # No more planes than are measured: the whole input may not fit into this machine.
    x = torch.zeros(measured_part(problem).input, dtype=problem.dtype)
    weight = torch.zeros(problem.weight, dtype=problem.dtype)
    choose(autotuner_of(mesh), [problem], mesh.sample, x, weight, ranks=1)
    records, subject = Records(), ConvSubject(problem, thread_counts([problem]), 1)
    known = records.read(subject.key, subject.candidates)
    if known.seconds or not is_wanted() or not records.is_writable():
        return
    visits = Visits(subject, x, weight)
    for name in [*_names(subject, _ruled(subject))] * _TURNS:
        known.add(name, visits(name))
    records.write(subject.key, known)
