"""Tests of NIfTI to HDF5 and back: exact without resampling, published only when complete."""

from __future__ import annotations

import json
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest

from pydist.cli.main import main
from pydist.data import ShardDataset
from pydist.data.index import verify_dataset
from pydist.data.medical.case import geometry_of, write_labels
from pydist.data.medical.convert import convert_nifti
from pydist.data.medical.options import GridOptions, NiftiOptions
from pydist.data.safe_open import safe_open
from pydist.errors import DataError, UsageError
from pydist.partition import Box

TURNED = np.array([[0, 0, 1.5, -10], [-0.8, 0, 0, 5], [0, 2.0, 0, 7], [0, 0, 0, 1]])


@pytest.fixture
def pairs(tmp_path, write, scan) -> Path:
    """Returns a folder with images and labels of five cases in two orientations."""
    draw = np.random.default_rng(2)
    for i in range(5):
        where = {"affine": TURNED} if i % 2 else {}
        image = (scan[0] + draw.integers(0, 9, scan[0].shape)).astype(np.int16)
        write(tmp_path / "source" / "images" / f"case{i}.nii.gz", image, descrip=b"Jane", **where)
        label = draw.integers(0, 3, scan[1].shape).astype(np.int16)
        write(tmp_path / "source" / "labels" / f"case{i}.nii.gz", label, **where)
    return tmp_path / "source"


def convert(pairs: Path, out: Path, **options):
    return convert_nifti(pairs / "images", out, NiftiOptions(labels=pairs / "labels", **options))


@pytest.mark.parametrize("storage", [("contiguous", "none"), ("chunked", "gzip")])
def test_labels_go_to_hdf5_and_back_to_the_bit(pairs, tmp_path, storage):
    out = tmp_path / "out"
    how = {"storage": storage[0], "compression": storage[1]}
    manifest = convert(pairs, out, keep_header=True, **how)
    assert manifest.splits == {"train": 4, "val": 1}
    assert manifest.dtype == "int16"
    assert manifest.class_names == ("background", "class 1", "class 2")
    assert verify_dataset(out) == []
    data = ShardDataset(out, normalize="none")
    for i in range(len(data)):
        name = f"case{i}.nii.gz"
        for folder, stored in (("images", data.read_block(i)[0]), ("labels", data.read_labels(i))):
            nifti = nib.as_closest_canonical(nib.load(pairs / folder / name))
            expected = np.asarray(nifti.dataobj).transpose(2, 1, 0)
            inner = tuple(slice(n) for n in expected.shape)
            np.testing.assert_array_equal(stored[inner], expected)
        with safe_open(out / f"case{i}.hdf5") as file:
            write_labels(tmp_path / name, data.read_labels(i).numpy(), *geometry_of(file))
        mine, theirs = nib.load(tmp_path / name), nib.load(pairs / "labels" / name)
        np.testing.assert_array_equal(mine.dataobj, theirs.dataobj)
        np.testing.assert_array_equal(mine.affine, theirs.affine)


@pytest.mark.parametrize(("slope", "intercept"), [(2, 0), (0.5, 1), (1, 3)])
def test_scaled_labels_are_read_with_slope_and_intercept(tmp_path, write, slope, intercept):
    values = np.random.default_rng(0).integers(0, 2, (8, 8, 8)).astype(np.uint8) * 2
    write(tmp_path / "images" / "case.nii", values)
    path = write(tmp_path / "labels" / "case.nii", values)
    with path.open("r+b") as file:
        file.seek(112)
        file.write(np.array([slope, intercept], "<f4").tobytes())  # and the stored voxels stay
    options = NiftiOptions(labels=tmp_path / "labels", validation=0, keep_header=True)
    convert_nifti(tmp_path / "images", tmp_path / "out", options)
    labels = ShardDataset(tmp_path / "out").read_labels(0).numpy()
    assert set(np.unique(labels)) == {intercept, 2 * slope + intercept}


