"""Compares packs with their checksums."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from pydist._loader import native
from pydist.errors import DataError
from pydist.packs.tree import shown

Progress = Callable[[int, int, str], None]
"""Called with (bytes done, bytes in total, the latest file)."""


def is_pack(folder: str | Path) -> bool:
    """Returns whether a folder has the index of a pack."""
    return Path(folder, native.PACK_INDEX).is_file()


def verify(folder: str | Path, progress: Progress | None = None) -> list[str]:
    """Reads every file of a pack and compares all checksums: before and after compression.

    Returns:
        One line for each partition that is missing or not the index's, and for each file that is
        damaged; empty if there is none.

    Raises:
        DataError: the index is missing or damaged.
    """
    pack = native.PackFolder(os.fsencode(folder))
    pack.check_index()
    faults = []
    bad = set()
    for partition in range(pack.partitions):
        try:
            pack.check_partition(partition)
        except DataError as error:
            faults.append(str(error))
            bad.add(partition)
    places = []
    for number in pack.files(0):
        entry = pack.entry(number)
        places.append((entry.partition, entry.offset, entry.stored_size, number))
    places.sort()  # files are read in the order of the disk
    total = sum(size for _, _, size, _ in places)
    done = 0
    for partition, _, size, number in places:
        done += size
        if partition in bad:
            continue
        try:
            pack.check_file(number)
        except DataError as error:
            faults.append(str(error))
        if progress:
            progress(done, total, shown(pack.path(number)))
    return faults
