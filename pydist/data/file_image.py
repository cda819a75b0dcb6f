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

from pydist.data.formats import Storage
from pydist.data.publish import make_folder, publish
from pydist.errors import DataError

RECIPE = "pydist_recipe"
"""File attribute: hash of a file's sources and options, so that a second run can keep the file."""

CHUNK = 32
"""Side of a chunk in voxels: 64 kB of int16."""


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
    chunked = storage.chunks or storage.compression == "gzip"

    def fill(file: h5py.File) -> None:
        for name, values in arrays.items():
            more: dict[str, Any] = {}
            if chunked and values.ndim in (3, 4):
                more = {"chunks": storage.of(values.shape)[0], "fletcher32": True}
                more |= _GZIP if storage.compression == "gzip" else {}
            file.create_dataset(name, data=values, **more)
        for name, text in texts.items():
            file.attrs[name] = np.bytes_(text.encode(errors="surrogateescape"))

    make_folder(path.parent)
    publish(path, file_image(fill))


def recipe_hash(content: Any) -> str:
    """Returns a hash of nested lists, dicts and plain values."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def storage_options(
    storage: str, compression: str, shape: Sequence[int], channel_axis: int | None
) -> dict[str, Any]:
    """Returns the arguments with which h5py stores an array.

    Args:
        storage: "contiguous": only a block's bytes are read, a depth block as one run; only the
            manifest's checksum detects flipped bits. "chunked": a read unpacks every chunk that
            it meets, and checks the chunk's checksum.
        compression: "gzip" or "none", for chunks.
        shape: of the array.
        channel_axis: the axis of channels, if there is one; chunks hold one channel where it
            comes first, all where it comes last.
    """
    if storage == "contiguous":
        return {}
    chunk = [min(CHUNK, n) for n in shape]
    if channel_axis is not None:
        chunk[channel_axis] = 1 if channel_axis == 0 else shape[channel_axis]
    return {
        "chunks": tuple(chunk),
        "fletcher32": True,
        **(_GZIP if compression == "gzip" else {}),
    }
