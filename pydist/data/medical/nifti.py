"""Reads NIfTI files, including every voxel, at once or plane by plane.

Files are untrusted: sizes are checked before memory is allocated, a gzip file is read to its end
so that its checksum is compared, and errors are reported in one line.
"""

from __future__ import annotations

import gzip
import itertools
import math
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pydist.data.medical.nifti_header import NiftiHeader, header_of, scaling_of
from pydist.data.publish import GZIP_RATIO
from pydist.data.regular import require_regular
from pydist.errors import DataError, one_line

if TYPE_CHECKING:
    from nibabel.nifti1 import Nifti1Header

_HEADER = 540
"""Bytes of the longer of the two headers."""
_GZIP = b"\x1f\x8b"
_SLACK = 1 << 20
"""Bytes that may follow the voxels, as some programs pad."""
_LARGEST = float(np.finfo(np.float32).max) / 2
"""Largest magnitude of a value: the difference of two, which interpolation forms, fits float32."""


@dataclass(frozen=True)
class Nifti(NiftiHeader):
    """A NIfTI file, as it was read.

    Attributes:
        stored: the voxels as stored, [x, y, z] or [x, y, z, channel].
    """

    stored: npt.NDArray[Any]

    def values(self) -> npt.NDArray[Any]:
        """Returns the voxels with slope and intercept applied; integers if all of them are.

        Raises:
            DataError: slope, intercept or a value is NaN or infinite, or too large for float32.
        """
        return _scaled(self.stored, self.header, str(self.path))

    def part(self, place: tuple[slice, ...], channel: int) -> npt.NDArray[Any]:
        """Returns a part of the values of a channel; see `OpenNifti.part`."""
        stored = self.stored if self.stored.ndim == 3 else self.stored[..., channel]
        first = [each.start for each in place]
        return _scaled(stored[place], self.header, str(self.path), first)

    def close(self) -> None:
        """Does nothing: the voxels are in memory; see `OpenNifti.close`."""


class OpenNifti:
    """A NIfTI file that is read plane by plane, best in the order of the file.

    Planes that follow one another in requests are kept, no others; a compressed file is read again
    from its beginning where a request goes back.

    Args:
        path: the file, compressed or not.

    Raises:
        DataError: it is missing, damaged, not NIfTI, or holds something other than a volume of real
            numbers.
        UsageError: nibabel is not installed.

    Attributes:
        about: its header.
        dtype: of the voxels as stored.
    """

    def __init__(self, path: str | Path) -> None:
        name = Path(path)
        with _errors(name), ExitStack() as stack:
            size = require_regular(name).st_size
            file = stack.enter_context(name.open("rb"))
            compressed = file.read(2) == _GZIP
            file.seek(0)
            self._file: BufferedReader | gzip.GzipFile = file
            if compressed:
                self._file, size = gzip.GzipFile(fileobj=file), size * GZIP_RATIO
                stack.enter_context(self._file)
            self._read_header(name, size)
            self._opened = stack.pop_all()
        self._first, self._kept = 0, np.empty((*self.about.shape[:2], 0), self.dtype, order="F")
        self._at = -1
        """Place in the voxels, in bytes; -1 if unknown."""

    def _read_header(self, path: Path, at_most: int) -> None:
        """Reads the header of a file of at most `at_most` bytes."""
        start = self._file.read(_HEADER)
        header = header_of(start, str(path))
        self.about = NiftiHeader(path, header, start[: int(header["sizeof_hdr"])])
        self.dtype: np.dtype[Any] = header.get_data_dtype()
        if self.dtype.kind not in "iuf" or self.dtype.itemsize > 8:
            raise DataError(f"{path}: holds {self.dtype}; integers and real numbers are possible")
        self._size = math.prod(self.about.shape) * self.dtype.itemsize
        told = float(header["vox_offset"])
        self._offset = int(told) if 0 < told < _SLACK else 0
        if self._offset != told or self._offset < len(self.about.block):
            raise DataError(f"{path}: damaged header: voxels begin at byte {told:g}")
        if self._offset + self._size > at_most:
            raise DataError(
                f"{path}: cut short: {self._offset + self._size} bytes are declared, it has at "
                f"most {at_most}"
            )

    def part(self, place: tuple[slice, ...], channel: int) -> npt.NDArray[Any]:
        """Returns a part of the values of a channel; see `Nifti.values`.

        Args:
            place: slices of x, y and z, with both ends.
            channel: index of the channel.
        """
        before = channel * self.about.shape[2]
        stored = self.planes(before + place[2].start, before + place[2].stop)[place[:2]]
        first = [each.start for each in place]
        return _scaled(stored, self.about.header, str(self.about.path), first)

    def planes(self, lo: int, hi: int) -> npt.NDArray[Any]:
        """Returns planes as stored, [x, y, hi - lo], of one channel after another.

        Raises:
            DataError: the file is cut short or damaged (checksum and length of a gzip file are
                compared after its last plane).
        """
        end = self._first + self._kept.shape[2]
        known = max(0, min(end, hi) - lo) if lo >= self._first else 0
        start = lo - self._first
        # A copy, so that no other plane is in memory beside the new ones.
        again = self._kept[..., start : start + known].copy()
        self._first, self._kept = lo, again
        found = np.empty((*self.about.shape[:2], hi - lo), self.dtype, order="F")
        found[..., :known] = again
        with _errors(self.about.path):
            self._fill(found[..., known:], lo + known)
        self._kept = found
        return found

    def _fill(self, planes: npt.NDArray[Any], first: int) -> None:
        """Reads adjacent planes from the file."""
        view = planes.reshape(-1, order="F").view(np.uint8).data
        begin = first * math.prod(self.about.shape[:2]) * self.dtype.itemsize
        if self._at != begin:
            self._file.seek(self._offset + begin)
        filled = 0
        while filled < len(view) and (count := self._file.readinto(view[filled:])):
            filled += count
        self._at = begin + filled
        if filled < len(view):
            whole, read = self._offset + self._size, self._offset + self._at
            share = 100 * read / whole
            raise DataError(
                f"{self.about.path}: cut short: {read} of {whole} bytes ({share:.0f} %)"
            )
        more = 0
        while self._at == self._size and (count := len(self._file.read(1 << 16))):
            # To the end, where gzip compares checksum and length.
            more += count
            if more > _SLACK:
                raise DataError(f"{self.about.path}: more than {_SLACK} bytes follow the voxels")

    def close(self) -> None:
        """Closes the file and releases its planes; the header stays."""
        self._opened.close()
        self._kept = self._kept[..., :0].copy()


