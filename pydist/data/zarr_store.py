"""What the zarr package reads untrusted arrays through: a store, and decompressors with a limit."""

from __future__ import annotations

import asyncio
import math
import os
import zlib
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from numcodecs.blosc import Blosc
from numcodecs.zstd import Zstd
from zarr import Array, AsyncArray
from zarr.abc.codec import BytesBytesCodec
from zarr.abc.store import (
    ByteRequest,
    OffsetByteRequest,
    RangeByteRequest,
    Store,
    SuffixByteRequest,
)
from zarr.buffer import cpu
from zarr.codecs import ShardingCodec
from zarr.storage import StorePath

from pydist.data.regular import Stamp, TrustedTree
from pydist.data.zarr_rules import COMPRESSORS, CheckedArray

_SLACK = 1 << 16
"""Bytes by which a chunk that can't be compressed may exceed its values: headers, checksums."""
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"


def open_array(tree: TrustedTree, checked: CheckedArray) -> Array[Any]:
    """Opens an array whose metadata was checked; nothing is read before a box is."""
    metadata = {**checked.metadata, "codecs": _bounded(checked.metadata["codecs"])}
    array: Any = AsyncArray  # takes codecs, too, which its types do not say
    return Array(array(metadata, StorePath(ChunkStore(tree, checked))))


class ChunkStore(Store):
    """Read-only store of one array's chunks, which are files in a folder.

    Args:
        tree: the array's folder.
        checked: its metadata.
    """

    supports_writes = supports_deletes = supports_listing = False

    def __init__(self, tree: TrustedTree, checked: CheckedArray) -> None:
        super().__init__(read_only=True)
        self._tree = tree
        self._most = 2 * checked.object_bytes + _SLACK
        """Bytes of the largest file."""
        self._complete = checked.complete

    async def get(
        self,
        key: str,
        prototype: Any = None,
        byte_range: ByteRequest | None = None,
    ) -> Any:
        """Reads a chunk, or a part of a shard; `None` for a missing one that may be missing."""
        values = await asyncio.to_thread(self.read, key, byte_range)
        return None if values is None else cpu.Buffer.from_array_like(values)

    def read(self, key: str, byte_range: ByteRequest | None) -> npt.NDArray[np.uint8] | None:
        """Reads a file or a part of one, as `get`.

        Raises:
            ValueError: it has not the expected size, or changes while it is read.
        """
        try:
            descriptor, status = self._tree.open(key)
        except (FileNotFoundError, NotADirectoryError):
            if self._complete:
                raise ValueError(f"chunk {key} is missing") from None
            return None
        try:
            start, end = self._part(key, status.st_size, byte_range)
            values = np.empty(end - start, dtype=np.uint8)
            filled = 0
            while filled < len(values):
                count = os.preadv(descriptor, [values[filled:]], start + filled)  # type: ignore[list-item]  # an array is a buffer
                if not count:
                    break
                filled += count
            if filled < len(values) or Stamp.of(os.fstat(descriptor)) != Stamp.of(status):
                raise ValueError(f"chunk {key} changed while it was read")
            return values
        finally:
            os.close(descriptor)

    def _part(self, key: str, size: int, byte_range: ByteRequest | None) -> tuple[int, int]:
        """Returns the first and the last byte, plus 1, of a part of a file."""
        if byte_range is None:
            start, end = 0, size
        elif isinstance(byte_range, RangeByteRequest):
            start, end = byte_range.start, byte_range.end
        elif isinstance(byte_range, SuffixByteRequest):
            start, end = size - byte_range.suffix, size
        elif isinstance(byte_range, OffsetByteRequest):
            start, end = byte_range.offset, size
        if not 0 <= start < end <= size:
            raise ValueError(f"chunk {key} has {size} bytes, and {start} to {end} are asked for")
        if end - start > self._most:
            raise ValueError(
                f"chunk {key} has {end - start} bytes; its values need up to {self._most}"
            )
        return start, end

    async def get_partial_values(
        self, prototype: Any, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Any]:
        """Reads several parts."""
        return await asyncio.gather(*(self.get(key, prototype, part) for key, part in key_ranges))

    async def exists(self, key: str) -> bool:
        """Returns whether a chunk was written."""
        return await asyncio.to_thread(self._tree.path(key).is_file)

    async def set(self, key: str, value: Any) -> None:
        """Raises, as the store is read-only."""
        self._check_writable()

    async def delete(self, key: str) -> None:
        """Raises, as the store is read-only."""
        self._check_writable()

    async def _nothing(self) -> AsyncIterator[str]:
        for name in tuple[str, ...]():
            yield name

    def list(self) -> AsyncIterator[str]:
        """Lists nothing."""
        return self._nothing()

    def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        """Lists nothing."""
        return self._nothing()

    def list_dir(self, prefix: str) -> AsyncIterator[str]:
        """Lists nothing."""
        return self._nothing()

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = object.__hash__


