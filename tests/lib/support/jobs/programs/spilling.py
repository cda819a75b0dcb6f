"""Runs of loaders with samples on disk, in processes that are killed or have no room on disk.

Usage: spilling.py kill FOLDER KILLS
       spilling.py full FOLDER BYTES

"kill" kills processes at random instants and at each renaming of a file. After each kill, what is
on disk has to be whole, and now and then a run that is not killed has to make the batches of
files. Prints how often a kill has left a pack, and the runs that read no file.

"full" makes the batches of files with files of at most so many bytes. Prints the hit rate.

See tests/data/store/test_killed.py and test_disk_faults.py.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import random
import resource
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from pydist.comm import Transport, run_local
from pydist.data import Loader
from pydist.mesh import Mesh
from pydist.packs.verifying import is_pack, verify
from support.data.stored import Stored

SAMPLES, EPOCHS = 24, 3
RENAMINGS = 2 * 2 * 2
"""Before and after each, of a partition and an index, by 2 ranks, in the first epoch."""


def work(
    transport: Transport, folder: Path | None, reuse: bool = True, limit: int = -1
) -> tuple[str, int, float]:
    """Returns the digest of all batches, the bytes read from files, and the latest hit rate.

    Args:
        transport: of 2 ranks.
        folder: the store's; None for no store.
        reuse: whether blocks stay there.
        limit: largest size of files that are written; -1 for none.
    """
    source, digest, rate = Stored(SAMPLES), hashlib.sha256(), 0.0
    store: dict[str, Any] = {} if folder is None else {
        "store": "memory", "store_memory": 2000, "store_disk": 10**6, "store_folder": folder,
        "store_codec": "lz4", "store_reuse": reuse,
    }  # fmt: skip
    with Loader(source, Mesh(transport, 2, seed=3), 4, **store) as loader:
        transport.barrier()  # starting the ranks needs larger files
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        for epoch in range(EPOCHS):
            for batch in loader.epoch(epoch):
                digest.update(batch.inputs.to_local().numpy().tobytes())
                digest.update(batch.targets.numpy().tobytes())
            if loader.store is not None:
                rate = loader.store.counted().over(transport).hit_rate
    return digest.hexdigest(), source.bytes_read, rate


def in_child(folder: Path | None, delay: float = 0, renaming: int = 0) -> list[list[object]] | None:
    """Works in a child process; returns its results, or None if it was killed."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)
        _kill_at(renaming)
        found = run_local(work, 2, folder)
        os.write(writes, json.dumps(found).encode())
        os._exit(0)
    os.close(writes)
    if delay > 0:
        time.sleep(delay)
        os.kill(child, signal.SIGKILL)
    with os.fdopen(reads, "rb") as pipe:
        content = pipe.read()
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, status
    return json.loads(content) if content else None


def _kill_at(renaming: int) -> None:
    steps = itertools.count(1)
    rename = Path.replace

    def replace(path: Path, target: Path) -> Path:
        for is_done in (False, True):
            if is_done:
                rename(path, target)
            if next(steps) == renaming:
                os.kill(os.getpid(), signal.SIGKILL)
        return Path(target)

    Path.replace = replace  # type: ignore[method-assign, assignment]


def packs_in(folder: Path) -> int:
    """Returns the number of packs, all of which must be whole."""
    packs = [path for path in folder.iterdir() if is_pack(path)]
    for path in packs:
        assert verify(path) == []
    return len(packs)


def start_anew(folder: Path) -> None:
    """Removes packs, and keeps what else was left."""
    for pack in filter(is_pack, folder.iterdir()):
        for path in pack.iterdir():
            path.unlink()


def kill(folder: Path, kills: int) -> None:
    chance, counts = random.Random(5), Counter[str]()
    expected = in_child(None)
    assert expected is not None
    began = time.monotonic()
    whole = in_child(folder)
    seconds = time.monotonic() - began
    assert whole is not None
    renaming = 0
    while counts["kills"] < kills:
        if chance.random() < 0.7:
            start_anew(folder)
        if renaming < RENAMINGS:
            start_anew(folder)
            renaming += 1
            killed = in_child(folder, renaming=renaming) is None
            assert killed
        else:
            killed = in_child(folder, delay=chance.uniform(0.01, 1.1) * seconds) is None
        counts["kills"] += killed
        counts[f"{packs_in(folder)} packs left"] += killed
        if counts["kills"] % 8 == 0:
            found = in_child(folder)
            assert found is not None
            assert [each[0] for each in found] == [each[0] for each in expected]
            counts["runs"] += 1
            assert packs_in(folder) == 2
            found = in_child(folder)
            assert found is not None
            assert [each[:2] for each in found] == [[each[0], 0] for each in expected]
    print(json.dumps(counts))


def full(folder: Path, nbytes: int) -> None:
    expected = run_local(work, 2, None)
    rates = []
    for reuse in (False, True, True):
        found = run_local(work, 2, folder, reuse, nbytes)
        resource.setrlimit(resource.RLIMIT_FSIZE, (-1, resource.RLIM_INFINITY))
        assert [each[0] for each in found] == [each[0] for each in expected]
        rates.append(found[0][2])
    print(json.dumps(rates))


if __name__ == "__main__":
    {"kill": kill, "full": full}[sys.argv[1]](Path(sys.argv[2]), int(sys.argv[3]))
