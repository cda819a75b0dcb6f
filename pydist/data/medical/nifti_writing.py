"""Writes NIfTI files, with every header field of another one."""

from __future__ import annotations

import gzip
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pydist.data.medical.nifti_header import header_of, require_suffix, voxel_shape
from pydist.data.publish import GZIP_RATIO, publishing
from pydist.errors import UsageError


def write_nifti(
    path: str | Path, stored: npt.NDArray[Any], block: bytes, dtype: npt.DTypeLike | None = None
) -> None:
    """Writes voxels with the header of another file, atomically.

    Args:
        path: ends in .nii or .nii.gz.
        stored: the voxels as stored, [x, y, z] or [x, y, z, channel].
        block: the header. All its bits are kept unless `dtype` is given; affine, codes, spacing
            and units always are.
        dtype: the stored type, instead of the header's; this resets slope, range and the dims that
            `stored` does not have.

    Raises:
        UsageError: another suffix, or voxels that do not match the header.
        DiskError: the disk is full, or the folder can't be written.
    """
    with written_nifti(path, stored.shape, block, dtype) as write:
        write(stored)


@contextmanager
def written_nifti(
    path: str | Path, shape: Sequence[int], block: bytes, dtype: npt.DTypeLike | None = None
) -> Iterator[Callable[[npt.NDArray[Any]], None]]:
    """Writes a NIfTI file in parts; it appears when the `with` block has ended without an error.

    Args:
        path: ends in .nii or .nii.gz.
        shape: of all voxels, [x, y, z] or [x, y, z, channel].
        block: the header, as in `write_nifti`.
        dtype: as in `write_nifti`.

    Yields:
        A function that writes the next voxels, in the file's order: x fastest.

    Raises:
        UsageError: another suffix, or voxels that do not match the header.
        DiskError: the disk is full, or the folder can't be written.
    """
    name = Path(path)
    require_suffix(name)
    header = header_of(block, str(name))
    if dtype is not None:
        header.set_data_dtype(np.dtype(dtype))
        header["dim"][0] = len(shape)
        header["dim"][1 : 1 + len(shape)] = shape
        header["dim"][1 + len(shape) :] = 1
        header["scl_slope"], header["scl_inter"] = 1, 0
        header["cal_max"] = header["cal_min"] = 0
        block = header.binaryblock
    kind = header.get_data_dtype()
    if tuple(shape) != voxel_shape(header, str(name)):
        raise UsageError(
            f"{name}: voxels {tuple(shape)} do not fit the header's {header.get_data_shape()}"
        )
    offset = len(block) + 4  # four zeros: no extensions follow
    fixed = header_of(block, str(name))
    if int(fixed["vox_offset"]) != offset:
        fixed["vox_offset"] = offset
        block = fixed.binaryblock
    packed = name.name.endswith(".gz")
    size = offset + math.prod(shape) * kind.itemsize
    with publishing(name, size // GZIP_RATIO if packed else size) as file, ExitStack() as stack:
        into: Any = file
        if packed:
            gz = gzip.GzipFile("", "wb", compresslevel=6, fileobj=file, mtime=0)
            into = stack.enter_context(gz)
        into.write(block + bytes(4))

        def write(stored: npt.NDArray[Any]) -> None:
            converted = stored.astype(kind, copy=False)
            if not np.array_equal(converted, stored):
                low, high = stored.min(), stored.max()
                raise UsageError(f"{name}: values from {low} to {high} do not fit {kind}")
            into.write(converted.tobytes(order="F"))

        yield write
