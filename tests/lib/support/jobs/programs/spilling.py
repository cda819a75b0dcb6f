"""Runs of loaders with samples on disk, in processes that have no room on disk.

Usage: spilling.py FOLDER BYTES

Makes the batches of files with files of at most so many bytes. Prints the hit rate. See
tests/data/store/test_disk_faults.py; `tools/kills` kills such runs.
"""

from __future__ import annotations

import hashlib
import json
import resource
import sys
from pathlib import Path
from typing import Any

from pydist.comm import Transport, run_local
from pydist.data import Loader
from pydist.mesh import Mesh
from support.data.stored import Stored

SAMPLES, EPOCHS = 24, 3


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
            for batch in loader.batches(epoch):
                digest.update(batch.inputs.to_local().numpy().tobytes())
                digest.update(batch.targets.numpy().tobytes())
            if loader.store is not None:
                rate = loader.store.counted().over(transport).hit_rate
    return digest.hexdigest(), source.bytes_read, rate


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
    full(Path(sys.argv[1]), int(sys.argv[2]))
