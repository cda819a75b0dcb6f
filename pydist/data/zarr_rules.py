"""Checks the metadata of arrays in untrusted Zarr files, before the zarr package sees them.

Only the entries that describe an array's numbers and chunks are passed on, and only codecs that
compute with bytes: none imports a module, and none unpickles.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from pydist.data.hdf5_rules import Limits
from pydist.errors import DataError

NUMBERS = (
    "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
    "float16", "float32", "float64",
)  # fmt: skip
COMPRESSORS = ("gzip", "zstd", "blosc")
CODECS = ("transpose", "bytes", "sharding_indexed", *COMPRESSORS, "crc32c")

COMPLETE = "pydist_complete"
"""Attribute of an array: all of its chunks were written, so that a missing one is damage. In other
arrays a missing chunk holds the fill value, as the format says."""

_MOST_DIMS = 32
_MOST_CHUNKS = 1 << 20
"""Chunks of a shard: its index is read in full."""
_PASSED_ON = (
    "zarr_format", "node_type", "shape", "data_type", "chunk_grid", "chunk_key_encoding",
    "fill_value", "codecs",
)  # fmt: skip


@dataclass(frozen=True)
class CheckedArray:
    """The metadata of an array that keeps all rules.

    Attributes:
        metadata: for the zarr package.
        declared_bytes: bytes of all values.
        object_bytes: bytes of a chunk's values; of a shard's, in a sharded array.
        complete: whether a missing chunk is damage; see `COMPLETE`.
    """

    metadata: dict[str, Any]
    declared_bytes: int
    object_bytes: int
    complete: bool


def check_array(where: str, record: Any, limits: Limits) -> CheckedArray:
    """Checks the content of an array's `zarr.json`.

    Args:
        where: names the array in errors.
        record: the parsed JSON.
        limits: the limits on what it may declare.

    Raises:
        DataError: it is no array, or breaks a rule.
    """
    if not isinstance(record, dict) or record.get("zarr_format") != 3:
        raise DataError(f"{where}: not of Zarr version 3")
    if record.get("node_type") != "array":
        raise DataError(f"{where} is a group, not an array")
    kind = record.get("data_type")
    if kind not in NUMBERS:
        raise DataError(f"{where} holds {_short(kind)}; possible are {', '.join(NUMBERS)}")
    shape = _extents(f"{where}: its shape", record.get("shape"), least=0)
    chunk = _chunk_grid(where, record.get("chunk_grid"), len(shape))
    _check_keys(where, record.get("chunk_key_encoding"))
    if record.get("storage_transformers"):
        raise DataError(f"{where} has storage transformers, which are never applied")
    itemsize = np.dtype(kind).itemsize
    codecs = record.get("codecs")
    sharded = _check_codecs(where, codecs, chunk)
    size = math.prod(chunk) * itemsize
    most = limits.declared_bytes if sharded else limits.chunk_bytes
    if size > most:
        what = "shards" if sharded else "chunks"
        raise DataError(f"{where} has {what} of {size} bytes; {most} are possible")
    if sharded and (inner := math.prod(sharded) * itemsize) > limits.chunk_bytes:
        raise DataError(f"{where} has chunks of {inner} bytes; {limits.chunk_bytes} are possible")
    attributes = record.get("attributes")
    return CheckedArray(
        {name: record[name] for name in _PASSED_ON if name in record},
        math.prod(shape) * itemsize,
        size,
        isinstance(attributes, dict) and attributes.get(COMPLETE) is True,
    )


def _extents(what: str, values: Any, least: int) -> tuple[int, ...]:
    """Returns a checked list of extents."""
    fits = isinstance(values, list) and len(values) <= _MOST_DIMS
    if not fits or not all(type(n) is int and least <= n < 1 << 63 for n in values):
        raise DataError(f"{what} is {_short(values)}; up to {_MOST_DIMS} integers are expected")
    return tuple(values)


def _configuration(what: str, entry: Any, names: tuple[str, ...]) -> tuple[str, dict[str, Any]]:
    """Returns the checked name and the configuration of an extension point of the metadata."""
    named = {"name": entry} if isinstance(entry, str) else entry
    name = named.get("name") if isinstance(named, dict) else None
    if name not in names:
        raise DataError(f"{what} is {_short(name or entry)}; possible are {', '.join(names)}")
    configuration = named.get("configuration", {})
    if not isinstance(configuration, dict):
        raise DataError(f"{what} is configured by {_short(configuration)}; a table is expected")
    return name, configuration


def _chunk_grid(where: str, grid: Any, dims: int) -> tuple[int, ...]:
    _, configuration = _configuration(f"{where}: its chunk grid", grid, ("regular",))
    chunk = _extents(f"{where}: its chunk shape", configuration.get("chunk_shape"), least=1)
    if len(chunk) != dims:
        raise DataError(f"{where}: its chunks {_short(chunk)} have not the array's {dims} dims")
    return chunk


def _check_keys(where: str, encoding: Any) -> None:
    """Refuses names of chunks' files that are not made of numbers."""
    name, configuration = _configuration(f"{where}: its key encoding", encoding, ("default", "v2"))
    separator = configuration.get("separator", "/" if name == "default" else ".")
    if separator not in ("/", "."):
        raise DataError(f"{where}: its separator is {_short(separator)}; possible are / and .")


def _check_codecs(where: str, codecs: Any, chunk: tuple[int, ...]) -> tuple[int, ...] | None:
    """Checks a chain of codecs; returns the inner chunks' shape if it is that of shards."""
    if not isinstance(codecs, list) or not 1 <= len(codecs) <= 8:
        raise DataError(f"{where}: its codecs are {_short(codecs)}; 1 to 8 are expected")
    found = [_configuration(f"{where}: a codec", codec, CODECS) for codec in codecs]
    names = [name for name, _ in found]
    if sum(name in COMPRESSORS for name in names) > 1:
        raise DataError(f"{where} is compressed twice, by {', '.join(names)}")
    if "sharding_indexed" not in names:
        return None
    if len(names) > 1:
        raise DataError(f"{where}: its shards have further codecs: {', '.join(names)}")
    return _check_shards(where, found[0][1], chunk)


def _check_shards(
    where: str, configuration: Mapping[str, Any], shard: tuple[int, ...]
) -> tuple[int, ...]:
    inner = _extents(f"{where}: its chunk shape", configuration.get("chunk_shape"), least=1)
    if len(inner) != len(shard) or any(n % m for n, m in zip(shard, inner, strict=True)):
        raise DataError(f"{where}: chunks {_short(inner)} do not divide shards {_short(shard)}")
    count = math.prod(n // m for n, m in zip(shard, inner, strict=True))
    if count > _MOST_CHUNKS:
        raise DataError(f"{where} has shards of {count} chunks; {_MOST_CHUNKS} are possible")
    if _check_codecs(where, configuration.get("codecs"), inner) is not None:
        raise DataError(f"{where} has shards in its shards, which are not read")
    if configuration.get("index_location", "end") not in ("start", "end"):
        place = _short(configuration["index_location"])
        raise DataError(f"{where}: the index of its shards is at {place}; possible are start, end")
    index = configuration.get("index_codecs")
    if not isinstance(index, list) or not 1 <= len(index) <= 2:
        raise DataError(f"{where}: its index codecs are {_short(index)}; bytes, crc32c are known")
    for codec in index:  # of fixed size, as the format demands: the index is found by its size
        _configuration(f"{where}: an index codec", codec, ("bytes", "crc32c"))
    return inner


def _short(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:57]}..."
