"""Runs of a store with samples on disk, compared with files, and the program that is killed."""

from __future__ import annotations

import math
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydist.comm import Transport, run_local
from pydist.data import Batch, Loader
from pydist.data.store.figures import Figures
from pydist.mesh import Mesh
from support import LIBRARY
from support.data.stored import Stored, seen
from support.jobs.children import run_python
from support.jobs.programs import path_of

SIZE = 320
"""Bytes of an entry: 2 x 5 x 3 x 4 int16, 8 bytes of targets and a mark, in steps of 64."""
MESHES = [(1, 1, 1), (2, 1, 1), (3, 1, 1), (2, 2, 1), (1, 1, 2), (2, 1, 2)]
"""Sample groups, parts of the depth, and of the channels."""


@dataclass(frozen=True)
class Run:
    """Configuration of a run, which is equal on all ranks: data set, mesh and store limits."""

    samples: int = 11
    batch: int = 4
    mesh: tuple[int, int, int] = (2, 1, 1)
    labeled: bool = False
    mixed: bool = False
    training: bool = True
    memory: int | None = SIZE
    disk: int = 10**6
    codec: str = "raw"
    reuse: bool = False
    preload: bool = False
    prefetch: int = 2
    bad: tuple[int, ...] = ()

    @property
    def ranks(self) -> int:
        return math.prod(self.mesh)

    def source(self) -> Stored:
        return Stored(self.samples, labeled=self.labeled, mixed=self.mixed, bad=self.bad)

    def loader(self, source: Stored, transport: Transport, folder: Path | None = None) -> Loader:
        data, depth, channel = self.mesh
        mesh = Mesh(transport, data, (depth, 1, 1), 5, axes={"channel": channel})
        store: dict[str, Any] = {}
        if folder is not None:
            store = {
                "store": "memory", "store_memory": self.memory, "store_disk": self.disk,
                "store_folder": folder, "store_codec": self.codec, "store_reuse": self.reuse,
                "store_preload": self.preload,
            }  # fmt: skip
        return Loader(
            source, mesh, self.batch, training=self.training, prefetch=self.prefetch, pad=False,
            **store,
        )  # fmt: skip


def batches_of(loader: Loader, training: bool, epochs: int = 3) -> Iterator[Batch]:
    for epoch in range(epochs):
        yield from loader.batches(epoch if training else 0)


def epochs_of(run: Run, transport: Transport, folder: Path | None, epochs: int = 3) -> list[Any]:
    """Returns all batches of some epochs, and figures and reads of files by epoch."""
    source = run.source()
    found: list[Any] = []
    with run.loader(source, transport, folder) as loader:
        for epoch in range(epochs):
            number = epoch if run.training else 0
            batches = [seen(batch) for batch in loader.batches(number)]
            figures = None if loader.store is None else loader.store.counted().over(transport)
            found.append((batches, figures, source.bytes_read))
    return found


def compare(run: Run, folder: Path, epochs: int = 3) -> list[list[tuple[Figures, int]]]:
    """Compares batches with those of files on all ranks; returns figures, and bytes of files."""

    def job(transport: Transport) -> list[tuple[Figures, int]]:
        expected = epochs_of(run, transport, None, epochs)
        found = epochs_of(run, transport, folder, epochs)
        assert [each[0] for each in found] == [each[0] for each in expected]
        return [each[1:] for each in found]

    return run_local(job, run.ranks, timeout=120)


def run_program(folder: Path, nbytes: int) -> subprocess.CompletedProcess[str]:
    """Runs `support/jobs/programs/spilling.py`, which must succeed."""
    command = path_of("spilling"), folder, str(nbytes)
    done = run_python(*command, folder=folder, path=[LIBRARY], seconds=280)
    assert done.returncode == 0, done.stderr
    return done
