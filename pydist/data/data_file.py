"""A file of a data set, as its manifest describes it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath

CHECKSUMS = ("", "crc32", "crc32c")
"""Kinds of checksums: none, CRC-32 of manifests of version 1, CRC-32C."""


@dataclass(frozen=True)
class DataFile:
    """File that holds some of the samples.

    Attributes:
        path: relative to the manifest, with forward slashes.
        split: "train", "val", or another name.
        bytes: its size.
        checksum: of all its bytes: "crc32c:" and 8 hexadecimal digits, or 8 digits alone for the
            CRC-32 of manifests of version 1; empty if none was computed.
        offsets: start of each sample in the file's array, (depth, height, width) in voxels.
        means: mean of each sample over all its voxels and channels; empty if not known.
        extents: voxels of its samples along depth, height and width, if they differ from those of
            the data set.
    """

    path: str
    split: str
    bytes: int
    checksum: str
    offsets: tuple[tuple[int, int, int], ...]
    means: tuple[float, ...] = ()
    extents: tuple[int, int, int] | None = None


def kind_of(checksum: str) -> str:
    """Returns which of `CHECKSUMS` a file's checksum is."""
    if not checksum:
        return ""
    return "crc32c" if checksum.startswith("crc32c:") else "crc32"


def checked_path(path: str) -> str:
    """Returns the normal form of a path; raises `ValueError` if it leads out of its folder."""
    found = PurePosixPath(path)
    if found.is_absolute() or ".." in found.parts or "\0" in path:
        raise ValueError(f"path {path!r} leads out of the data set's folder")
    return str(found)


def parsed_checksum(checksum: str) -> tuple[int, int]:
    """Returns kind and value of a checksum; raises `ValueError` if it is none."""
    kind = kind_of(checksum)
    digits = checksum.removeprefix("crc32c:")
    if kind and (len(digits) != 8 or not set(digits) <= set("0123456789abcdef")):
        raise ValueError(f"checksum {checksum!r}")
    return CHECKSUMS.index(kind), int(digits or "0", 16)
