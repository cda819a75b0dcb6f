"""Tests of a convolution's workspace against what torch allocates."""

from __future__ import annotations

from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from pydist.backend.conv_kernels import by_rule
from pydist.backend.problem import ConvProblem
from pydist.plan.memory import workspace_of


def test_plain_gradients_are_copied_to_blocks_of_channels() -> None:
    ones, extent = (1, 1, 1), 24
    block = 16 if torch.backends.cpu.get_cpu_capability() == "AVX512" else 8
    problem = ConvProblem(
        (1, 1, *(extent,) * 3), (2, 1, 3, 3, 3), ones, ones, ones, 1, torch.float32
    )
    kernels = by_rule([problem], 0)
    x, weight = torch.rand(problem.input), torch.rand(problem.weight)
    grad = torch.rand(problem.output)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        result = kernels.run_dgrad(x, grad, weight)
    events: Any = recorded.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    held = most = 0
    for _, nbytes in changes:
        held += nbytes
        most = max(most, held)
    predicted, _ = workspace_of(problem, kernels)
    assert predicted == 2 * block * extent**3 * 4 + weight.nbytes
    assert 0.9 <= most / (predicted + result.nbytes) <= 1.1
