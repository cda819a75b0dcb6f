"""Compares predicted labels in NIfTI files with true ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pydist.data.medical.nifti import read_nifti
from pydist.errors import DataError

_VOXELS = 1 << 24
"""Voxels that are compared at a time."""


def dice_of_files(
    predicted: str | Path, truth: str | Path, class_names: Sequence[str]
) -> dict[str, float]:
    """Compares predicted labels with true ones on the same grid.

    Args:
        predicted: NIfTI file of labels.
        truth: NIfTI file of labels.
        class_names: names of the labels 0, 1, ...; 0 is background. Other labels of the truth
            are ignored, with what is predicted there.

    Returns:
        The Dice of each class but background, NaN where it is neither present nor predicted.

    Raises:
        DataError: a file is damaged, the files differ in their extents, or the truth has other
            values than whole numbers.
    """
    found, true = read_nifti(predicted), read_nifti(truth)
    shape = found.stored.shape
    if true.stored.shape != shape:
        raise DataError(f"{truth} has {true.stored.shape} voxels, {predicted} {shape}")
    classes = len(class_names)
    counts = np.zeros((classes, classes), dtype=np.int64)
    planes = max(1, _VOXELS // math.prod(shape[:2]))
    for first in range(0, shape[2], planes):
        place = (slice(None), slice(None), slice(first, first + planes))
        one, other = true.values(place), found.values(place)
        if not (one == np.rint(one)).all():
            raise DataError(f"{truth} has values that are no labels; whole numbers are expected")
        known = (one >= 0) & (one < classes)
        pairs = one[known].astype(np.int64) * classes + other[known].astype(np.int64)
        counts += np.bincount(pairs, minlength=classes**2).reshape(classes, classes)
    both, either = counts.diagonal(), counts.sum(0) + counts.sum(1)
    return {
        name: 2 * float(both[k]) / float(either[k]) if either[k] else math.nan
        for k, name in enumerate(class_names)
        if k
    }
