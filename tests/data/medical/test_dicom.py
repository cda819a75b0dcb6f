"""Tests that DICOM series become volumes on the right grid, and that irregular ones are refused."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pydicom = pytest.importorskip("pydicom")
nib = pytest.importorskip("nibabel")

from pydist.cli.main import main  # noqa: E402
from pydist.data import GridOptions, NiftiOptions, ShardDataset, convert_nifti  # noqa: E402
from pydist.data.medical.dicom import read_dicom  # noqa: E402
from pydist.errors import DataError, UsageError  # noqa: E402
from support.data.series import AXIAL, VALUES, write_series  # noqa: E402

OBLIQUE = (0, 0.6, 0.8, 1, 0, 0)


@pytest.mark.parametrize("directions", [AXIAL, OBLIQUE, (0, 1, 0, 0, 0, -1)])
def test_voxels_and_affine(tmp_path: Path, directions: tuple[float, ...]) -> None:
    """Each voxel is where DICOM's own formula puts it (part 3, C.7.6.2.1.1), in RAS."""
    found = read_dicom(write_series(tmp_path / "a", directions=directions))
    assert found.stored.dtype == np.int16
    np.testing.assert_array_equal(found.stored, VALUES.transpose(2, 1, 0))
    along_rows, along_columns = np.array(directions[:3]), np.array(directions[3:])
    normal = np.cross(along_rows, along_columns)
    for col, row, k in ((0, 0, 0), (6, 0, 0), (0, 5, 0), (3, 2, 4)):
        lps = np.array([-10, 20, -30]) + normal * 2.5 * k
        lps = lps + along_rows * 3.0 * col + along_columns * 2.0 * row
        place = found.affine @ [col, row, k, 1]
        np.testing.assert_allclose(place[:3], lps * [-1, -1, 1], atol=1e-4)


def test_slopes_that_are_no_integers_and_differ(tmp_path: Path) -> None:
    def change(k: int, data: Any) -> None:
        data.RescaleSlope, data.RescaleIntercept = 0.5 + k, -1.5

    found = read_dicom(write_series(tmp_path / "a", change=change))
    assert found.stored.dtype == np.float32
    slopes = 0.5 + np.arange(5)
    np.testing.assert_array_equal(
        found.stored, ((VALUES + 24) * slopes[:, None, None] - 1.5).transpose(2, 1, 0)
    )


def other(k: int, **values: Any) -> Callable[[int, Any], None]:
    """Returns a change of one slice."""

    def change(at: int, data: Any) -> None:
        if at == k:
            for name, value in values.items():
                if value is None:
                    delattr(data, name)
                else:
                    setattr(data, name, value)

    return change


def of_all(**values: Any) -> Callable[[int, Any], None]:
    """Returns a change of all slices."""

    def change(at: int, data: Any) -> None:
        other(at, **values)(at, data)

    return change


def tilt(k: int, data: Any) -> None:
    x, y, z = data.ImagePositionPatient
    data.ImagePositionPatient = [x, y + 0.1 * k, z]


def value_table(k: int, data: Any) -> None:
    """Replaces slope and intercept by a table, the other form of the Modality LUT module."""
    table = pydicom.Dataset()
    table.LUTDescriptor, table.ModalityLUTType = [4, 0, 16], "US"
    table.LUTData = np.arange(4, dtype="<u2").tobytes()
    data.ModalityLUTSequence = pydicom.Sequence([table])
    del data.RescaleSlope, data.RescaleIntercept


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (other(2, SeriesInstanceUID="1.2.3"), "several series: "),
        (other(2, ImagePositionPatient=[-10, 20, -27]), "a gap: .* mm apart, others 2.5"),
        (other(2, ImagePositionPatient=[-10, 20, -27.5]), "are at one place"),
        (other(2, ImagePositionPatient=[-10, 20]), "damaged, or no DICOM image"),
        (other(2, ImagePositionPatient=None), "damaged, or no DICOM image"),
        (tilt, "tilted: slices are shifted by up to 0.4 mm"),
        (other(1, PixelSpacing=[2.5, 3]), r"its pixels are \(6, 7, 2.5, 3.0\)"),
        (other(1, PixelSpacing=[0, 3]), "6 × 7 pixels"),
        (other(1, ImageOrientationPatient=list(OBLIQUE)), "has another direction"),
        (other(1, ImageOrientationPatient=[1, 0, 0, 1, 0, 0]), "are not orthonormal"),
        (other(1, NumberOfFrames=3), "several frames in one file"),
        (other(1, PhotometricInterpretation="MONOCHROME1"), "pixels of MONOCHROME1"),
        (other(1, RescaleSlope=0), r"its rescale is 0\.0, -24\.0"),
        (value_table, "its values are given by a table"),
        (other(1, PixelData=b"ab"), "damaged"),
        (other(1, PixelData=None), "damaged"),
        (other(1, Rows=60_000), r"its pixels are \(60000, 7"),
        (of_all(Rows=65_535, Columns=65_535), "65535 × 65535 × 5 voxels; "),
        (of_all(Rows=30_000, Columns=30_000), r"declare 30000 × 30000 × 5 voxels, and its files"),
        (of_all(PixelSpacing=["1e-300", "1e-300"]), "beyond what NIfTI can store"),
        (of_all(PixelSpacing=["1e300", "1"]), "beyond what NIfTI can store"),
    ],
)
def test_series_that_are_refused(tmp_path: Path, change: Any, why: str) -> None:
    folder = write_series(tmp_path / "a", change=change)
    with pytest.raises(DataError, match=why) as caught:
        read_dicom(folder)
    assert "\n" not in str(caught.value)
    assert "Someone" not in str(caught.value)


