"""Converts one case from NIfTI files to arrays on a network's grid, and labels back to NIfTI."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pydist.data.medical.collection import LabeledVolume
from pydist.data.medical.dicom import read_dicom
from pydist.data.medical.grid import VoxelGrid
from pydist.data.medical.layouts import Case
from pydist.data.medical.nifti import Nifti, OpenNifti, read_nifti
from pydist.data.medical.nifti_header import NiftiHeader, without_private
from pydist.data.medical.nifti_writing import write_nifti
from pydist.data.medical.options import GridOptions
from pydist.data.safe_open import SafeFile
from pydist.errors import DataError, UsageError
from pydist.parsing import parse_json

HEADER = "nifti_header"
"""File attribute: the header of the image's NIfTI file, base64; `GRID` has the grid's options."""
GRID = "pydist_grid"


def convert_case(case: Case, options: GridOptions, *, keep_header: bool = False) -> LabeledVolume:
    """Reads one case and brings it to the grid.

    Args:
        case: its files.
        options: the grid.
        keep_header: whether to keep the free text and unused fields of the image's header, which
            may identify the patient.

    Raises:
        DataError: a file is damaged, the files do not match, or a label is not an integer.
    """
    image, first = read_image(case.images, options)
    label = read_part(case.label)
    require_alike(first, label)
    # Not the label's own grid: affines that are nearly equal may round to other extents or axes.
    grid = VoxelGrid(first.block, options, str(first.path))
    block = first.block if keep_header else without_private(first.block)
    attributes = {
        HEADER: base64.b64encode(block).decode(),
        GRID: json.dumps(asdict(options)),
    }
    return LabeledVolume(image, grid.label(_whole_numbers(label)), attributes)


def read_image(paths: tuple[Path, ...], options: GridOptions) -> tuple[npt.NDArray[Any], Nifti]:
    """Reads an image, from one file per channel or one for all, and brings it to the grid.

    Returns:
        The image [C, D, H, W], and the first file as it was read.

    Raises:
        DataError: a file is damaged, or the files do not match.
    """
    parts = []
    first = read_part(paths[0])
    grid = VoxelGrid(first.block, options, str(first.path))
    for path in paths:
        part = first if path == paths[0] else read_part(path)
        require_alike(first, part)
        parts.append(grid.image(part.values()))
    return np.concatenate(parts), first


def read_part(path: Path) -> Nifti:
    """Reads a NIfTI file, or a folder with a DICOM series."""
    return read_dicom(path) if path.is_dir() else read_nifti(path)


def open_part(path: Path) -> tuple[NiftiHeader, OpenNifti | Nifti]:
    """Opens a NIfTI file, whose voxels stay in it, or reads a folder with a DICOM series."""
    if path.is_dir():
        series = read_dicom(path)
        return NiftiHeader(series.path, series.header, series.block), series
    file = OpenNifti(path)
    return file.about, file


def write_labels(
    path: str | Path,
    label: npt.NDArray[Any],
    block: bytes,
    options: GridOptions,
    dtype: npt.DTypeLike = "uint8",
) -> None:
    """Writes labels as NIfTI, on the grid of the image that they belong to.

    The header's free text, which may name a patient, is left out, as are header extensions.

    Args:
        path: ends in .nii or .nii.gz; the file is written atomically.
        label: [D, H, W], on the grid of `options`.
        block: the header of the image.
        options: how the image was brought to the grid.
        dtype: the stored type.

    Raises:
        UsageError: another suffix, labels of another grid, or labels that do not fit the type.
        DiskError: the disk is full, or the folder can't be written.
    """
    grid = VoxelGrid(block, options, str(path))
    if tuple(label.shape) != grid.padded:
        raise UsageError(f"{path}: labels {label.shape}, but the grid has {grid.padded}")
    write_nifti(path, grid.label_back(label), without_private(block), dtype)


def geometry_of(file: SafeFile) -> tuple[bytes, GridOptions]:
    """Returns the image's NIfTI header and the grid options that a converted file keeps.

    Args:
        file: a file that `convert_nifti` has written.

    Raises:
        DataError: the file keeps none.
    """
    text, options = file.text(HEADER), file.text(GRID)
    if text is None or options is None:
        raise DataError(f"{file.path}: no {HEADER!r} in it: it does not come from NIfTI files")
    try:
        block = base64.b64decode(text, validate=True)
        return block, grid_options(parse_json(options))
    except (ValueError, TypeError, LookupError) as error:
        raise DataError(f"{file.path}: damaged: {' '.join(str(error).split())}") from error


def grid_options(record: Mapping[str, Any]) -> GridOptions:
    """Returns the options from a record that `asdict` has made."""
    spacing = record["spacing"]
    return GridOptions(
        record["cube"], None if spacing is None else tuple(spacing), record["multiple"]
    )


def require_alike(one: NiftiHeader, other: NiftiHeader) -> None:
    """Raises `DataError` unless two files of a case have the same voxels at the same positions."""
    if one.shape[:3] != other.shape[:3]:
        raise DataError(f"{other.path} has {other.shape[:3]} voxels, {one.path} {one.shape[:3]}")
    if len(other.shape) != 3 and one is not other:
        raise DataError(f"{other.path} has {other.shape[3]} channels; one is expected")
    mine, theirs = one.affine, other.affine
    size = np.sqrt((mine[:3, :3] ** 2).sum(0)).min()
    # The distances between the corners of the two volumes, in voxels.
    corners = np.stack(np.meshgrid(*((0, n) for n in one.shape[:3])), -1).reshape(-1, 3)
    apart = (corners @ (theirs - mine)[:3, :3].T + (theirs - mine)[:3, 3]) / size
    if np.abs(apart).max() > 0.1:
        raise DataError(
            f"{other.path} has other positions than {one.path}: their affines put corners "
            f"{np.abs(apart).max():.1f} voxels apart"
        )


def _whole_numbers(label: Nifti) -> npt.NDArray[Any]:
    values = label.values()
    if values.dtype.kind == "f":
        whole = np.rint(values)
        if not (whole == values).all():
            wrong = values[whole != values].flat[0]
            raise DataError(f"{label.path}: label {wrong}: labels are whole numbers")
        values = whole
    if values.min() < 0 or values.max() >= 1 << 32:
        raise DataError(f"{label.path}: labels from {values.min()} to {values.max()}: 0 or more")
    return values.astype(np.uint32)
