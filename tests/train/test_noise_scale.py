"""Tests of the gradient noise scale, and of a batch that follows it."""

from __future__ import annotations

import math
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from pydist.comm import run_local
from pydist.data.batch_sizes import BatchSizes, PassRule
from pydist.errors import UsageError
from pydist.optim import NoiseScale
from pydist.partition import divide
from pydist.train.config import BatchScheduleConfig, Config
from support.equivalence import on_ranks
from support.training.accumulated import (
    Samples,
    assert_as,
    network,
    on_mesh,
    plainly,
)  # fmt: skip
from support.training.runs import alone, assert_same_bits, change, events, job, last_state

# -- the estimate -------------------------------------------------------------------------------


@given(
    small=st.integers(1, 20), parts=st.integers(2, 9), of_parts=st.floats(0.1, 9),
    whole=st.floats(0.1, 9),
)  # fmt: skip
def test_equal_parts_have_the_published_formulas(small, parts, of_parts, whole):
    """Of batches of B_small and B_big, as in the paper's appendix."""
    big = small * parts
    signal = (big * whole - small * of_parts) / (big - small)
    noise = (of_parts - whole) / (1 / small - 1 / big)
    found = NoiseScale()
    assert math.isnan(found.value)
    assert found.add(of_parts, whole, parts, big)
    assert found.signal == pytest.approx(signal, rel=1e-9, abs=1e-9)
    assert found.noise == pytest.approx(noise, rel=1e-9, abs=1e-9)
    if signal > 1e-6 and noise > 0:
        assert found.value == pytest.approx(noise / signal, rel=1e-6)
    elif signal < -1e-6:
        assert found.value == math.inf


@pytest.mark.parametrize("sizes", [[4, 4, 4], [1, 5, 2], [7, 1]])
def test_the_estimate_is_unbiased(sizes):
    """Gradients of samples are Gaussian around a known mean, with a known covariance."""
    random = np.random.default_rng(0)
    mean, spread = random.normal(size=6), random.uniform(0.5, 2.0, size=6)
    total, repeats = sum(sizes), 4000
    found = np.zeros((repeats, 2))
    for row in found:
        samples = mean + spread * random.normal(size=(total, 6))
        parts = np.split(samples, np.cumsum(sizes)[:-1])
        squares = [len(p) / total * (p.mean(0) ** 2).sum() for p in parts]
        scale = NoiseScale(smoothing=0.0)
        scale.add(sum(squares), (samples.mean(0) ** 2).sum(), len(sizes), total)
        row[:] = scale.noise, scale.signal
    errors = found.std(0) / repeats**0.5
    true = (spread**2).sum(), (mean**2).sum()
    assert np.all(np.abs(found.mean(0) - true) < 4 * errors)
    assert np.all(errors < 0.1 * np.array(true))  # or the test shows nothing


def test_averages_are_of_numerator_and_denominator_and_without_bias_at_first():
    scale = NoiseScale(smoothing=0.75)
    scale.add(2.0, 1.0, 2, 4)
    first = scale.noise, scale.signal
    scale.add(5.0, 2.0, 2, 4)
    other = NoiseScale()
    other.add(5.0, 2.0, 2, 4)
    assert scale.noise == pytest.approx((0.75 * first[0] + other.noise) / 1.75, rel=1e-12)
    assert scale.signal == pytest.approx((0.75 * first[1] + other.signal) / 1.75, rel=1e-12)
    again = NoiseScale(smoothing=0.75)
    again.load_state_dict(scale.state_dict())
    assert (again.value, again.measurements) == (scale.value, 2)


@pytest.mark.parametrize(
    "given", [(1.0, 1.0, 1, 4), (math.inf, 1.0, 2, 4), (1.0, math.nan, 2, 4)], ids=str
)
def test_what_can_not_be_measured_is_left_out(given):
    scale = NoiseScale()
    assert not scale.add(*given)
    assert math.isnan(scale.value)


# -- measurement --------------------------------------------------------------------------------


def figures_plainly(source: Samples, rows: list[int], parts: list[list[int]]):
    """Returns the figures of the first step in plain torch, from gradients of each part alone."""

    def square(some: list[int]) -> float:
        model = network(labeled=False)
        F.mse_loss(model(source.inputs[some]), source.targets[some]).backward()
        return float(sum(p.grad.double().square().sum() for p in model.parameters()))

    parts = [part for part in parts if part]
    return (
        sum(len(part) / len(rows) * square(part) for part in parts),
        square(rows),
        len(parts),
    )


def split(rows: list[int], points) -> list[list[int]]:
    return [rows[a:b] for a, b in pairwise(points)]


