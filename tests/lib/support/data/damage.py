"""Damage to files, and interruptions of runs that make them."""

from __future__ import annotations

from pathlib import Path

import h5py


def flip_bit(path: Path, dataset: str) -> None:
    """Flips a bit of a contiguous HDF5 dataset in its file, like a faulty disk."""
    with h5py.File(path) as file:
        offset = file[dataset].id.get_offset()
    raw = bytearray(path.read_bytes())
    raw[offset] ^= 1
    path.write_bytes(raw)


def interrupt_at_the_end(done: int, total: int, what: str) -> None:
    """Interrupts the making of a data set when its last file exists; a listener."""
    if done == total:
        raise KeyboardInterrupt
