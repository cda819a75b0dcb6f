"""Seconds of convolutions on this machine, as the autotuner has measured and kept them."""

from __future__ import annotations

import torch

from pydist.backend.autotuner import autotuner_of
from pydist.backend.conv_kernels import CONVERT, pick
from pydist.backend.conv_tuning import ConvSubject, choose, thread_counts
from pydist.backend.problem import ROLES, ConvProblem
from pydist.backend.records import Records
from pydist.comm import LocalTransport
from pydist.mesh import Mesh
from pydist.plan.estimate import ConvTimes


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
            ranks: of a sample, which compute at the same time.
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
        if not seconds or seconds.keys() != {*subject.candidates}:
            return None
        kernels = pick([problem], [{c: seconds[name] for name, c in subject.by_name.items()}])[0]
        chosen = {CONVERT: "copy", **{role: getattr(kernels, role) for role in ROLES}}
        found = {
            each.role: seconds[name]
            for name, each in subject.by_name.items()
            if each.channels_last == kernels.channels_last
            and each.threads == kernels.threads
            and each.kernel == chosen[each.role]
        }
        forward, dgrad, wgrad = (found[role] for role in ROLES)
        return ConvTimes(forward, dgrad, wgrad, kernels)


def _measure(problem: ConvProblem) -> None:
    """Lets the autotuner measure and keep a convolution."""
    mesh = Mesh(LocalTransport())
    x = torch.zeros(problem.input, dtype=problem.dtype)
    weight = torch.zeros(problem.weight, dtype=problem.dtype)
    choose(autotuner_of(mesh), [problem], mesh.sample, x, weight)
