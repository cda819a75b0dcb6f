"""Tests of measured times of convolutions: also of those that the autotuner leaves to its rule."""

from __future__ import annotations

import pytest
import torch

from pydist.backend.conv_kernels import by_rule
from pydist.backend.problem import ConvProblem
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
