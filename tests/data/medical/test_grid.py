"""Tests of the grid against other libraries: file voxels to network voxels and back."""

from __future__ import annotations

import itertools

import nibabel as nib
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from pydist.data.medical.grid import VoxelGrid, nearest, resized_part
from pydist.data.medical.options import GridOptions
from pydist.errors import DataError, UsageError
from pydist.partition import Box

EXTENTS = st.tuples(*[st.integers(1, 9)] * 3)


@given(EXTENTS, EXTENTS)
def test_interpolation_is_torch_s(before, after):
    values = np.random.default_rng(0).normal(size=before).astype(np.float32)
    whole = torch.from_numpy(values)[None, None]
    # torch's single-precision weights are off by a few units in the last place.
    expected = F.interpolate(whole.double(), after, mode="trilinear", align_corners=False)[0, 0]
    source, box = Box((0, 0, 0), before), Box((0, 0, 0), after)
    found = resized_part(values, source, before, after, box)
    np.testing.assert_allclose(found, expected, atol=2e-6)
    expected = F.interpolate(whole, after, mode="nearest-exact")[0, 0]
    # Halfway between two voxels torch's rounding decides; elsewhere the two agree.
    centers = [(np.arange(n) + 0.5) * m / n for n, m in zip(after, before, strict=True)]
    clear = [np.abs(c - np.rint(c)) > 1e-6 for c in centers]
    np.testing.assert_array_equal(
        nearest(values, after)[np.ix_(*clear)], expected.numpy()[np.ix_(*clear)]
    )


def header_of(affine: np.ndarray, shape: tuple[int, ...], form: str = "sform") -> bytes:
    header = nib.Nifti1Header()
    header.set_data_dtype(np.int16)
    header.set_data_shape(shape)
    (header.set_sform if form == "sform" else header.set_qform)(affine, code=1)
    header["magic"] = b"n+1"
    header["vox_offset"] = 352
    return header.binaryblock


def affines():
    """Yields an affine for each orientation of a file's axes, with random spacings."""
    draw = np.random.default_rng(1)
    for order in itertools.permutations(range(3)):
        for signs in itertools.product((1, -1), repeat=3):
            affine = np.zeros((4, 4))
            affine[3, 3] = 1
            for axis, (world, sign) in enumerate(zip(order, signs, strict=True)):
                affine[world, axis] = sign * draw.uniform(0.5, 3)
            affine[:3, 3] = draw.normal(size=3) * 50
            yield affine


def test_every_orientation_becomes_ras_and_comes_back():
    voxels = np.arange(5 * 6 * 7, dtype=np.int16).reshape(5, 6, 7)
    for affine in affines():
        grid = VoxelGrid(header_of(affine, voxels.shape), GridOptions(multiple=4), "test")
        canonical = nib.as_closest_canonical(nib.Nifti1Image(voxels, affine))
        expected = np.asarray(canonical.dataobj).transpose(2, 1, 0)
        image = grid.image(voxels)
        assert image.shape == (1, *grid.padded)
        assert all(n % 4 == 0 for n in grid.padded)
        depth, height, width = grid.resampled
        np.testing.assert_array_equal(image[0, :depth, :height, :width], expected)
        np.testing.assert_allclose(grid.spacing[::-1], nib.affines.voxel_sizes(canonical.affine))
        label = grid.label(voxels)
        np.testing.assert_array_equal(label[:depth, :height, :width], expected)
        assert (label[depth:] == 0).all()
        np.testing.assert_array_equal(grid.label_back(label), voxels)


@pytest.mark.parametrize("form", ["sform", "qform"])
def test_an_oblique_volume_goes_by_its_nearest_axes(form):
    tilt = nib.eulerangles.euler2mat(0.2, -0.3, 0.1)
    affine = nib.affines.from_matvec(tilt @ np.diag([-1.0, 1.5, 2.0]), [1, 2, 3])
    voxels = np.arange(60, dtype=np.int16).reshape(3, 4, 5)
    grid = VoxelGrid(header_of(affine, voxels.shape, form), GridOptions(multiple=1), "test")
    np.testing.assert_array_equal(grid.image(voxels)[0], voxels[::-1].transpose(2, 1, 0))
    np.testing.assert_allclose(grid.spacing, (2.0, 1.5, 1.0), rtol=1e-5)
    np.testing.assert_array_equal(grid.label_back(grid.label(voxels)), voxels)


def test_spacing_and_cubes():
    affine = np.diag([0.5, 1.0, 5.0, 1.0])
    block = header_of(affine, (40, 20, 8))
    grid = VoxelGrid(block, GridOptions(spacing=(2.0, 1.0, 1.0), multiple=1), "test")
    assert grid.oriented == (8, 20, 40)
    assert grid.resampled == (20, 20, 20)
    ramp = np.broadcast_to(np.arange(40, dtype=np.float32)[:, None, None], (40, 20, 8))
    np.testing.assert_allclose(grid.image(ramp)[0, 0, 0], np.arange(20) * 2 + 0.5)
    cube = VoxelGrid(block, GridOptions(cube=12), "test")
    assert (cube.resampled, cube.padded) == ((12, 12, 12), (16, 16, 16))
    label = cube.label((ramp > 19.5).astype(np.uint8))
    assert (label[:12, :12, 6:12] == 1).all()
    assert (label[:, :, :6] == 0).all()
    np.testing.assert_array_equal(cube.label_back(label), ramp > 19.5)


def test_channels_come_first():
    voxels = np.arange(2 * 3 * 4 * 2, dtype=np.int16).reshape(2, 3, 4, 2)
    grid = VoxelGrid(header_of(np.eye(4), voxels.shape), GridOptions(multiple=1), "test")
    np.testing.assert_array_equal(grid.image(voxels), voxels.transpose(3, 2, 1, 0))


def test_wrong_options_and_grids_too_large():
    for options, message in (
        ({"cube": 8, "spacing": (1.0, 1.0, 1.0)}, "choose one"),
        ({"cube": 0}, "cube=0"),
        ({"spacing": (1.0, 0.0, 1.0)}, "lengths in mm > 0"),
        ({"multiple": 0}, "multiple=0"),
    ):
        with pytest.raises(UsageError, match=message):
            GridOptions(**options)
    block = header_of(np.diag([1000.0, 1000, 1000, 1]), (9, 9, 9))
    with pytest.raises(DataError, match=r"would get .* voxels"):
        VoxelGrid(block, GridOptions(spacing=(0.1, 0.1, 0.1)), "test")