@dataclass(frozen=True)
class Bounded(BytesBytesCodec):
    """Decompressor that makes exactly the bytes that an array declares for a chunk.

    A compressed chunk of 1 MB may expand to 1 GB (gzip), or claim to (zstd, blosc).

    Attributes:
        name: "gzip", "zstd" or "blosc".
        checksums: bytes that a checksum adds to the values before they are compressed.
    """

    is_fixed_size = False

    name: str
    checksums: int = 0

    def _decode_sync(self, chunk_bytes: Any, chunk_spec: Any) -> Any:
        itemsize = chunk_spec.dtype.to_native_dtype().itemsize
        size = math.prod(chunk_spec.shape) * itemsize + self.checksums
        values = unpack(self.name, chunk_bytes.as_numpy_array(), size)
        return chunk_spec.prototype.buffer.from_array_like(values)

    async def _decode_single(self, chunk_bytes: Any, chunk_spec: Any) -> Any:
        return await asyncio.to_thread(self._decode_sync, chunk_bytes, chunk_spec)

    def compute_encoded_size(self, input_byte_length: int, chunk_spec: Any) -> int:
        """Is never called, as arrays are only read; zarr's base class demands it."""
        raise NotImplementedError  # nothing is encoded


def unpack(name: str, packed: npt.NDArray[np.uint8], size: int) -> npt.NDArray[np.uint8]:
    """Decompresses exactly `size` bytes.

    Raises:
        ValueError: the data are damaged, or expand to another size.
    """
    if name == "gzip":
        return _gunzip(packed, size)
    out = np.empty(size, dtype=np.uint8)
    if name == "blosc":
        header = packed[:16].tobytes()
        told, stored = int.from_bytes(header[4:8], "little"), int.from_bytes(header[12:], "little")
        if len(header) < 16 or told != size or stored != len(packed):
            raise ValueError(_other_size(told, size))
        Blosc().decode(packed, out)
        return out
    told_zstd = _zstd_content(packed[:18].tobytes())
    # A frame without its size, and more frames, are checked against that of `out`.
    if told_zstd not in (None, size):
        raise ValueError(_other_size(told_zstd, size))
    try:
        Zstd().decode(packed, out)
    except RuntimeError as error:
        raise ValueError(str(error)) from error
    return out


def _gunzip(packed: npt.NDArray[np.uint8], size: int) -> npt.NDArray[np.uint8]:
    rest, parts, length = packed.tobytes(), list[bytes](), 0
    try:
        while rest:
            member = zlib.decompressobj(wbits=31)
            parts.append(member.decompress(rest, size + 1 - length))
            length += len(parts[-1])
            if length > size:
                raise ValueError(_other_size(None, size))
            if not member.eof:
                raise ValueError("its gzip data end early")
            rest = member.unused_data
    except zlib.error as error:
        raise ValueError(str(error)) from error
    if length != size:
        raise ValueError(_other_size(length, size))
    return np.frombuffer(b"".join(parts), dtype=np.uint8)


def _zstd_content(header: bytes) -> int | None:
    """Returns the bytes that a frame of zstd declares; None if it declares none (RFC 8878)."""
    if len(header) < 6 or not header.startswith(_ZSTD_MAGIC):
        raise ValueError("no zstd data")
    descriptor = header[4]
    single = bool(descriptor & 0x20)
    start = 5 + (not single) + (0, 1, 2, 4)[descriptor & 3]
    width = (int(single), 2, 4, 8)[descriptor >> 6]
    if not width:
        return None
    told = int.from_bytes(header[start : start + width], "little")
    return told + 256 if width == 2 else told


def _other_size(told: int | None, size: int) -> str:
    return f"it expands to {'more' if told is None else told} bytes where {size} are declared"


def _bounded(codecs: list[Any]) -> list[Any]:
    """Replaces the decompressors in a checked chain of codecs."""
    found: list[Any] = []
    checksums = 0
    for codec in codecs:
        name = codec if isinstance(codec, str) else codec["name"]
        if name in COMPRESSORS:
            found.append(Bounded(name, checksums))
        elif name == "sharding_indexed":
            configuration = dict(codec["configuration"])
            configuration["codecs"] = _bounded(configuration["codecs"])
            found.append(ShardingCodec(**configuration))
        else:
            checksums += 4 * (name == "crc32c")
            found.append(codec)
    return found
