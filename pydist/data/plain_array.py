"""Reads arrays that an HDF5 file has uncompressed in one piece, by `pread` alone.

For such an array HDF5 does the same reads, but one thread of the process at a time, and for a block
of some megabytes its bookkeeping takes as long as the copy from the page cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt
from h5py import h5d, h5fd, h5t

from pydist._loader import native


@dataclass(frozen=True)
class PlainArray:
    """Row-major array that an open file has.

    Attributes:
        descriptor: of the file, which its owner keeps open.
        offset: first byte of the array.
        dtype: type that its elements have in the file.
        shape: its extents.
    """

    descriptor: int
    offset: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    def fits(self, out: npt.NDArray[Any]) -> bool:
        """Returns whether elements can be read into an array as they are."""
        return out.dtype == self.dtype and out.flags.c_contiguous

    def read(
        self, window: tuple[slice, ...], out: npt.NDArray[Any] | None = None
    ) -> npt.NDArray[Any]:
        """Reads a box, whose slices have bounds and no steps; into `out` if given, which `fits`.

        Raises:
            OSError: the file can't be read, or ends within the array.
            ValueError: the box is not in the array.
        """
        lo, hi = [each.start for each in window], [each.stop for each in window]
        if out is None:
            out = np.empty([b - a for a, b in zip(lo, hi, strict=True)], self.dtype)
        if out.size:
            into = out.reshape(-1).view(np.uint8).data
            native.read_box(
                self.descriptor, self.offset, self.dtype.itemsize, self.shape, lo, hi, into
            )
        return out


def plain_array(dataset: h5py.Dataset) -> PlainArray | None:
    """Returns how the elements of a dataset can be read without HDF5; None if they can't.

    Args:
        dataset: has passed the checks of `safe_open`; its file stays open.
    """
    offset = dataset.id.get_offset()
    file = dataset.file.id
    if (
        offset is None  # also of virtual datasets, which other files have
        or dataset.id.get_create_plist().get_layout() != h5d.CONTIGUOUS
        or dataset.dtype.kind not in "iuf"
        or dataset.id.get_type() != h5t.py_create(dataset.dtype)  # such as 12 bits of 16
        or file.get_access_plist().get_driver() != h5fd.SEC2
    ):
        return None
    return PlainArray(file.get_vfd_handle(), offset, dataset.dtype, dataset.shape)
