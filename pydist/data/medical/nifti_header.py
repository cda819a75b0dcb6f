"""Parses the headers of NIfTI files, and knows the names of such files."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from pydist.errors import DataError, UsageError, one_line

if TYPE_CHECKING:
    from nibabel.nifti1 import Nifti1Header

SUFFIXES = (".nii", ".nii.gz")

MISSING_LIBRARY = "NIfTI files need nibabel: pip install 'pydist[medical]'"

_SPACINGS = (1e-6, 1e6)
"""mm between voxels."""
_QUIET = logging.Logger("nibabel's remarks on headers that it can fix")
_QUIET.addHandler(logging.NullHandler())
_PRIVATE = (
    "descrip", "aux_file", "intent_name", "data_type", "db_name", "unused_str", "extents",
    "session_error",
)  # fmt: skip
"""Free text in a header, which may name a patient, and fields that NIfTI leaves unused."""


@dataclass(frozen=True)
class NiftiHeader:
    """Where a NIfTI file came from, and its header.

    Attributes:
        path: where it came from.
        header: its header as parsed by nibabel.
        block: its header as stored in the file: 348 or 540 bytes.
    """

    path: Path
    header: Nifti1Header
    block: bytes

    @property
    def affine(self) -> npt.NDArray[np.float64]:
        """Affine matrix [4, 4] that maps voxel indices (x, y, z) to mm."""
        return affine_of(self.header, str(self.path))

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The extents are [x, y, z], or [x, y, z, channel]."""
        return voxel_shape(self.header, str(self.path))


def is_nifti(path: Path) -> bool:
    """Returns whether a name belongs to a NIfTI file, and not to a hidden file of macOS."""
    return path.name.endswith(SUFFIXES) and not path.name.startswith(".")


def require_suffix(path: Path) -> None:
    """Raises `UsageError` if a file's name is not the name of a NIfTI file."""
    if not path.name.endswith(SUFFIXES):
        raise UsageError(f"{path}: the name of a NIfTI file ends in {' or '.join(SUFFIXES)}")


def stem(path: Path) -> str:
    """Returns a file's name without .nii or .nii.gz."""
    return path.name.removesuffix(".gz").removesuffix(".nii")


def header_of(block: bytes, where: str) -> Nifti1Header:
    """Parses the header in the first bytes of a file.

    Args:
        block: at least 540 bytes, or the 348 of NIfTI-1.
        where: names the file in errors.

    Raises:
        DataError: these are not the bytes of a NIfTI header.
        UsageError: nibabel is not installed.
    """
    try:
        import nibabel as nib
    except ImportError:
        raise UsageError(MISSING_LIBRARY) from None
    kinds = {348: nib.Nifti1Header, 540: nib.Nifti2Header}
    sizes = (int.from_bytes(block[:4], "little"), int.from_bytes(block[:4], "big"))
    size = next((size for size in sizes if size in kinds), None)
    if size is None or len(block) < size:
        raise DataError(f"{where}: not a NIfTI file")
    try:
        header: Nifti1Header = kinds[size](binaryblock=block[:size], check=False)
        header.check_fix(logger=_QUIET)
        magic = bytes(header["magic"])
    except (nib.spatialimages.HeaderDataError, ValueError, KeyError) as error:
        raise DataError(f"{where}: damaged header: {one_line(error)}") from error
    if not magic.startswith((b"n+1", b"n+2")):
        raise DataError(f"{where}: not NIfTI in one file (magic {magic!r}): convert it to .nii")
    return header


def new_header(
    shape: Sequence[int], dtype: npt.DTypeLike, affine: npt.NDArray[np.float64]
) -> Nifti1Header:
    """Returns a header that has nothing but shape, type and affine.

    Args:
        shape: of the voxels, [x, y, z].
        dtype: the stored type.
        affine: [4, 4], from voxel indices to mm.

    Raises:
        UsageError: nibabel is not installed.
    """
    try:
        from nibabel.nifti1 import Nifti1Header
    except ImportError:
        raise UsageError(MISSING_LIBRARY) from None
    header = Nifti1Header()
    header.set_data_dtype(np.dtype(dtype))
    header.set_data_shape(shape)
    header.set_sform(affine, code="scanner")
    header.set_qform(affine, code="scanner")
    header.set_xyzt_units("mm")
    header["scl_slope"], header["scl_inter"], header["vox_offset"] = 1, 0, 352
    header["magic"] = b"n+1"
    return header


def affine_of(header: Nifti1Header, where: str) -> npt.NDArray[np.float64]:
    """Returns the map from voxel indices to mm: sform if it is set, else qform, else the spacing.

    Raises:
        DataError: it is not finite, or flattens a dimension.
    """
    from nibabel.spatialimages import HeaderDataError

    try:
        affine = np.asarray(header.get_best_affine(), dtype=np.float64)
    except (HeaderDataError, ValueError) as error:
        raise DataError(f"{where}: damaged header: {one_line(error)}") from error
    directions = affine[:3, :3]
    lengths = np.abs(directions).max(0)
    if not np.isfinite(affine).all() or lengths.min() == 0:
        raise DataError(f"{where}: its affine {directions.tolist()} is not invertible")
    if not _SPACINGS[0] < lengths.min() <= lengths.max() < _SPACINGS[1]:
        raise DataError(f"{where}: voxels lie {lengths.tolist()} mm apart")
    if abs(np.linalg.det(directions / lengths)) < 1e-6:
        raise DataError(f"{where}: its affine {directions.tolist()} is not invertible")
    return affine


def scaling_of(header: Nifti1Header, where: str) -> tuple[float, float]:
    """Returns slope and intercept of the stored values; in the standard a slope of 0 means none.

    Raises:
        DataError: one is NaN or infinite, which other programs ignore in different ways.
    """
    slope, intercept = float(header["scl_slope"]), float(header["scl_inter"])
    if slope == 0:
        return 1.0, 0.0
    for name, value in (("scl_slope", slope), ("scl_inter", intercept)):
        if not math.isfinite(value):
            raise DataError(
                f"{where}: {name} is {value}: a finite number is needed, or scl_slope 0 for values "
                "as they are stored"
            )
    return slope, intercept


def without_private(block: bytes) -> bytes:
    """Returns a header with its free text and its unused fields emptied."""
    header = header_of(block, "header")
    fields = header.structarr.dtype.fields
    assert fields is not None
    clean = bytearray(block)
    for name in _PRIVATE:
        if name in fields:
            kind, start = fields[name][:2]
            clean[start : start + kind.itemsize] = bytes(kind.itemsize)
    return bytes(clean)


def voxel_shape(header: Nifti1Header, where: str) -> tuple[int, ...]:
    """Returns [x, y, z] or [x, y, z, channel]; further dims of one element are dropped."""
    dim = [int(n) for n in header["dim"]]
    extents = dim[1 : 1 + max(0, dim[0])]
    while len(extents) > 3 and extents[-1] == 1:
        extents.pop()
    if not 1 <= dim[0] <= 7 or len(extents) not in (3, 4) or min(extents) < 1:
        raise DataError(f"{where}: {extents} voxels: 3 dims are needed, or 4 with channels")
    return tuple(extents)
