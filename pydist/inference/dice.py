"""Compares predicted labels in NIfTI files with true ones."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np

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
        DataError: a file is damaged, the files differ in their extents, or the truth has other
            values than whole numbers.
    """
    classes = len(class_names)
    counts = np.zeros((classes, classes), dtype=np.int64)
    with closing(OpenNifti(predicted)) as found, closing(OpenNifti(truth)) as true:
        shape = found.about.shape
        if true.about.shape != shape:
            raise DataError(f"{truth} has {true.about.shape} voxels, {predicted} {shape}")
        width, height, depth = shape[:3]
        planes = max(1, _VOXELS // (width * height))
        places = itertools.product(range(math.prod(shape[3:])), range(0, depth, planes))
        for channel, first in places:
            last = min(first + planes, depth)
            place = slice(0, width), slice(0, height), slice(first, last)
            one, other = true.part(place, channel), found.part(place, channel)
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
