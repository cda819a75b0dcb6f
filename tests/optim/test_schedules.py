"""Tests that learning rates follow the published schedules, whatever the batch."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, PolynomialLR

from pydist.errors import UsageError
from pydist.optim import schedule


def optimizer_of(lr: float = 1e-3) -> torch.optim.Optimizer:
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    groups = [{"params": parameters[:1]}, {"params": parameters[1:], "lr": 2 * lr}]
    return torch.optim.SGD(groups, lr=lr)


def rates(steps: int, *given, batch: int = 1, **options) -> list[float]:
    optimizer = optimizer_of()
    scheduler = schedule(optimizer, *given, **options)
    seen = []
    for _ in range(steps):
        first, second = (group["lr"] for group in optimizer.param_groups)
        assert second == pytest.approx(2 * first, rel=1e-14)
        seen.append(first)
        optimizer.step()
        scheduler.step(batch)
    return seen


def test_decay_is_linear_from_the_peak_to_the_end_and_stays_there():
    expected = [1e-3 + (1e-7 - 1e-3) * min(i, 100) / 100 for i in range(120)]
    assert rates(120, 100, end_lr=1e-7) == pytest.approx(expected, abs=1e-15)


def test_warm_up_rises_linearly_before_the_decay():
    seen = rates(20, 10, warmup=5, warmup_start=0.01)
    assert seen[:6] == pytest.approx([1e-3 * (0.01 + 0.99 * i / 5) for i in range(6)])
    assert seen[5:15] == pytest.approx([1e-3 * (1 - i / 10) for i in range(10)])
    assert seen[15:] == pytest.approx([0.0] * 5, abs=1e-15)


def test_polynomials_and_cosines_are_those_of_torch():
    for ours, theirs in (
        ({"decay": "polynomial", "power": 2.0}, lambda o: PolynomialLR(o, 50, 2.0)),
        ({"decay": "cosine"}, lambda o: CosineAnnealingLR(o, 50)),
    ):
        optimizer = optimizer_of()
        scheduler, expected = theirs(optimizer), []
        for _ in range(50):
            expected.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
        assert rates(50, 50, **ours) == pytest.approx(expected, rel=1e-9, abs=1e-15)


def test_steps_of_mlperfs_cosmoflow():
    """Warm-up over 4 epochs, a quarter of the rate from epoch 32, an eighth from 64."""
    seen = rates(80, 1, decay="step", warmup=4, milestones=[(32, 0.25), (64, 0.125)])
    assert seen[4:32] == [1e-3] * 28
    assert seen[32:64] == [0.25e-3] * 32
    assert seen[64:] == [0.125e-3] * 16


@pytest.mark.parametrize("decay", ["linear", "polynomial", "cosine", "none"])
def test_a_larger_batch_sees_the_same_rates_at_the_same_samples(decay):
    each = rates(60, 40, end_lr=1e-5, decay=decay, warmup=8)
    assert rates(15, 40, end_lr=1e-5, decay=decay, warmup=8, batch=4) == each[::4]


def test_a_schedule_resumes_with_another_batch():
    optimizer = optimizer_of()
    first = schedule(optimizer, 40, warmup=8)
    for _ in range(5):
        optimizer.step()
        first.step(4)
    saved = copy.deepcopy((first.state_dict(), optimizer.state_dict()))
    other = optimizer_of()
    second = schedule(other, 40, warmup=8)
    second.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    assert second.samples == 20
    other.step()
    second.step(7)
    assert other.param_groups[0]["lr"] == pytest.approx(rates(28, 40, warmup=8)[27])


def test_a_rate_that_is_a_tensor_follows_the_same_schedule():
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(1))], torch.tensor(0.1))
    scheduler, seen = schedule(optimizer, 4, 0.01), []
    for _ in range(6):
        seen.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        scheduler.step()
    assert seen == pytest.approx([0.1, 0.0775, 0.055, 0.0325, 0.01, 0.01])


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [((10,), {"end_lr": 0.1}, r"end_lr=0\.1 is above the learning rate 0\.001"),
     ((0,), {}, "decay over 0 samples"), ((1,), {"decay": "sine"}, "possible are linear"),
     ((1,), {"decay": "step"}, "ascending milestones"),
     ((1,), {"milestones": [(1, 0.5)]}, "other forms have none"),
     ((1,), {"decay": "step", "milestones": [(2, 0.5), (1, 0.1)]}, "ascending"),
     ((1,), {"decay": "step", "milestones": [(-3, 0.5)]}, "no negative"),
     ((1,), {"warmup": -3}, "no negative")],
)  # fmt: skip
def test_wrong_settings_are_refused(given, options, message):
    with pytest.raises(UsageError, match=message):
        rates(1, *given, **options)