@pytest.mark.parametrize(
    ("data", "spatial", "channel", "passes", "options"),
    [
        (1, (1, 1, 1), 1, 3, {}), (1, (2, 1, 1), 1, 2, {}), (2, (1, 1, 1), 1, 1, {}),
        (2, (2, 1, 1), 1, 2, {}), (3, (1, 1, 1), 1, 1, {"partitioned": True}),
        (1, (2, 1, 1), 1, 2, {"partitioned": True}), (1, (1, 1, 1), 2, 2, {}),
        (1, (1, 1, 1), 2, 2, {"sharded_weights": True}),
        (2, (1, 1, 1), 2, 1, {"sharded_weights": True}),
    ],
)  # fmt: skip
def test_norms_are_those_of_the_parts_and_steps_are_as_without(
    data, spatial, channel, passes, options
):
    """Groups share seven samples unevenly, and spatial ranks have parts of the same samples."""
    source, rule = Samples(7), PassRule(7, passes)
    run = partial(on_mesh, source=source, sizes=BatchSizes(7), rule=rule, epochs=2, **options)
    results = on_ranks(spatial, partial(run, measures=True), data, axes={"channel": channel})
    bits = np.random.Philox(np.random.SeedSequence([3, 0])).random_raw(7)
    rows = np.argsort(bits, kind="stable").tolist()
    by_pass = split(rows, [7 * i // passes for i in range(passes + 1)])
    parts = by_pass
    if data > 1:
        shared = [split(part, divide(len(part), (1.0,) * data).points) for part in by_pass]
        parts = [[i for part in shared for i in part[d]] for d in range(data)]
    expected = figures_plainly(source, rows, parts)
    assert expected[0] > 1.001 * expected[1]  # or parts might be the whole
    orders = [rows]
    bits = np.random.Philox(np.random.SeedSequence([3, 1])).random_raw(7)
    orders.append(np.argsort(bits, kind="stable").tolist())
    for found in results:
        assert found.figures[0] == pytest.approx(expected, rel=1e-11)
        assert found.figures == results[0].figures  # to the bit, as ranks decide by them
        assert_as(found, plainly(source, orders))


# -- runs ---------------------------------------------------------------------------------------


@pytest.fixture
def adaptive(config) -> Config:
    """Returns a run of three epochs on six samples whose batch may grow from 2 to 6."""
    table = BatchScheduleConfig(noise_scale=True, largest=6, decide_every=0.5, measure_every=1)
    return change(
        config, optimizer={"lr": 1e-4, "lr_batch": 2},
        train={"epochs": 4, "batch": 2, "accumulate": 2, "batch_schedule": table},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("ranks", "data", "by"), [(1, 1, "accumulate"), (2, 1, "both"), (2, 2, "batch")]
)
def test_a_batch_follows_the_noise_scale_and_a_run_resumes_within_it(
    adaptive, tmp_path, ranks, data, by
):
    table = {**vars(adaptive.train.batch_schedule), "by": by}
    passes = 2 if data == 1 else 1
    if by == "both":
        table["largest_pass"] = 2
    train = {"batch_schedule": BatchScheduleConfig(**table), "accumulate": passes}
    through = change(adaptive, train=train)
    spatial = (ranks // data, 1, 1)
    run_local(job, ranks, through, data, spatial)
    sizes = [event["batch"] for event in events(through, "step")]
    assert sizes[0] == 2
    assert sizes[-1] > 2
    measured = events(through, "noise_scale")
    assert len(measured) >= len(sizes) - 4  # a last batch of one sample has no parts
    for event in events(through, "notice"):
        if event["text"].startswith("batch of"):
            grown, step = int(event["text"].split()[2]), int(event["text"].split()[5])
            before = [e for e in measured if e["step"] < step][-1]
            assert before["noise_scale"] is None or before["noise_scale"] > grown / 2
    for event, following in zip(events(through, "step"), sizes[1:], strict=False):
        assert event["lr"] <= 1e-4 * 3
        assert following <= 6
    parts = change(through, output={"folder": tmp_path / "parts"})
    grew = next(i for i, size in enumerate(sizes) if size > 2)
    for stop in (grew, grew + 1, None):
        run_local(job, ranks, change(parts, train={"steps": stop}), data, spatial)
    for name in ("loss", "lr", "batch"):
        assert [e[name] for e in events(parts, "step")] == [
            e[name] for e in events(through, "step")
        ]
    assert_same_bits(last_state(parts), last_state(through))


def test_a_batch_stays_where_the_noise_is_small(adaptive, monkeypatch):
    monkeypatch.setattr(NoiseScale, "value", property(lambda self: 1.9))
    alone(adaptive)
    assert {event["batch"] for event in events(adaptive, "step")} == {2}


def test_one_part_is_refused(adaptive):
    with pytest.raises(UsageError, match=r"set train\.accumulate to 2 or more, or use several"):
        alone(change(adaptive, train={"accumulate": 1}))
