"""Tests of the Dice of predicted files."""

from __future__ import annotations

import math

import nibabel as nib
import numpy as np
import pytest

from pydist.errors import DataError
from pydist.inference import dice

NAMES = ("background", "liver", "tumor", "bone")


def write(path, labels: np.ndarray, affine: np.ndarray | None = None):
    affine = np.eye(4) if affine is None else affine
    nib.save(nib.Nifti1Image(labels.astype(np.uint8), affine), path)
    return path


def test_it_is_twice_the_common_voxels_over_both(tmp_path, monkeypatch):
    monkeypatch.setattr(dice, "_VOXELS", 60)  # several parts
    numbers = np.random.default_rng(0)
    truth, found = numbers.integers(0, 3, (2, 6, 5, 7))
    truth[0] = 9  # ignored, with what is predicted there
    files = write(tmp_path / "found.nii.gz", found), write(tmp_path / "truth.nii", truth)
    measured = dice.dice_of_files(*files, NAMES)
    assert list(measured) == ["liver", "tumor", "bone"]
    for k, name in enumerate(NAMES[1:3], 1):
        one, other = found[1:] == k, truth[1:] == k
        assert measured[name] == pytest.approx(2 * (one & other).sum() / (one.sum() + other.sum()))
    assert math.isnan(measured["bone"])


def test_other_extents_are_named(tmp_path):
    one, other = (write(tmp_path / f"{n}.nii", np.zeros((4, 4, n))) for n in (3, 5))
    with pytest.raises(DataError, match=r"has \(4, 4, 5\) voxels, .* \(4, 4, 3\)"):
        dice.dice_of_files(one, other, NAMES)


def test_voxels_at_other_positions_are_refused(tmp_path):
    """A file that lists the same voxels from the other side is another array."""
    labels = np.random.default_rng(1).integers(0, 2, (4, 5, 6))
    reversed_x = np.diag([-1.0, 1, 1, 1])
    reversed_x[0, 3] = 3
    found = write(tmp_path / "found.nii", labels)
    truth = write(tmp_path / "truth.nii", labels[::-1], reversed_x)
    with pytest.raises(DataError, match=r"truth\.nii has other positions than .*found\.nii"):
        dice.dice_of_files(found, truth, NAMES)


def test_a_truth_that_is_an_image_is_refused(tmp_path):
    found = write(tmp_path / "found.nii", np.zeros((4, 4, 3)))
    image = tmp_path / "image.nii"
    nib.save(nib.Nifti1Image(np.full((4, 4, 3), 0.5, np.float32), np.eye(4)), image)
    with pytest.raises(DataError, match=r"image\.nii has values that are no labels"):
        dice.dice_of_files(found, image, NAMES)
