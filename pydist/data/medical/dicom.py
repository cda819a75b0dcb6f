"""Reads series of DICOM images as one volume, with the geometry of a NIfTI file.

A series is a folder with one file per slice. Slices are ordered by their position, not by name or
number, and have to form a regular grid: a missing slice, two slices at one place, a tilted gantry,
and files of several series are refused. Only numbers that describe the grid are kept: nothing that
may name a patient.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pydist.data.hdf5_rules import Limits
from pydist.data.medical.nifti import Nifti, Outline, within_int16
from pydist.data.medical.nifti_header import new_header
from pydist.data.regular import require_regular
from pydist.errors import DataError, UsageError, one_line

if TYPE_CHECKING:
    from pydicom import Dataset

_SUFFIX = ".dcm"
_MAGIC = b"DICM"
_PREAMBLE = 128
_DEFLATED = "1.2.840.10008.1.2.1.99"
"""Transfer syntax that unpacks a full file, to any size, before a header can be read."""
_SAME = 1e-3
"""Largest difference between the directions of two slices."""
_REGULAR = 0.02
"""Largest difference between the distances of slices, over their median."""
_SHIFT = 0.1
"""Largest shift of a slice within its plane, in pixels."""
_MOST_SLICES = 1 << 16
_MOST_PIXELS = 1 << 33


class _Slice(NamedTuple):
    """One file that belongs to a series."""

    path: Path
    position: npt.NDArray[np.float64]
    """Place of the first pixel (mm, in DICOM's LPS)."""
    slope: float
    intercept: float
    stored: tuple[float, float]
    """Least and greatest value that its pixels can have before the rescale."""


class _Series(NamedTuple):
    """Slices that form a series, from the lowest along `normal` to the highest."""

    slices: list[_Slice]
    rows: int
    columns: int
    affine: npt.NDArray[np.float64]
    """The map from (column, row, slice) to mm in RAS, [4, 4]."""

    @property
    def integers(self) -> bool:
        """Whether all values are integers, with slope and intercept applied."""
        return all(s.slope.is_integer() and s.intercept.is_integer() for s in self.slices)

    @property
    def narrow(self) -> bool:
        """Whether the range of all values that can be stored is within that of int16."""
        return all(within_int16(s.stored, s.slope, s.intercept) for s in self.slices)


def is_series(path: Path) -> bool:
    """Returns whether a path is a folder with DICOM files, itself or below."""
    return path.is_dir() and any(True for _ in _files(path))


def read_dicom(folder: str | Path) -> Nifti:
    """Reads a series of DICOM images, with slope and intercept applied.

    Args:
        folder: all DICOM files in it and below are slices of the series.

    Returns:
        The voxels [x, y, z] with a header that has nothing but shape, type and affine.

    Raises:
        DataError: a file is damaged, or the files are not one series on a regular grid.
        UsageError: pydicom or nibabel is not installed.
    """
    series = _series(Path(folder))
    kind: type[np.generic] = np.float32
    if series.integers:
        kind = np.int32
    stored = np.empty((series.columns, series.rows, len(series.slices)), kind, order="F")
    for number, each in enumerate(series.slices):
        stored[:, :, number] = _pixels(each, series, kind).T
    if kind is np.int32 and stored.min() >= -(1 << 15) and stored.max() < 1 << 15:
        stored = stored.astype(np.int16)
    header = new_header(stored.shape, stored.dtype, series.affine)
    return Nifti(Path(folder), header, header.binaryblock, stored)


def outline_of_dicom(folder: Path) -> Outline:
    """Reads only the headers of a series.

    Raises:
        DataError: as `read_dicom`, for errors in the headers.
        UsageError: pydicom is not installed.
    """
    series = _series(folder)
    return Outline(1, series.integers, series.narrow)


def _files(folder: Path) -> Iterator[Path]:
    """Yields the DICOM files below a folder."""
    for path in sorted(folder.rglob("*")):
        if path.name.startswith(".") or path.name == "DICOMDIR" or not path.is_file():
            continue
        with path.open("rb") as file:
            found = file.read(_PREAMBLE + len(_MAGIC))[_PREAMBLE:] == _MAGIC
        if found or path.suffix == _SUFFIX:
            yield path


def _series(folder: Path) -> _Series:
    """Reads and checks the headers of a series."""
    read = _reader()
    found: list[tuple[_Slice, tuple[Any, ...], npt.NDArray[np.float64]]] = []
    first: tuple[Path, tuple[Any, ...]] | None = None
    for path in _files(folder):
        if len(found) >= _MOST_SLICES:
            raise DataError(f"{folder}: more than {_MOST_SLICES} slices")
        with _in_one_line(path):
            header = read(path, stop_before_pixels=True)
            facts = _facts(path, header)
            each = _Slice(
                path,
                _numbers(header, "ImagePositionPatient", 3),
                float(header.get("RescaleSlope", 1)),
                float(header.get("RescaleIntercept", 0)),
                _range(header),
            )
            if not (each.slope and math.isfinite(each.slope) and math.isfinite(each.intercept)):
                raise DataError(f"{path}: its rescale is {each.slope}, {each.intercept}")
            if "ModalityLUTSequence" in header:
                raise DataError(f"{path}: its values are given by a table: convert it to NIfTI")
            found.append((each, facts, _directions(path, header)))
        first = first or (path, facts)
        if facts[0] != first[1][0]:
            raise DataError(f"{folder}: several series: {first[0].name} and {path.name} differ")
        if facts != first[1]:
            raise DataError(
                f"{path}: its pixels are {facts[1:]}, those of {first[0].name} {first[1][1:]} "
                "(rows, columns, spacing)"
            )
    if len(found) < 2 or first is None:
        raise DataError(f"{folder}: {len(found)} DICOM slices; a volume needs two or more")
    directions = found[0][2]
    for each, _, its in found:
        if np.abs(its - directions).max() > _SAME:
            raise DataError(f"{each.path}: its slice has another direction than {first[0].name}")
    _, rows, columns, between_rows, between_columns = first[1]
    shape, limits = f"{rows} × {columns} × {len(found)} voxels", Limits()
    if rows * columns * len(found) > _MOST_PIXELS:
        raise DataError(f"{folder}: {shape}; {_MOST_PIXELS} fit")
    declared = rows * columns * len(found) * np.dtype(np.int32).itemsize
    held = sum(each.path.stat().st_size for each, *_ in found)
    if declared > limits.declared_bytes and declared > limits.ratio * held:
        raise DataError(f"{folder}: its headers declare {shape}, and its files have {held} bytes")
    slices, step = _ordered(
        folder, [each for each, *_ in found], directions, min(between_rows, between_columns)
    )
    along_rows, along_columns, normal = directions
    affine = np.eye(4)
    affine[:3, 0] = along_rows * between_columns
    affine[:3, 1] = along_columns * between_rows
    affine[:3, 2] = normal * step
    affine[:3, 3] = slices[0].position
    with np.errstate(over="ignore", under="ignore"):
        stored = affine.astype(np.float32).astype(np.float64)  # as a header has it
    if not np.isfinite(stored).all() or not np.linalg.det(stored):
        raise DataError(f"{folder}: its spacing or its position is beyond what NIfTI can store")
    return _Series(slices, rows, columns, np.diag([-1.0, -1.0, 1.0, 1.0]) @ affine)  # LPS to RAS


def _facts(path: Path, header: Dataset) -> tuple[Any, ...]:
    """Returns what all slices share: the series' id, rows, columns, and their distances in mm."""
    if int(header.get("NumberOfFrames", 1) or 1) != 1:
        raise DataError(f"{path}: several frames in one file: convert it to NIfTI")
    if int(header.SamplesPerPixel) != 1 or header.PhotometricInterpretation != "MONOCHROME2":
        raise DataError(
            f"{path}: pixels of {header.PhotometricInterpretation}; MONOCHROME2 is read"
        )
    rows, columns = int(header.Rows), int(header.Columns)
    spacing = _numbers(header, "PixelSpacing", 2)
    if min(rows, columns) < 1 or not 0 < spacing.min() <= spacing.max() < math.inf:
        raise DataError(f"{path}: {rows} × {columns} pixels, {spacing.tolist()} mm apart")
    # Scanners round the spacing differently from slice to slice.
    between_rows, between_columns = (float(f"{mm:.6g}") for mm in spacing)
    return str(header.SeriesInstanceUID), rows, columns, between_rows, between_columns


def _range(header: Dataset) -> tuple[float, float]:
    """Returns the least and the greatest value that pixels can have before the rescale."""
    values = 2.0 ** int(header.BitsStored)
    least = -values / 2 if header.PixelRepresentation else 0.0
    return least, least + values - 1


def _directions(path: Path, header: Dataset) -> npt.NDArray[np.float64]:
    """Returns unit vectors along rows, along columns, and from slice to slice, [3, 3]."""
    given = _numbers(header, "ImageOrientationPatient", 6).reshape(2, 3)
    if np.abs(given @ given.T - np.eye(2)).max() > _SAME:
        raise DataError(f"{path}: its directions {given.tolist()} are not orthonormal")
    return np.stack([*given, np.cross(*given)])


def _numbers(header: Dataset, name: str, count: int) -> npt.NDArray[np.float64]:
    values = np.array([float(n) for n in header[name].value])
    if len(values) != count or not np.isfinite(values).all():
        raise ValueError(f"{name} is {values.tolist()}")
    return values


def _ordered(
    folder: Path, slices: Sequence[_Slice], directions: npt.NDArray[np.float64], pixel: float
) -> tuple[list[_Slice], float]:
    """Returns the slices in order, and their distance in mm.

    Raises:
        DataError: they are not equally far apart, or each is shifted against the one below.
    """
    ordered = sorted(slices, key=lambda each: float(each.position @ directions[2]))
    places = np.array([each.position for each in ordered]) @ directions.T
    steps = np.diff(places[:, 2])
    for number, step in enumerate(steps):
        names = f"{ordered[number].path.name} and {ordered[number + 1].path.name}"
        if step < _REGULAR * np.median(steps) or step <= 0:
            raise DataError(f"{folder}: {names} are at one place")
        if abs(step - np.median(steps)) > _REGULAR * np.median(steps):
            raise DataError(
                f"{folder}: a gap: {names} are {step:.4g} mm apart, others {np.median(steps):.4g}"
            )
    mean = float(places[-1, 2] - places[0, 2]) / len(steps)
    shift = np.abs(places[:, :2] - places[0, :2]).max()
    if shift > _SHIFT * pixel:
        raise DataError(
            f"{folder}: tilted: slices are shifted by up to {shift:.4g} mm within their planes, as "
            "by a tilted gantry; resample it to a regular grid"
        )
    return ordered, mean


def _pixels(each: _Slice, series: _Series, kind: type[np.generic]) -> npt.NDArray[Any]:
    """Reads the values of a slice, [row, column]."""
    with _in_one_line(each.path):
        found = _reader()(each.path).pixel_array
        if found.shape != (series.rows, series.columns) or found.dtype.kind not in "iu":
            raise DataError(f"{each.path}: its pixels are {found.shape} {found.dtype}")
        values = found * each.slope + each.intercept
        if kind is np.int32 and not -(1 << 31) <= values.min() <= values.max() < 1 << 31:
            raise DataError(f"{each.path}: values from {values.min()} to {values.max()}")
        return values.astype(kind)


def _reader() -> Any:
    """Returns the function that reads a DICOM file.

    Raises:
        UsageError: pydicom is not installed.
    """
    try:
        from pydicom import dcmread
        from pydicom.filereader import read_file_meta_info
    except ImportError:
        raise UsageError("DICOM files need pydicom: pip install 'pydist[dicom]'") from None

    def read(path: Path, **options: Any) -> Dataset:
        require_regular(path)
        if read_file_meta_info(path).get("TransferSyntaxUID") == _DEFLATED:
            raise DataError(f"{path}: deflated as a whole, which is never unpacked")
        return dcmread(path, **options)

    return read


@contextmanager
def _in_one_line(path: Path) -> Iterator[None]:
    """Converts errors on a damaged file to a `DataError` that names it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # on values that the standard does not allow
            yield
    except (DataError, UsageError, MemoryError):
        raise
    except Exception as error:  # pydicom raises whatever a damaged byte leads to
        line = one_line(error) or type(error).__name__
        raise DataError(f"{path}: damaged, or no DICOM image: {line[:300]}") from error