def turned(angle: float) -> np.ndarray:
    affine = np.eye(4)
    affine[:2, :2] = [[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]
    return affine


@pytest.mark.parametrize("multiple", [1, 8])
@pytest.mark.parametrize(
    ("image", "label", "spacing"),
    [
        (np.diag([0.75, 0.75, 0.75, 1]), np.diag([0.750001, 0.75, 0.75, 1]), (1.5, 1.5, 1.5)),
        (turned(np.pi / 4 - 1e-5), turned(np.pi / 4 + 1e-5), None),
    ],
    ids=["extents", "axes"],
)
def test_a_label_has_the_grid_of_its_image(tmp_path, write, image, label, spacing, multiple):
    """The affines are nearly equal, but round to other extents or axes."""
    voxels = np.ones((21, 9, 8), np.int16)  # 21 voxels of 0.75 mm are 10.5 of 1.5 mm
    voxels[:4] = spacing is not None
    write(tmp_path / "images" / "case.nii", voxels, image)
    write(tmp_path / "labels" / "case.nii", voxels, label)
    grid = GridOptions(spacing=spacing, multiple=multiple)
    options = NiftiOptions(labels=tmp_path / "labels", validation=0, grid=grid)
    convert_nifti(tmp_path / "images", tmp_path / "out", options)
    data = ShardDataset(tmp_path / "out", normalize="none")
    labels = data.read_labels(0).numpy()
    assert labels.shape == tuple(data.sample_shape[1:])
    assert labels.sum() == (voxels.sum() if spacing is None else 4 * 4 * 10)
    inner = labels > 0
    np.testing.assert_array_equal(data.read_block(0)[0].numpy()[inner], 1)
    with safe_open(tmp_path / "out" / "case.hdf5") as file:
        write_labels(tmp_path / "back.nii", labels, *geometry_of(file))
    np.testing.assert_array_equal(nib.load(tmp_path / "back.nii").dataobj, voxels)


def test_an_ignored_label_stays_in_the_files_and_is_no_class(pairs, tmp_path):
    plain = convert(pairs, tmp_path / "plain", dtype="int16")
    label = nib.load(pairs / "labels" / "case0.nii.gz")
    values = np.asarray(label.dataobj).astype(np.int16)
    values[values == 2] = 255
    nib.save(nib.Nifti1Image(values, label.affine), pairs / "labels" / "case0.nii.gz")
    manifest = convert(pairs, tmp_path / "out", ignore_label=255)
    assert manifest.class_names == ("background", "class 1", "class 2")
    assert manifest.intensity != plain.intensity  # only labeled voxels count
    data = ShardDataset(tmp_path / "out", ignore_label=255)
    assert sorted(data.read_labels(0).unique().tolist()) == [0, 1, 255]
    with pytest.raises(DataError, match="label 255 at voxel"):
        ShardDataset(tmp_path / "out").read_labels(0)


def test_a_label_that_may_be_a_mark_is_told(pairs, tmp_path, capsys):
    label = nib.load(pairs / "labels" / "case0.nii.gz")
    values = np.asarray(label.dataobj).astype(np.uint8)
    values[values == 2] = 255
    nib.save(nib.Nifti1Image(values, label.affine), pairs / "labels" / "case0.nii.gz")
    command = ["data", "nifti", str(pairs / "images"), str(tmp_path / "out")]
    command += ["--labels", str(pairs / "labels")]
    assert main(command) == 0
    assert "the highest label is 255, so there are 256 classes; if " in capsys.readouterr().out
    assert main([*command, "--ignore-label", "255", "--overwrite"]) == 0
    assert "highest label" not in capsys.readouterr().out


def test_free_text_does_not_travel(pairs, tmp_path):
    convert(pairs, tmp_path / "out")
    with safe_open(tmp_path / "out" / "case0.hdf5") as file:
        assert b"Jane" not in geometry_of(file)[0]
    convert(pairs, tmp_path / "kept", keep_header=True)
    with safe_open(tmp_path / "kept" / "case0.hdf5") as file:
        assert b"Jane" in geometry_of(file)[0]


@pytest.mark.parametrize("grid", [{"cube": 16}, {"spacing": (1.0, 1.0, 1.0)}])
def test_predictions_of_a_resampled_volume_lie_on_the_scanner_s_grid(tmp_path, write, grid):
    """The label is a ball, which resampling to the nearest voxel and back hardly changes."""
    axes = np.meshgrid(
        *(np.arange(n) * s for n, s in ((24, 1.0), (20, 1.0), (10, 2.0))), indexing="ij"
    )
    ball = (sum((a - 11) ** 2 for a in axes) < 49).astype(np.uint8)
    write(tmp_path / "i" / "a.nii", ball.astype(np.int16) * 100, affine=np.diag([1, 1, 2, 1]))
    path = write(tmp_path / "l" / "a.nii", ball, affine=np.diag([1, 1, 2, 1]))
    options = NiftiOptions(labels=tmp_path / "l", grid=GridOptions(**grid), validation=0)
    convert_nifti(tmp_path / "i", tmp_path / "out", options)
    data = ShardDataset(tmp_path / "out", normalize="none")
    image, label = data[0]
    assert data.sample_shape[1:] == ((16,) * 3 if "cube" in grid else (24, 24, 24))
    agree = ((image[0] > 50) == (label == 1)).double().mean()
    assert agree > 0.97
    with safe_open(tmp_path / "out" / "a.hdf5") as file:
        write_labels(tmp_path / "p.nii.gz", label.numpy(), *geometry_of(file))
    found = nib.load(tmp_path / "p.nii.gz")
    np.testing.assert_array_equal(found.affine, nib.load(path).affine)
    back = np.asarray(found.dataobj)
    assert back.dtype == np.uint8
    assert 2 * (back & ball).sum() / (back.sum() + ball.sum()) > 0.9


def test_a_block_s_label_is_that_of_its_voxels(pairs, tmp_path):
    convert(pairs, tmp_path / "out")
    data = ShardDataset(tmp_path / "out", normalize="none")
    whole = data.read_labels(1)
    box = Box([1, 0, 2], [4, 5, 8])
    np.testing.assert_array_equal(data.read_labels(1, box), whole[1:4, 0:5, 2:8])


def test_cases_of_several_shapes(tmp_path, write, scan):
    for i, n in enumerate((9, 20)):
        voxels = np.ones((n, 7, 5), dtype=np.int16)
        for folder in ("images", "labels"):
            write(tmp_path / "s" / folder / f"{i}.nii", voxels)
    manifest = convert(tmp_path / "s", tmp_path / "out", validation=0)
    assert manifest.sample_shape == (1, 8, 8, 24)
    data = ShardDataset(tmp_path / "out", normalize="none")
    assert [data.shape_of(i) for i in range(2)] == [(1, 8, 8, 16), (1, 8, 8, 24)]
    assert data.read_block(0).shape == (1, 8, 8, 16)
    with pytest.raises(UsageError, match=r"is not in a sample of \(1, 8, 8, 16\)"):
        data.read_block(0, Box([0, 0, 0, 0], [1, 8, 8, 24]))


def test_other_channels_are_found_before_anything_is_converted(tmp_path, write, scan):
    for name, channels in (("a", 1), ("b", 2), ("c", 1)):
        voxels = np.stack([scan[0]] * channels, -1) if channels > 1 else scan[0]
        write(tmp_path / "s" / "images" / f"{name}.nii.gz", voxels)
        write(tmp_path / "s" / "labels" / f"{name}.nii.gz", scan[1])
    cut(tmp_path / "s" / "images" / "a.nii.gz")  # first in the order of conversion
    out = tmp_path / "out"
    message = "b has 2 channels, a 1: a data set has one number of them"
    with pytest.raises(DataError, match=message):
        convert(tmp_path / "s", out)
    assert not out.exists()
    write(tmp_path / "s" / "images" / "a.nii.gz", scan[0])
    manifest = convert(tmp_path / "s", out, on_bad_case="skip", validation=0)
    assert [file.path for file in manifest.files] == ["a.hdf5", "c.hdf5"]
    assert manifest.origin["rejected"] == {"b": message}


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def shift(path: Path) -> None:
    image = nib.load(path)
    voxels = np.asarray(image.dataobj)
    affine = image.affine.copy()
    affine[0, 3] += 3
    nib.save(nib.Nifti1Image(voxels, affine), path)


def crop(path: Path) -> None:
    image = nib.load(path)
    nib.save(image.slicer[:-1], path)


def halve(path: Path) -> None:
    image = nib.load(path)
    nib.save(nib.Nifti1Image(np.asarray(image.dataobj) * np.float32(0.5), image.affine), path)


def negate(path: Path) -> None:
    image = nib.load(path)
    nib.save(nib.Nifti1Image(-np.asarray(image.dataobj), image.affine), path)


@pytest.mark.parametrize(
    ("folder", "damage", "message"),
    [
        ("images", cut, r"case3\.nii\.gz: cut short: the gzip data end early"),
        ("labels", cut, r"case3\.nii\.gz: cut short: the gzip data end early"),
        ("labels", shift, r"affines put corners \d+\.\d voxels apart"),
        ("labels", crop, r"has \(8, 7, 5\) voxels, .* \(9, 7, 5\)"),
        ("labels", halve, "label 0.5: labels are whole numbers"),
        ("labels", negate, "labels from -2 to 0: 0 or more"),
        ("labels", Path.unlink, "its label .* is missing"),
    ],
)
def test_a_bad_case_stops_and_nothing_is_published(pairs, tmp_path, folder, damage, message):
    damage(pairs / folder / "case3.nii.gz")
    out = tmp_path / "out"
    with pytest.raises(DataError, match=message) as caught:
        convert(pairs, out)
    assert "\n" not in str(caught.value)
    assert not (out / "dataset.json").exists()
    assert not (out / "case3.hdf5").exists()
    assert not list(out.glob(".*tmp*"))


def test_bad_cases_are_skipped_if_asked_and_named(pairs, tmp_path):
    cut(pairs / "images" / "case3.nii.gz")
    manifest = convert(pairs, tmp_path / "out", on_bad_case="skip")
    assert [file.path for file in manifest.files] == [f"case{i}.hdf5" for i in (0, 1, 2, 4)]
    assert "cut short" in manifest.origin["rejected"]["case3"]
    for path in (pairs / "images").iterdir():
        cut(path)
    with pytest.raises(DataError, match="none of 5 volumes can be used"):
        convert(pairs, tmp_path / "none", on_bad_case="skip")


def test_a_second_run_keeps_what_is_there(pairs, tmp_path):
    path = pairs / "labels" / "case3.nii.gz"
    whole = path.read_bytes()
    cut(path)
    out = tmp_path / "out"
    with pytest.raises(DataError):
        convert(pairs, out)
    written = (out / "case2.hdf5").stat().st_mtime_ns
    path.write_bytes(whole)
    assert len(convert(pairs, out).files) == 5
    assert (out / "case2.hdf5").stat().st_mtime_ns == written
    with pytest.raises(UsageError, match="made of other files or with other options"):
        convert(pairs, out, dtype="float32")
    cut(path)
    with pytest.raises(DataError):
        convert(pairs, out, dtype="float32", overwrite=True)
    assert not (out / "dataset.json").exists(), "it would have files of two data sets"
    path.write_bytes(whole)
    manifest = convert(pairs, out, dtype="float32", overwrite=True)
    assert manifest.dtype == "float32"
    assert verify_dataset(out) == []


def test_the_type_follows_from_headers_and_ranges(tmp_path, write, scan):
    image = scan[0].astype(np.float32) + 0.5
    write(tmp_path / "s" / "images" / "a.nii", image)
    write(tmp_path / "s" / "labels" / "a.nii", scan[1])
    manifest = convert(tmp_path / "s", tmp_path / "f", validation=0)
    assert manifest.dtype == "float32"
    rounded = convert(tmp_path / "s", tmp_path / "r", validation=0, dtype="int16")
    assert rounded.dtype == "int16"
    write(tmp_path / "s" / "images" / "a.nii", scan[0].astype(np.int32))
    assert convert(tmp_path / "s", tmp_path / "i", validation=0).dtype == "int16"
    wide = scan[0].astype(np.int32) * 100
    write(tmp_path / "s" / "images" / "a.nii", wide)
    assert convert(tmp_path / "s", tmp_path / "w", validation=0).dtype == "float32"
    assert ShardDataset(tmp_path / "w").read_block(0).max() == wide.max()
    with pytest.raises(DataError, match="do not fit int16: use float32"):
        convert(tmp_path / "s", tmp_path / "o", validation=0, dtype="int16")


def test_statistics_are_those_of_nnunet(pairs, tmp_path):
    """They cover the labeled voxels in training; here all of them, since they are few."""
    manifest = convert(pairs, tmp_path / "out")
    values = []
    for i in range(4):
        image, label = (
            np.asarray(nib.load(pairs / f / f"case{i}.nii.gz").dataobj)
            for f in ("images", "labels")
        )
        values.append(image[label > 0])
    values = np.concatenate(values).astype(float)
    (found,) = manifest.intensity
    np.testing.assert_allclose(
        [found.lower, found.upper, found.mean, found.std],
        [*np.percentile(values, (0.5, 99.5)), values.mean(), values.std()],
    )
    stored = ShardDataset(tmp_path / "out", normalize="none").read_block(0).double()
    scaled = ShardDataset(tmp_path / "out", normalize="ct").read_block(0)
    expected = (stored.clamp(found.lower, found.upper) - found.mean) / found.std
    np.testing.assert_allclose(scaled, expected, rtol=1e-6, atol=1e-6)
    window = ShardDataset(tmp_path / "out", normalize="window", window=(-160.0, 240.0))
    expected = (stored.clamp(-160, 240) + 160) / 400
    np.testing.assert_allclose(window.read_block(0), expected, rtol=1e-6, atol=1e-7)


def test_wrong_normalizations(pairs, tmp_path, universes):
    convert(pairs, tmp_path / "out")
    for options, message in (
        ({"normalize": "window"}, "needs a window"),
        ({"normalize": "window", "window": (1.0, 1.0)}, "needs a window"),
        ({"normalize": "ct", "window": (0.0, 1.0)}, 'choose "window"'),
    ):
        with pytest.raises(UsageError, match=message):
            ShardDataset(tmp_path / "out", **options)
    with pytest.raises(DataError, match="statistics of the labeled voxels for 0 of 4 channels"):
        ShardDataset(universes, normalize="ct")


def test_without_nibabel_one_line_says_so(pairs, tmp_path, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "nibabel", None)
    with pytest.raises(UsageError, match=r"pip install 'pydist\[medical\]'"):
        convert(pairs, tmp_path / "out")


def test_a_manifest_says_how_volumes_were_brought_to_the_grid(pairs, tmp_path):
    convert(pairs, tmp_path / "out", grid=GridOptions(cube=8))
    record = json.loads((tmp_path / "out" / "dataset.json").read_text())
    assert record["origin"]["grid"] == {"cube": 8, "spacing": None, "multiple": 8}
    assert record["label"] == "segmentation"
