"""Tests of the files of a spill, and of the threads that share it."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pydist.data.store.disk import Disk
from pydist.data.store.entry import Entry, EntryFormat
from pydist.data.store.lasting import LastingSpill
from pydist.data.store.spill import Spill

FORMAT = EntryFormat((1, 2, 2, 2), torch.float32, (3,), torch.float32)


def entry_of(value: float) -> Entry:
    entry = Entry(FORMAT)
    entry.block.fill_(value)
    entry.targets.fill_(value)
    entry.approve()
    return entry


def test_an_entry_that_is_replaced_while_it_is_written(tmp_path: Path) -> None:
    """A batch is dropped and ordered again: the store forgets a sample, and puts it once more."""

    class Interrupted(Spill):
        def write(self, sample: int, block: Tensor) -> None:
            super().write(sample, block)
            if not others:
                disk.forget(sample)
                others.append(entry_of(2))
                disk.put(sample, others[0])

    others: list[Entry] = []
    disk = Disk(Interrupted(tmp_path, "raw", 1), lambda _: FORMAT, 1 << 20, pytest.fail)
    disk.put(5, entry_of(1))
    until = time.monotonic() + 10
    while not others or disk.leaving_bytes:
        assert time.monotonic() < until
        time.sleep(0.001)
    found = disk.find(5)
    assert found is not None
    assert found.memory.equal(others[0].memory)
    assert disk.lost == 0
    disk.close(None)


def test_blocks_are_forgotten_while_others_are_published(tmp_path: Path) -> None:
    count = 4000
    spill = LastingSpill(
        tmp_path, "raw", 1, {"samples": count}, lambda _: FORMAT.nbytes, 1 << 20, pytest.fail
    )
    for sample in range(count):
        spill.write(sample, entry_of(sample).memory)
    forgetting = threading.Thread(target=lambda: [spill.forget(n) for n in range(count - 1, 0, -1)])
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        forgetting.start()
        spill.publish()
        forgetting.join()
    finally:
        sys.setswitchinterval(interval)
    assert spill.samples == [0]
    spill.close()