def test_a_lost_slice_is_a_gap(tmp_path: Path) -> None:
    folder = write_series(tmp_path / "a")
    (folder / "002.dcm").unlink()
    with pytest.raises(DataError, match="a gap: "):
        read_dicom(folder)
    for path in sorted(folder.iterdir())[1:]:
        path.unlink()
    with pytest.raises(DataError, match="1 DICOM slices; a volume needs two or more"):
        read_dicom(folder)


def test_other_files_in_the_folder(tmp_path: Path) -> None:
    folder = write_series(tmp_path / "a")
    for name in ("DICOMDIR", "LICENSE", ".DS_Store", "notes.xml"):
        (folder / name).write_bytes(b"no image")
    (folder / "001.dcm").rename(folder / "no suffix")
    np.testing.assert_array_equal(read_dicom(folder).stored, VALUES.transpose(2, 1, 0))
    (folder / "zzz.dcm").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"zzz\.dcm: damaged, or no DICOM image"):
        read_dicom(folder)


def test_a_file_that_is_deflated_as_a_whole(tmp_path: Path) -> None:
    """Its header can't be read without unpacking it, to whatever size."""
    folder = write_series(tmp_path / "a")
    path = folder / "001.dcm"
    data = pydicom.dcmread(path)
    data.file_meta.TransferSyntaxUID = pydicom.uid.DeflatedExplicitVRLittleEndian
    data.save_as(path, enforce_file_format=True)
    with pytest.raises(DataError, match="deflated as a whole"):
        read_dicom(folder)


@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=30
)
@given(data=st.data())
def test_mutated_files_end_in_one_line(tmp_path: Path, data: st.DataObject) -> None:
    folder = tmp_path / "a"
    if not folder.exists():
        write_series(folder, VALUES[:2])
    path = folder / "001.dcm"
    before = path.read_bytes()
    image = bytearray(before[: data.draw(st.integers(132, len(before)))])
    for position in data.draw(st.lists(st.integers(128, len(before) - 1), max_size=4)):
        if position < len(image):
            image[position] ^= data.draw(st.integers(1, 255))
    path.write_bytes(image)
    message = ""
    try:
        read_dicom(folder)
    except DataError as error:
        message = str(error)
    finally:
        path.write_bytes(before)
    assert "\n" not in message


def test_converted_as_the_same_volume_in_nifti(tmp_path: Path) -> None:
    """Labels come as NIfTI, or as a series; the images' grid is brought to RAS."""
    labels = (VALUES > 0).astype("int16")
    for case in ("one", "two"):
        series = write_series(tmp_path / "dicom" / case, directions=OBLIQUE, spacing=(2.0, 2.0))
        affine = read_dicom(series).affine
        for what, values in (("images", VALUES), ("labels", labels)):
            (tmp_path / what).mkdir(exist_ok=True)
            image = nib.Nifti1Image(values.transpose(2, 1, 0), affine)
            nib.save(image, tmp_path / what / f"{case}.nii.gz")
    (tmp_path / "labels/two.nii.gz").unlink()
    write_series(tmp_path / "labels/two", labels, OBLIQUE, (2.0, 2.0))
    options = NiftiOptions(labels=tmp_path / "labels", grid=GridOptions(cube=8), validation=0)
    convert_nifti(tmp_path / "dicom", tmp_path / "a", options)
    nib.save(nib.Nifti1Image(labels.transpose(2, 1, 0), affine), tmp_path / "labels" / "two.nii.gz")
    convert_nifti(tmp_path / "images", tmp_path / "b", options)
    ours, theirs = ShardDataset(tmp_path / "a"), ShardDataset(tmp_path / "b")
    for i in range(2):
        for x, y in zip(ours[i], theirs[i], strict=True):
            assert (x == y).all()
    for path in (tmp_path / "a").glob("*.hdf5"):
        assert b"Someone" not in path.read_bytes()


@pytest.mark.parametrize(("intercept", "bits", "dtype"), [(0, 16, "int16"), (40000, 12, "float32")])
def test_the_type_follows_from_the_range(
    tmp_path: Path, intercept: int, bits: int, dtype: str
) -> None:
    def change(_: int, data: Any) -> None:
        data.RescaleIntercept, data.BitsStored, data.HighBit = intercept, bits, bits - 1

    series = write_series(tmp_path / "dicom/one", change=change)
    write_series(tmp_path / "labels/one", (VALUES > 0).astype("int16"))
    options = NiftiOptions(labels=tmp_path / "labels", validation=0)
    assert convert_nifti(tmp_path / "dicom", tmp_path / "a", options).dtype == dtype
    assert ShardDataset(tmp_path / "a").read_block(0).max() == read_dicom(series).stored.max()


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_series(tmp_path / "dicom/one")
    write_series(tmp_path / "labels/one", (VALUES > 0).astype("int16"))
    made = ["data", "dicom", str(tmp_path / "dicom"), str(tmp_path / "new")]
    assert main(made) == 2
    assert "--labels: the folder with the labels is needed" in capsys.readouterr().err
    assert main([*made, "--labels", str(tmp_path / "labels"), "--validation", "0"]) == 0
    assert "1 cases → 1 samples of 8³ (1 train)" in capsys.readouterr().out
    write_series(tmp_path / "dicom/two")
    assert main([*made, "--labels", str(tmp_path / "labels")]) == 65
    assert "two: its label" in capsys.readouterr().err


def test_without_pydicom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_series(tmp_path / "a")
    monkeypatch.setitem(sys.modules, "pydicom", None)
    with pytest.raises(
        UsageError, match=r"DICOM files need pydicom: pip install 'pydist\[dicom\]'"
    ):
        read_dicom(folder)
