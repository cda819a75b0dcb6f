"""Checks the type, filters and size of arrays in untrusted HDF5 files."""

from __future__ import annotations

import math
from dataclasses import dataclass

import h5py
from h5py import h5d, h5p, h5t, h5z

from pydist.errors import DataError

GIB = 1 << 30

FILTERS = {
    h5z.FILTER_DEFLATE: "deflate",
    h5z.FILTER_SHUFFLE: "shuffle",
    h5z.FILTER_FLETCHER32: "fletcher32",
    h5z.FILTER_SZIP: "szip",
    h5z.FILTER_NBIT: "nbit",
    h5z.FILTER_SCALEOFFSET: "scaleoffset",
    h5z.FILTER_LZF: "lzf",
}
"""The filters that are compiled into HDF5 and h5py; any other is a plugin: code from a path."""

_KINDS = {
    h5t.STRING: "strings",
    h5t.COMPOUND: "compound values",
    h5t.ENUM: "an enumeration",
    h5t.VLEN: "values of variable length",
    h5t.REFERENCE: "references",
    h5t.OPAQUE: "opaque bytes",
    h5t.ARRAY: "arrays",
}


@dataclass(frozen=True)
class Limits:
    """The limits on what a file may declare.

    Attributes:
        declared_bytes: a dataset above this may declare at most `ratio` times its stored bytes.
        ratio: declared over stored bytes.
        chunk_bytes: bytes of the largest chunk; a read unpacks a chunk in full.
        depth: components of a dataset's name, and links followed.
        names: number of names in an error message.
        attributes: number of attributes that are read.
    """

    declared_bytes: int = 4 * GIB
    ratio: int = 1000
    chunk_bytes: int = GIB
    depth: int = 16
    names: int = 20
    attributes: int = 100


def check_type(where: str, kind: h5t.TypeID) -> None:
    """Refuses types that are not numbers, or numbers that HDF5 converts without a check."""
    possible = "integers and floating-point numbers are possible"
    if kind.get_class() not in (h5t.INTEGER, h5t.FLOAT):
        raise DataError(
            f"{where} holds {_KINDS.get(kind.get_class(), 'something else')}; {possible}"
        )
    if kind.get_size() > 8:
        raise DataError(f"{where} holds numbers of {kind.get_size()} bytes; up to 8 are possible")
    # Damaged files may declare numbers of 3 bits at bit 60; HDF5 converts such without a check.
    if not kind.equal(h5t.py_create(kind.dtype)):
        raise DataError(f"{where} holds numbers of an unusual form; {possible}")


def check_filters(where: str, creation: h5p.PropDCID) -> None:
    """Refuses filters that are not compiled in."""
    for i in range(creation.get_nfilters()):
        filter_id = creation.get_filter(i)[0]
        if filter_id not in FILTERS:
            raise DataError(
                f"{where} needs the filter plugin {filter_id}; possible are "
                f"{', '.join(FILTERS.values())}"
            )


def check_size(
    where: str, dataset: h5py.Dataset, creation: h5p.PropDCID, limits: Limits, end: int
) -> None:
    """Refuses shape bombs, and data that was declared and never written.

    Args:
        where: names the array in errors.
        dataset: the array.
        creation: its creation properties.
        limits: the limits on what it may declare.
        end: bytes of the file.
    """
    shape = dataset.shape
    declared = math.prod(shape) * dataset.dtype.itemsize
    stored = dataset.id.get_storage_size()
    if declared > limits.declared_bytes and declared > limits.ratio * max(stored, 1):
        raise DataError(f"{where} declares {declared} bytes and holds {stored}")
    if creation.get_layout() == h5d.CHUNKED:
        chunk = creation.get_chunk()
        size = math.prod(chunk) * dataset.dtype.itemsize
        if size > limits.chunk_bytes:
            raise DataError(
                f"{where} has chunks of {size} bytes; {limits.chunk_bytes} are possible"
            )
        expected = math.prod(-(-n // c) for n, c in zip(shape, chunk, strict=True))
        written = dataset.id.get_num_chunks()
        if written < expected:
            raise DataError(f"{where}: {expected - written} of {expected} chunks are missing")
        _check_chunks(where, dataset, size, end)
    elif stored < declared:
        raise DataError(f"{where} was never written in full: {stored} of {declared} bytes")


def _check_chunks(where: str, dataset: h5py.Dataset, size: int, end: int) -> None:
    """Refuses impossible chunks: HDF5 2.0 ends the process when it reads one of 0 bytes."""

    def check(chunk: h5d.StoreInfo) -> None:
        inside = 0 <= chunk.byte_offset <= end - chunk.size
        if not 0 < chunk.size <= 2 * size + 64 or not inside:
            raise DataError(
                f"{where} is damaged: the chunk at {chunk.chunk_offset} has {chunk.size} bytes "
                f"at {chunk.byte_offset} of {end}"
            )

    dataset.id.chunk_iter(check)
