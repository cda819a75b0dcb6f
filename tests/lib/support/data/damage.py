"""What happens to files, and to runs that make them."""

from __future__ import annotations

from pathlib import Path

import h5py


def flip_bit(path: Path, dataset: str) -> None:
    """Changes a value of a contiguous HDF5 dataset where it lies, as a disk does it."""
    with h5py.File(path) as file:
        offset = file[dataset].id.get_offset()
    raw = bytearray(path.read_bytes())
    raw[offset] ^= 1
    path.write_bytes(raw)


def interrupt_at_the_end(done: int, total: int, what: str) -> None:
    """A listener that interrupts the making of a data set when its last file is there."""
    if done == total:
        raise KeyboardInterrupt
