"""Reads and writes NIfTI files, including every voxel and header field.

Files are untrusted: sizes are checked before memory is allocated, a gzip file is read to its end
so that its checksum is compared, and errors are reported in one line.
"""

from __future__ import annotations

import gzip
import itertools
import logging
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import cached_property
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pydist.data.publish import GZIP_RATIO, publishing
from pydist.data.regular import require_regular
from pydist.errors import DataError, UsageError

if TYPE_CHECKING:
    from nibabel.nifti1 import Nifti1Header

SUFFIXES = (".nii", ".nii.gz")

MISSING_LIBRARY = "NIfTI files need nibabel: pip install 'pydist[medical]'"

_HEADER = 540
"""Bytes of the longer of the two headers."""
_GZIP = b"\x1f\x8b"
_SLACK = 1 << 20
"""Bytes that may follow the voxels, as some programs pad."""
_SPACINGS = (1e-6, 1e6)
"""mm between voxels."""
_LARGEST = float(np.finfo(np.float32).max) / 2
"""Largest magnitude of a value: the difference of two, which interpolation forms, fits float32."""
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
        return _extents(self.header, str(self.path))


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
        view = memoryview(planes.reshape(-1, order="F").view(np.uint8))  # type: ignore[arg-type]  # numpy says so from Python 3.12 on
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
    slope, intercept = _scaling(header, where)
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


def outline_of(path: Path) -> Outline:
    """Reads only the header of a file.

    Raises:
        DataError: as `read_nifti`, for errors in the header.
        UsageError: nibabel is not installed.
    """
    with closing(OpenNifti(path)) as file:
        whole = all(number.is_integer() for number in _scaling(file.about.header, str(path)))
        return Outline(math.prod(file.about.shape[3:]), file.dtype.kind in "iu" and whole)


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
        raise DataError(f"{where}: damaged header: {_line(error)}") from error
    if not magic.startswith((b"n+1", b"n+2")):
        raise DataError(f"{where}: not NIfTI in one file (magic {magic!r}): convert it to .nii")
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
        raise DataError(f"{where}: damaged header: {_line(error)}") from error
    directions = affine[:3, :3]
    lengths = np.abs(directions).max(0)
    if not np.isfinite(affine).all() or lengths.min() == 0:
        raise DataError(f"{where}: its affine {directions.tolist()} is not invertible")
    if not _SPACINGS[0] < lengths.min() <= lengths.max() < _SPACINGS[1]:
        raise DataError(f"{where}: voxels lie {lengths.tolist()} mm apart")
    if abs(np.linalg.det(directions / lengths)) < 1e-6:
        raise DataError(f"{where}: its affine {directions.tolist()} is not invertible")
    return affine


def _scaling(header: Nifti1Header, where: str) -> tuple[float, float]:
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
    if tuple(shape) != _extents(header, str(name)):
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


def _extents(header: Nifti1Header, where: str) -> tuple[int, ...]:
    """Returns [x, y, z] or [x, y, z, channel]; further dims of one element are dropped."""
    dim = [int(n) for n in header["dim"]]
    extents = dim[1 : 1 + max(0, dim[0])]
    while len(extents) > 3 and extents[-1] == 1:
        extents.pop()
    if not 1 <= dim[0] <= 7 or len(extents) not in (3, 4) or min(extents) < 1:
        raise DataError(f"{where}: {extents} voxels: 3 dims are needed, or 4 with channels")
    return tuple(extents)


@contextmanager
def _errors(path: Path) -> Iterator[None]:
    """Turns the errors of reading a file into `DataError`."""
    try:
        yield
    except EOFError:
        raise DataError(f"{path}: cut short: the gzip data end early") from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path}: damaged gzip data: {_line(error)}") from error
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from error


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())
