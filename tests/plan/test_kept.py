"""Tests of measured times of convolutions: also of those that the autotuner leaves to its rule."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pydist.backend import conv_tuning
from pydist.backend.conv_kernels import by_rule
from pydist.backend.conv_tuning import ConvSubject, thread_counts
from pydist.backend.problem import ROLES, ConvProblem
from pydist.backend.records import Records, TuningRecord
from pydist.grid import Grid
from pydist.hardware import CPU
from pydist.plan import StepModel, Training, estimate_step, trace_network
from pydist.plan.kept import KeptConvs


@pytest.mark.parametrize("planes", [4, 24])
def test_times_are_measured_once_and_kept(planes: int, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PYDIST_CACHE", str(tmp_path))
    monkeypatch.setenv("PYDIST_TUNE", "1")
    ones = (1, 1, 1)
    shapes = (1, 16, planes, planes, planes), (32, 16, 3, 3, 3)
    problem = ConvProblem(*shapes, ones, ones, ones, 1, torch.float32)
    assert KeptConvs(1, measures=False)(problem, 1) is None
    found = KeptConvs(1, measures=True)(problem, 2)
    assert found is not None
    assert min(found[:3]) > 0
    assert KeptConvs(1, measures=False)(problem, 1) == found
    if planes == 4:  # too small for the autotuner
        rule = by_rule([problem], 0)
        assert (found.kernels.forward, found.kernels.wgrad) == (rule.forward, rule.wgrad)


def test_the_time_in_which_a_kernel_is_compiled_does_not_count(tmp_path, monkeypatch) -> None:
    """The library compiles kernels of small convolutions for longer than they run."""
    monkeypatch.setenv("PYDIST_CACHE", str(tmp_path))
    monkeypatch.setenv("PYDIST_TUNE", "1")
    compiling = iter([1.0] * len(ROLES))
    monkeypatch.setattr(conv_tuning, "seconds_of", lambda run: next(compiling, 0.25))
    ones = (1, 1, 1)
    problem = ConvProblem((1, 8, 4, 4, 4), (8, 8, 3, 3, 3), ones, ones, ones, 1, torch.float32)
    found = KeptConvs(1, measures=True)(problem, 1)
    assert found is not None
    assert found[:3] == (0.25, 0.25, 0.25)


def test_an_input_larger_than_the_memory_is_measured_in_part(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PYDIST_CACHE", str(tmp_path))
    monkeypatch.setenv("PYDIST_TUNE", "1")
    ones = (1, 1, 1)
    shapes = (1, 4, 1 << 40, 8, 8), (8, 4, 3, 3, 3)  # a pebibyte
    found = KeptConvs(1, measures=True)(ConvProblem(*shapes, ones, ones, ones, 1, torch.float32), 1)
    assert found is not None
    assert min(found[:3]) > 1


@pytest.mark.parametrize(("together", "seconds"), [(2, 2.0), (1, 4.0)])
def test_times_measured_together_have_their_crowding(
    together: int, seconds: float, tmp_path, monkeypatch
) -> None:
    monkeypatch.setenv("PYDIST_CACHE", str(tmp_path))
    free = replace(CPU, call=0.0, edge=0.0, ranks_per_node=2, crowding={"flops": 2.0})
    trace = trace_network(torch.nn.Conv3d(16, 32, 3, padding=1, bias=False), (16, 32, 32, 32))
    grid = Grid.of({"depth": 2})
    asked = list[ConvProblem]()
    estimate_step(
        StepModel(trace, Training(), free, lambda problem, _: asked.append(problem)), grid
    )
    threads = torch.get_num_threads()
    for problem in asked:
        subject = ConvSubject(problem, thread_counts([problem]), together)
        records = Records()
        assert records.is_writable()
        records.write(subject.key, TuningRecord(dict.fromkeys(subject.candidates, 1.0),
                                                dict.fromkeys(subject.candidates, 1)))  # fmt: skip
    model = StepModel(trace, Training(), free, KeptConvs(threads, measures=False))
    # Forward and wgrad; both ranks of the node compute.
    assert estimate_step(model, grid).seconds["compute"] == pytest.approx(seconds, rel=0.05)
