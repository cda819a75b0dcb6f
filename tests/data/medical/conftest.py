"""Fixtures of small NIfTI files, made by nibabel."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest

AFFINE = np.array([[-0.7, 0, 0, 90.0], [0, 0.7, 0, -120.0], [0, 0, 2.5, -300.0], [0, 0, 0, 1]])
"""Affine of a common CT: x towards the left, thick slices."""


@pytest.fixture
def write() -> Callable[..., Path]:
    """Returns a function that writes voxels [x, y, z] or [x, y, z, channel] as NIfTI."""

    def write(path: Path, voxels: np.ndarray, affine: np.ndarray = AFFINE, **fields) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        kind = fields.pop("kind", nib.Nifti1Image)
        image = kind(voxels, affine)
        image.set_qform(affine, code=1)
        slope, inter = fields.pop("scale", (None, None))
        for name, value in fields.items():
            image.header[name] = value
        image.header.set_slope_inter(slope, inter)
        nib.save(image, path)
        return path

    return write


@pytest.fixture
def scan() -> tuple[np.ndarray, np.ndarray]:
    """Returns an image and labels [x, y, z] of odd, unequal extents."""
    draw = np.random.default_rng(0)
    shape = (9, 7, 5)
    image = draw.integers(-1024, 2000, shape).astype(np.int16)
    label = draw.integers(0, 3, shape).astype(np.int16)
    return image, label
