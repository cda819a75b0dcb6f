"""Tests that the learning rate follows the published schedule, step by step."""

from __future__ import annotations

import pytest
import torch

from pydist.errors import UsageError
from pydist.optim import linear_decay


def rates(steps: int, **options) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
    scheduler = linear_decay(optimizer, **options)
    seen = []
    for _ in range(steps):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return seen


def test_decay_is_linear_from_the_peak_to_the_end_and_stays_there():
    expected = [1e-3 + (1e-7 - 1e-3) * min(i, 100) / 100 for i in range(120)]
    assert rates(120, decay_steps=100, end_lr=1e-7) == pytest.approx(expected, abs=1e-15)


def test_warm_up_rises_linearly_before_the_decay():
    seen = rates(20, decay_steps=10, end_lr=0.0, warmup_steps=5, warmup_start=0.01)
    assert seen[:6] == pytest.approx([1e-3 * (0.01 + 0.99 * i / 5) for i in range(6)])
    assert seen[5:15] == pytest.approx([1e-3 * (1 - i / 10) for i in range(10)])
    assert seen[15:] == pytest.approx([0.0] * 5, abs=1e-15)


def test_end_above_the_peak_and_empty_decay_are_refused():
    with pytest.raises(UsageError, match=r"end_lr=0\.1 is above the learning rate 0\.001"):
        rates(1, decay_steps=10, end_lr=0.1)
    with pytest.raises(UsageError, match="decay over 0 steps"):
        rates(1, decay_steps=0, end_lr=0.0)
