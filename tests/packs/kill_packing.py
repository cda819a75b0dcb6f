"""Kills processes that pack a folder, at random instants and at each renaming; see test_killed.py.

Usage: kill_packing.py SOURCE FOLDER KILLS

After each kill the folder must have a whole pack or none. Prints the kills by what they left.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from pathlib import Path

from pydist.data.lock import FILE_NAME
from pydist.packs.verifying import is_pack, verify
from pydist.packs.writing import PackOptions, pack

PARTITIONS = 6
OPTIONS = PackOptions(partitions=PARTITIONS, codec="zstd")


def packed_in_child(source: str, folder: str, delay: float = 0, renaming: int = 0) -> bool:
    """Packs in a child process; returns whether it was killed.

    Args:
        source: the folder to pack.
        folder: the folder of the pack.
        delay: seconds after which the child is killed; 0 for never.
        renaming: kills it before its first renaming of a file (1), after it (2), before the second
            one (3), and so on; 0 for never.
    """
    child = os.fork()
    if child == 0:
        _kill_at(renaming)
        pack(source, folder, OPTIONS)
        os._exit(0)
    until = time.monotonic() + delay
    while delay > 0 and os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if time.monotonic() > until:
            os.kill(child, signal.SIGKILL)
            break
        time.sleep(0.001)
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, status
    return os.WIFSIGNALED(status)


def _kill_at(renaming: int) -> None:
    steps = itertools.count(1)
    rename = Path.replace

    def replace(path: Path, target: Path) -> None:
        for step in (lambda: None, lambda: rename(path, target)):
            step()
            if next(steps) == renaming:
                os.kill(os.getpid(), signal.SIGKILL)

    Path.replace = replace  # type: ignore[method-assign, assignment]


def left_in(folder: Path) -> str:
    """Says how far a killed run came."""
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if is_pack(folder):
        return "index"
    if any(name.startswith("part-") for name in names):
        return "partitions"
    if any(name.startswith(".part-") for name in names):
        return "temporary files"
    return "lock" if FILE_NAME in names else "nothing"


def start_anew(folder: Path) -> None:
    """Checks a pack that is whole, and removes it; keeps what else was left."""
    if is_pack(folder):
        assert verify(folder) == []
        for path in folder.iterdir():
            path.unlink()


def main() -> None:
    source, name, kills = sys.argv[1], sys.argv[2], int(sys.argv[3])
    folder, chance, left = Path(name), random.Random(11), Counter[str]()
    began = time.monotonic()
    packed_in_child(source, name)
    whole = time.monotonic() - began
    for renaming in range(1, 2 * (PARTITIONS + 1) + 1):
        start_anew(folder)
        assert packed_in_child(source, name, renaming=renaming)
        left[left_in(folder)] += 1
        assert is_pack(folder) == (renaming == 2 * (PARTITIONS + 1))
    while left.total() < kills:
        start_anew(folder)
        # A run that takes an abandoned lock waits first (see pydist/data/lock.py).
        wait = 0.2 if (folder / FILE_NAME).exists() else 0.0
        began = time.monotonic()
        if packed_in_child(source, name, delay=wait + chance.uniform(0.01, 1.1) * whole):
            left[left_in(folder)] += 1
        else:  # the machine may have been busier when the first run was measured
            whole = min(whole, time.monotonic() - began)
    packed_in_child(source, name)
    assert verify(folder) == []
    print(json.dumps(left))


if __name__ == "__main__":
    main()
