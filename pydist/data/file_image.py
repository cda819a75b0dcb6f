"""Makes HDF5 files in memory, to be written to disk in one piece.

If the disk is full in the middle of a chunked write, HDF5 ends the process with a segmentation
fault at exit (h5py issue 914); a file made in memory is published completely or not at all.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from pydist.data.formats import SIDE, Storage
from pydist.data.options import Compression
from pydist.data.publish import make_folder, publish
from pydist.errors import DataError

RECIPE = "pydist_recipe"
"""File attribute: hash of a file's sources and options, so that a second run can keep the file."""

_GZIP = {"compression": "gzip", "compression_opts": 4, "shuffle": True}


def file_image(fill: Callable[[h5py.File], None]) -> memoryview:
    """Returns the bytes of the HDF5 file that `fill` writes."""
    image = io.BytesIO()
    with h5py.File(image, "w") as file:
        fill(file)
    return image.getbuffer()


def write_hdf5(
    path: Path, arrays: Mapping[str, npt.NDArray[Any]], texts: Mapping[str, str], storage: Storage
) -> None:
    """Writes arrays to an HDF5 file, atomically; in chunks with checksums if `storage` names any.

    Raises:
        DataError: an array holds booleans, which `safe_open` would refuse as an enumeration.
        DiskError: the disk is full, or the folder can't be written.
    """
    for name, values in arrays.items():
        if values.dtype.kind == "b":
            raise DataError(f"{path}: {name!r} holds booleans, and HDF5 files hold numbers alone")

    def fill(file: h5py.File) -> None:
        for name, values in arrays.items():
            file.create_dataset(name, data=values, **h5py_arguments(values.shape, storage))
        for name, text in texts.items():
            file.attrs[name] = np.bytes_(text.encode(errors="surrogateescape"))

    make_folder(path.parent)
    publish(path, file_image(fill))


def recipe_hash(content: Any) -> str:
    """Returns a hash of nested lists, dicts and plain values."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def storage_of(storage: str, compression: Compression, *, channels_last: bool = False) -> Storage:
    """Returns how the files of made and converted sets store arrays.

    Args:
        storage: "contiguous": only a block's bytes are read, a depth block as one run; only the
            manifest's checksum detects flipped bits. "chunked": a read unpacks every chunk that
            it meets, and checks the chunk's checksum.
        compression: "gzip" or "none", for chunks.
        channels_last: whether channels come last.
    """
    chunks = (SIDE,) * 3 if storage == "chunked" else ()
    return Storage(chunks, (), compression, channels_last)


def h5py_arguments(shape: Sequence[int], storage: Storage) -> dict[str, Any]:
    """Returns the arguments with which h5py stores an array, in chunks with checksums if any."""
    gzip = storage.compression == "gzip"
    if not (storage.chunks or gzip) or len(shape) not in (3, 4):
        return {}
    return {"chunks": storage.of(shape)[0], "fletcher32": True, **(_GZIP if gzip else {})}
