"""Tests that a DataLoader's workers, forked or started anew, read a mounted pack."""

from __future__ import annotations

import sys
from pathlib import Path

from support.mounts import Case


def test_workers_read_the_same(case: Case) -> None:
    program = Path(__file__).with_name("workers.py")
    loose = case.loose(sys.executable, program)
    assert loose.endswith(b"exit code 0"), loose.decode()
    assert case.packed(sys.executable, program, large="1MB").decode() == loose.decode()
