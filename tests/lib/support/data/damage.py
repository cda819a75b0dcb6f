"""Damage to files, and interruptions of runs that make them."""

from __future__ import annotations

from pathlib import Path

import h5py


def flip(path: Path, at: int) -> None:
    """Flips a bit of the byte at a place in a file; the second call restores it."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


def flip_bit(path: Path, dataset: str) -> None:
    """Flips a bit of a contiguous HDF5 dataset in its file, like a faulty disk."""
    with h5py.File(path) as file:
        offset = file[dataset].id.get_offset()
    flip(path, offset)


def interrupt_at_the_end(done: int, total: int, what: str) -> None:
    """Interrupts the making of a data set when its last file exists; a listener."""
    if done == total:
        raise KeyboardInterrupt
