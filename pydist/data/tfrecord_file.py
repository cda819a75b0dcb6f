"""Reads the TFRecord files of MLPerf's CosmoFlow, a format of data sets, without TensorFlow.

A file holds one record, a `tf.train.Example` with the features `x`, the int16 counts of a cube with
4 channels (channel last), and `y`, the values to predict; it may be compressed by gzip. A record
can't be read by blocks: a file is read in full when it is opened, and its checksums are compared.
The arrays stay in memory while the file is open, so convert such files before training on blocks.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pydist._loader import native
from pydist.data.formats import StoredArray, StoredFile
from pydist.data.hdf5_rules import Limits
from pydist.data.regular import Stamp, change_since, require_regular
from pydist.errors import DataError

SUFFIXES = (".tfrecord", ".tfrecords", ".tfrecord.gz")
CHANNELS = 4

_GZIP = b"\x1f\x8b"
_HEAD, _FOOT = 12, 4
"""Bytes around a record: its length with a checksum, and the checksum of its content."""
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
"""Wire types of protocol buffers."""


class TfrecordFile(StoredFile):
    """A TFRecord file that holds one sample, in the arrays `x` (N, N, N, 4) and `y`."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._stamp = Stamp.of(require_regular(path))
        self._arrays = _arrays(_example(_record(path)))

    @classmethod
    def is_one(cls, path: Path) -> bool:
        """Returns whether a file's name is that of a TFRecord file."""
        return path.name.endswith(SUFFIXES) and path.is_file()

    def dataset(self, name: str) -> StoredArray:
        """Returns `x` or `y`."""
        if name not in self._arrays:
            raise DataError(f"{self.path}: no array {name!r}; it has {', '.join(self._arrays)}")
        return self._arrays[name]

    def change(self) -> str | None:
        """Describes a change of the file since it was opened."""
        return change_since(self.path, self._stamp)


def _record(path: Path) -> memoryview:
    """Returns the content of a file's only record.

    Raises:
        ValueError: it is damaged, too large, or not the only one.
    """
    most = Limits().chunk_bytes
    size = path.stat().st_size
    with path.open("rb") as file:
        content = file.read(min(size, most) + 1)
    if content.startswith(_GZIP):
        content = _unpacked(content, most)
    if len(content) > most:
        raise ValueError(f"more than {most} bytes")
    if len(content) < _HEAD + _FOOT:
        raise ValueError(f"cut short: {len(content)} bytes")
    length = int.from_bytes(content[:8], "little")
    if _masked(content[:8]) != int.from_bytes(content[8:_HEAD], "little"):
        raise ValueError("damaged: the checksum of its first record's length differs")
    if _HEAD + length + _FOOT != len(content):
        said = f"its first record ends at byte {_HEAD + length + _FOOT} of {len(content)}"
        raise ValueError(f"{said}: files with one record are read")
    record = memoryview(content)[_HEAD : _HEAD + length]
    if _masked(record) != int.from_bytes(content[-_FOOT:], "little"):
        raise ValueError("damaged: the checksum of its record differs")
    return record


def _unpacked(content: bytes, most: int) -> bytes:
    member = zlib.decompressobj(wbits=31)
    try:
        found = member.decompress(content, most + 1)
    except zlib.error as error:
        raise ValueError(f"damaged gzip data: {error}") from error
    if len(found) <= most and (not member.eof or member.unused_data):
        raise ValueError("its gzip data end early, or other data follow them")
    return found


def _masked(content: bytes | memoryview) -> int:
    """Returns the checksum of TFRecord: a CRC-32C, rotated and shifted."""
    crc = native.crc32c(content)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _example(record: memoryview) -> dict[str, memoryview]:
    """Returns the features of a `tf.train.Example`, as encoded."""
    found = {}
    for features in _fields(record, 1):
        for entry in _fields(features, 1):
            keys, values = _fields(entry, 1), _fields(entry, 2)
            for key, value in zip(keys, values, strict=True):
                found[bytes(key).decode()] = value
    return found


def _arrays(features: dict[str, memoryview]) -> dict[str, npt.NDArray[Any]]:
    """Returns the arrays of CosmoFlow from the features `x`, bytes, and `y`, numbers or bytes."""
    missing = {"x", "y"} - features.keys()
    if missing:
        raise ValueError(f"no feature {min(missing)!r} in it; it has {', '.join(features) or '-'}")
    (x,) = (np.frombuffer(item, "<i2") for item in _items(features["x"], 1))
    side = round((len(x) / CHANNELS) ** (1 / 3))
    if not side or len(x) != CHANNELS * side**3:
        raise ValueError(
            f"x has {len(x)} numbers of int16: a cube with {CHANNELS} channels is read"
        )
    numbers = [*_items(features["y"], 1), *_items(features["y"], 2)]
    y = np.concatenate([np.frombuffer(item, "<f4") for item in numbers])
    return {"x": x.reshape(side, side, side, CHANNELS).copy(), "y": y}  # aligned in memory


def _items(feature: memoryview, kind: int) -> Iterator[memoryview]:
    """Yields what a feature's list of bytes (kind 1) or of float numbers (kind 2) holds."""
    for values in _fields(feature, kind):
        yield from _fields(values, 1)


def _fields(message: memoryview, wanted: int) -> Iterator[memoryview]:
    """Yields the content of a message's fields with a number, of fixed or of given length.

    See https://protobuf.dev/programming-guides/encoding.
    """
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        number, wire = key >> 3, key & 7
        if wire == _VARINT:
            _, at = _varint(message, at)
            continue
        if wire == _BYTES:
            length, at = _varint(message, at)
        elif wire in (_FIXED32, _FIXED64):
            length = 4 if wire == _FIXED32 else 8
        else:
            raise ValueError(f"damaged: a field of the wire type {wire}")
        if length > len(message) - at:
            raise ValueError(
                f"damaged: a field of {length} bytes, of which {len(message) - at} are"
            )
        if number == wanted:
            yield message[at : at + length]
        at += length


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    """Returns an integer of variable length, and the position after it."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(message):
            break
        byte = message[at]
        value, at = value | (byte & 0x7F) << shift, at + 1
        if byte < 0x80:
            return value, at
    raise ValueError("damaged: an integer that does not end")