def _scaled(
    stored: npt.NDArray[Any], header: Nifti1Header, where: str, first: Sequence[int] = ()
) -> npt.NDArray[Any]:
    """Returns voxels with slope and intercept applied; see `Nifti.values`.

    Args:
        stored: the voxels as stored.
        header: of their file.
        where: names the file in errors.
        first: index of the first voxel, for errors.
    """
    slope, intercept = scaling_of(header, where)
    values = stored.astype(stored.dtype.newbyteorder("="), copy=False)
    if (slope, intercept) != (1, 0):
        whole = all(n.is_integer() and abs(n) < 1 << 31 for n in (slope, intercept))
        if values.dtype.kind in "iu" and values.dtype.itemsize <= 4 and whole:
            largest = abs(slope) * 2.0 ** (8 * values.dtype.itemsize) + abs(intercept)
            wide = np.int32 if largest < 1 << 31 else np.int64
            values = values.astype(wide) * wide(slope) + wide(intercept)
        else:
            with np.errstate(all="ignore"):  # values that are not finite are refused below
                values = values * np.float64(slope) + np.float64(intercept)
    if values.dtype.kind == "f":
        _require_float32(values, where, first)
    return values


def _require_float32(values: npt.NDArray[Any], where: str, first: Sequence[int]) -> None:
    """Raises `DataError` for values from a voxel on that networks can't compute with."""
    if not np.isfinite(values).all():
        at = np.unravel_index(int(np.argmin(np.isfinite(values))), values.shape)
        voxel = tuple(int(i) + a for i, a in itertools.zip_longest(at, first, fillvalue=0))
        raise DataError(f"{where}: value {values[at]} at voxel {voxel}")
    low, high = float(values.min()), float(values.max())
    if max(-low, high) > _LARGEST:
        raise DataError(
            f"{where}: values from {low:g} to {high:g} do not fit float32: magnitudes up to"
            f" {_LARGEST:g} are possible"
        )


def read_nifti(path: str | Path) -> Nifti:
    """Reads a NIfTI-1 or NIfTI-2 file, compressed or not.

    Raises:
        DataError: it is missing, cut short, damaged (checksum and length of a gzip file are
            compared), not NIfTI, or holds something other than a volume of real numbers.
        UsageError: nibabel is not installed.
    """
    with closing(OpenNifti(path)) as file:
        about = file.about
        stored = file.planes(0, math.prod(about.shape[2:])).reshape(about.shape, order="F")
        return Nifti(about.path, about.header, about.block, stored)


class Outline(NamedTuple):
    """Number of channels and kind of values that the header of a NIfTI file announces."""

    channels: int
    integers: bool
    """Whether all values are integers, with slope and intercept applied."""
    narrow: bool
    """Whether the range of all values that can be stored is within that of int16."""


def within_int16(stored: Iterable[float], slope: float, intercept: float) -> bool:
    """Returns whether int16 has the range of stored values, with slope and intercept applied."""
    possible = np.iinfo(np.int16)
    return all(possible.min <= slope * n + intercept <= possible.max for n in stored)


def outline_of(path: Path) -> Outline:
    """Reads only the header of a file.

    Raises:
        DataError: as `read_nifti`, for errors in the header.
        UsageError: nibabel is not installed.
    """
    with closing(OpenNifti(path)) as file:
        scaling = scaling_of(file.about.header, str(path))
        integers = file.dtype.kind in "iu" and all(number.is_integer() for number in scaling)
        narrow = False
        if integers:
            limits = np.iinfo(file.dtype)
            narrow = within_int16((limits.min, limits.max), *scaling)
        return Outline(math.prod(file.about.shape[3:]), integers, narrow)


@contextmanager
def _errors(path: Path) -> Iterator[None]:
    """Turns the errors of reading a file into `DataError`."""
    try:
        yield
    except EOFError:
        raise DataError(f"{path}: cut short: the gzip data end early") from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path}: damaged gzip data: {one_line(error)}") from error
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from error
