"""Tests of summary statistics and of the regression on them, against direct computations."""

from __future__ import annotations

import numpy as np
import pytest

from pydist.studies.summaries import QuadraticRidge, averaged, errors_by_output, summary


def test_features_are_those_of_a_direct_computation():
    rng = np.random.default_rng(0)
    counts = rng.poisson(1.0, (2, 8, 8, 8))
    found = summary(counts).reshape(2, -1)
    for channel, features in zip(counts, found, strict=True):
        modes = np.abs(np.fft.fftn(channel - 1.0)) ** 2 / 8**3
        k = np.fft.fftfreq(8, 1 / 8)
        length = np.sqrt(k[:, None, None] ** 2 + k[None, :, None] ** 2 + k[None, None, :] ** 2)
        shells = [modes[np.floor(length + 0.5) == i].mean() for i in (1, 2, 3, 4)]
        logs = np.log1p(channel)
        others = [
            np.log(channel.mean()), np.log(channel.var()), (channel == 0).mean(), logs.mean(),
            logs.var(), ((logs - logs.mean()) ** 3).mean(),
        ]  # fmt: skip
        np.testing.assert_allclose(features, [*np.log(shells), *others], rtol=1e-10)


def test_large_cubes_have_twelve_bins_and_tiny_or_empty_ones_finite_features():
    assert summary(np.ones((1, 48, 48, 48))).shape == (18,)
    assert summary(np.zeros((1, 2, 2, 2))).shape == (7,)
    assert np.isfinite(summary(np.zeros((1, 2, 2, 2)))).all()


@pytest.mark.parametrize("samples", [12, 80])  # fewer and more than expanded features
def test_the_regression_solves_the_penalized_normal_equations(samples):
    rng = np.random.default_rng(samples)
    x, y = rng.normal(size=(samples, 5)), rng.normal(size=(samples, 2))
    fitted = QuadraticRidge(x, y, np.arange(samples))
    z = (x - x.mean(0)) / x.std(0)
    expanded = np.array([[*row, *(a * b for i, a in enumerate(row) for b in row[i:])] for row in z])
    center = expanded - expanded.mean(0)
    new = rng.normal(size=(3, 5))
    zn = (new - x.mean(0)) / x.std(0)
    rows = np.array([[*row, *(a * b for i, a in enumerate(row) for b in row[i:])] for row in zn])
    for i, strength in enumerate(fitted.strengths):
        # Ridge regression is least squares with a row sqrt(strength) e_j = 0 for each weight.
        padded = np.vstack([center, np.sqrt(strength) * np.eye(center.shape[1])])
        goal = np.concatenate([y[:, i] - y[:, i].mean(), np.zeros(center.shape[1])])
        weights = np.linalg.lstsq(padded, goal, rcond=None)[0]
        expected = (rows - expanded.mean(0)) @ weights + y[:, i].mean()
        np.testing.assert_allclose(fitted.predict(new)[:, i], expected, atol=1e-9)


def test_the_penalty_is_small_for_a_quadratic_and_large_for_noise():
    rng = np.random.default_rng(1)
    x = rng.normal(size=(200, 4))
    y = np.stack([x[:, 0] * x[:, 1] - x[:, 2], rng.normal(size=200)], 1)
    fitted = QuadraticRidge(x, y, np.arange(200) // 2)
    assert fitted.strengths[0] < 1
    assert fitted.strengths[1] > 100
    new = rng.normal(size=(50, 4))
    error = errors_by_output(
        fitted.predict(new)[:, :1], (new[:, 0] * new[:, 1] - new[:, 2])[:, None]
    )
    assert error[0] < 1e-4


def test_predictions_are_averaged_by_group():
    values = np.array([[1.0, 2.0], [3.0, 4.0], [10.0, 20.0]])
    np.testing.assert_array_equal(averaged(values, [0, 0, 3]), [[2.0, 3.0], [10.0, 20.0]])
