"""Computes summary statistics of cubes of particle counts, and regression on them.

They are the baseline of the study of sample sizes: what the power spectrum and the one-point
distribution tell about a universe's parameters, without a network.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pydist.data.universes.fields import PeriodicCube
from pydist.data.universes.spectra import power_spectrum

Array = npt.NDArray[np.float64]

BINS = 12
"""Bins of the power spectrum, as far as the cube has as many."""
_STRENGTHS = 10.0 ** np.arange(-2, 6)
_FOLDS = 5
_SMALLEST = 1e-12


def summary(counts: npt.NDArray[np.generic]) -> Array:
    """Computes the features of a cube.

    Of each channel: the logarithm of the power spectrum of the counts' excess over 1, their cosmic
    mean, in up to `BINS` bins of wavenumber; the logarithms of mean and variance; the fraction of
    empty voxels; mean, variance and third central moment of log(1 + n).

    Args:
        counts: particle counts n, [C, W, W, W].

    Returns:
        The features, [C * (bins + 6)]; wavenumbers are in units of the voxel, so cubes of one
        cell size compare.
    """
    width = counts.shape[1]
    grid = PeriodicCube(width, float(width), dtype="float64")
    edges = _edges(width // 2)
    found: list[float] = []
    for channel in counts.astype(np.float64):
        spectrum = power_spectrum(grid, channel - 1)
        power = np.add.reduceat(spectrum.power * spectrum.modes, edges)
        modes = np.add.reduceat(spectrum.modes, edges)
        found += np.log(np.maximum(power / modes, _SMALLEST)).tolist()
        logs = np.log1p(channel)
        mean = logs.mean()
        found += [
            np.log(max(channel.mean(), _SMALLEST)),
            np.log(max(channel.var(), _SMALLEST)),
            (channel == 0).mean(),
            mean,
            logs.var(),
            ((logs - mean) ** 3).mean(),
        ]
    return np.array(found)


def _edges(shells: int) -> npt.NDArray[np.intp]:
    """Returns where bins begin among a spectrum's shells: of equal ratio, each with a shell."""
    wanted = np.geomspace(1, shells + 1, min(BINS, shells) + 1)[:-1] - 1
    edges = np.floor(wanted).astype(np.intp)
    for i in range(1, len(edges)):  # the first shells are wider than the ratio
        edges[i] = max(edges[i], edges[i - 1] + 1)
    return edges


class QuadraticRidge:
    """Ridge regression that uses features, their squares and their products.

    The strength of the penalty is chosen for each output by cross-validation with 5 folds of whole
    groups.

    Args:
        features: [samples, features].
        targets: [samples, outputs].
        groups: number of the group of each sample, such as its universe, [samples].
    """

    def __init__(self, features: Array, targets: Array, groups: npt.NDArray[np.integer]) -> None:
        self._mean, self._scale = features.mean(0), features.std(0)
        self._scale[self._scale < _SMALLEST] = 1
        expanded = self._expanded(features)
        names = np.unique(groups)
        errors = np.zeros((len(_STRENGTHS), targets.shape[1]))
        for fold in np.array_split(names, min(_FOLDS, len(names))):
            out = np.isin(groups, fold)
            if out.all():
                continue
            fits = _fits(expanded[~out], targets[~out])
            for i, (offset, weights) in enumerate(fits):
                errors[i] += ((expanded[out] @ weights + offset - targets[out]) ** 2).sum(0)
        best = errors.argmin(0)
        self.strengths = _STRENGTHS[best]
        """Chosen strength for each output."""
        fits = _fits(expanded, targets)
        self._offset = np.array([fits[s][0][i] for i, s in enumerate(best)])
        self._weights = np.stack([fits[s][1][:, i] for i, s in enumerate(best)], 1)

    def predict(self, features: Array) -> Array:
        """Predicts the outputs, [samples, outputs]."""
        return self._expanded(features) @ self._weights + self._offset

    def _expanded(self, features: Array) -> Array:
        """Returns the standardized features with their products."""
        scaled = (features - self._mean) / self._scale
        first, second = np.triu_indices(scaled.shape[1])
        return np.hstack([scaled, scaled[:, first] * scaled[:, second]])


def _fits(x: Array, y: Array) -> list[tuple[Array, Array]]:
    """Solves ridge regression in closed form for each of `_STRENGTHS`.

    Returns:
        For each strength the outputs' offsets, [outputs], and weights, [features, outputs].
    """
    center, offset = x.mean(0), y.mean(0)
    x, y = x - center, y - offset
    if len(x) < x.shape[1]:  # through the smaller one of the two matrices of products
        values, vectors = np.linalg.eigh(x @ x.T)
        right, left = vectors.T @ y, x.T @ vectors
    else:
        values, vectors = np.linalg.eigh(x.T @ x)
        right, left = vectors.T @ (x.T @ y), vectors
    values = np.maximum(values, 0)
    weights = [left @ (right / (values + s)[:, None]) for s in _STRENGTHS]
    return [(offset - center @ each, each) for each in weights]


def errors_by_output(predicted: Array, true: Array) -> list[float]:
    """Returns the mean squared error of each output."""
    return ((predicted - true) ** 2).mean(0).tolist()


def averaged(values: Array, groups: Sequence[int] | npt.NDArray[np.integer]) -> Array:
    """Returns the mean of the rows of each group, in the order of the groups' numbers."""
    names, which = np.unique(groups, return_inverse=True)
    sums = np.zeros((len(names), values.shape[1]))
    np.add.at(sums, which, values)
    return sums / np.bincount(which)[:, None]
