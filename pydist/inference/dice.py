"""Compares predicted labels in NIfTI files with true ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np

from pydist.data.medical.case import require_alike
from pydist.data.medical.nifti import OpenNifti
from pydist.errors import DataError

_VOXELS = 1 << 20
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
        DataError: a file is damaged, the files' voxels are at other positions, or the truth has
            other values than whole numbers.
    """
    classes = len(class_names)
    counts = np.zeros((classes, classes), dtype=np.int64)
    with closing(OpenNifti(predicted)) as found, closing(OpenNifti(truth)) as true:
        if true.about.shape != found.about.shape:
            raise DataError(
                f"{truth} has {true.about.shape} voxels, {predicted} {found.about.shape}"
            )
        require_alike(found.about, true.about)
        width, height, depth = found.about.shape
        planes = max(1, _VOXELS // (width * height))
        for first in range(0, depth, planes):
            last = min(first + planes, depth)
            place = slice(0, width), slice(0, height), slice(first, last)
            one, other = true.part(place, 0), found.part(place, 0)
            if not (one == np.rint(one)).all():
                raise DataError(
                    f"{truth} has values that are no labels; whole numbers are expected"
                )
            known = (one >= 0) & (one < classes)
            pairs = one[known].astype(np.int64) * classes + other[known].astype(np.int64)
            counts += np.bincount(pairs, minlength=classes**2).reshape(classes, classes)
    both, either = counts.diagonal(), counts.sum(0) + counts.sum(1)
    return {
        name: 2 * float(both[k]) / float(either[k]) if either[k] else math.nan
        for k, name in enumerate(class_names)
        if k
    }
