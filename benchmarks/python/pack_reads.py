"""Measures reads of files from a pack by 1, 2 and 4 processes, for the sizes of FanStore's figures.

Files of 128 KB, 512 KB, 2 MB and 8 MB are read in a random order by `PackFiles`: stored raw, and
compressed (zstd; half of each file is random, half of it zeros, so that it shrinks by two). Each
process reads its part of the files twice, in an epoch after the other: in the first one it maps
what it reads, and gets its memory. The time is that from the first start to the last end, with all
processes waiting for each other before it. Beside that: a process that reads the partitions from
start to end, twice as well (the bound for raw files in the same epoch), and as many loose files.
All processes are new. The files are in the page cache.

    python benchmarks/python/pack_reads.py                     about 3 minutes
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import common
import numpy as np
import small_files

from pydist.packs import PackFiles, PackOptions, pack

SIZES = {"128 KB": 128 << 10, "512 KB": 512 << 10, "2 MB": 2 << 20, "8 MB": 8 << 20}
PROCESSES = (1, 2, 4)
CODECS: tuple[Literal["raw", "zstd"], ...] = ("raw", "zstd")


def main() -> None:
    parser = common.parser(__doc__, rounds=5)
    parser.add_argument("--mb", type=int, default=256, help="of the files of one size (256)")
    options = parser.parse_args()
    if options.quick:
        options.mb, options.rounds = 16, 2
    rows: list[dict[str, Any]] = []
    for name, size in SIZES.items():
        with tempfile.TemporaryDirectory() as folder:
            rows += measured(name, size, Path(folder), options)
    report(rows)
    result = {"machine": common.machine(), "mb": options.mb, "rows": rows}
    common.write(result, "pack_reads", options)


def measured(name: str, size: int, root: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Times all readers of files of one size, in turns."""
    count = max(4, (options.mb << 20) // size)
    (root / "source").mkdir()
    source = np.random.default_rng(0)
    for number in range(count):
        content = source.integers(0, 256, size // 2, np.uint8).tobytes() + bytes(size - size // 2)
        (root / "source" / f"{number:06}").write_bytes(content)
    for codec in CODECS:
        pack(root / "source", root / codec, PackOptions(codec=codec))
    contestants: dict[str, Callable[[], list[float]]] = {
        "sequential 1": partial(together, root, "sequential", 1, count)
    }
    for processes in PROCESSES:
        for what in (*CODECS, "loose"):
            contestants[f"{what} {processes}"] = partial(together, root, what, processes, count)
    seconds: dict[tuple[str, int], list[float]] = {}
    order = random.Random(0)
    for _ in range(options.rounds):
        for each in order.sample(list(contestants), len(contestants)):
            for epoch, taken in enumerate(contestants[each](), 1):
                seconds.setdefault((each, epoch), []).append(taken)
    rows = []
    for each in contestants:
        for epoch in (1, 2):
            what, several = each.split()
            summary = common.summary(seconds[each, epoch])
            rows.append(
                {
                    "size": name, "what": what, "processes": int(several), "epoch": epoch,
                    "files_per_s": count / summary["median"],
                    "mb_per_s": count * size / summary["median"] / 1e6, **summary,
                }
            )  # fmt: skip
    bounds = {row["epoch"]: row["mb_per_s"] for row in rows if row["what"] == "sequential"}
    for row in rows:
        row["of_sequential"] = row["mb_per_s"] / bounds[row["epoch"]]
    return rows


def together(root: Path, what: str, processes: int, count: int) -> list[float]:
    """Reads all files by several processes; returns the seconds of each epoch."""
    context = multiprocessing.get_context("fork")
    barrier, queue = context.Barrier(processes), context.SimpleQueue()
    started = [
        context.Process(target=part, args=(root, what, number, processes, count, barrier, queue))
        for number in range(processes)
    ]
    for process in started:
        process.start()
    spans = [queue.get() for _ in started]
    for process in started:
        process.join()
    return [
        max(end for _, end in epoch) - min(began for began, _ in epoch)
        for epoch in zip(*spans, strict=True)
    ]


def part(
    root: Path, what: str, number: int, processes: int, count: int, barrier: Any, queue: Any
) -> None:
    """Reads one process's part twice, files in random orders; returns starts and ends."""
    paths = [f"{root}/source/{index:06}" for index in range(count)]
    partitions = sorted((root / "raw").glob("part-*"))
    files = PackFiles(root / what) if what in CODECS else None
    mine = list(range(number, count, processes))
    spans = []
    for epoch in range(2):
        random.Random(2 * number + epoch).shuffle(mine)
        barrier.wait(60)
        began = time.monotonic()
        if what == "sequential":
            for path in partitions:
                small_files.read_through(path)
        else:
            for index in mine:
                _ = loose(paths[index]) if files is None else files[index][1]
        spans.append((began, time.monotonic()))
    queue.put(spans)


def loose(path: str) -> bytes:
    """Reads an ordinary file."""
    with open(path, "rb", buffering=0) as file:  # noqa: PTH123
        return file.readall()


def report(rows: list[dict[str, Any]]) -> None:
    """Prints a line for each size, reader and number of processes."""
    common.show(
        ("size", "what", "processes", "epoch", "files/s", "MB/s", "of sequential"),
        [
            (
                r["size"], r["what"], r["processes"], r["epoch"], r["files_per_s"], r["mb_per_s"],
                r["of_sequential"],
            )
            for r in rows
        ],
    )  # fmt: skip


if __name__ == "__main__":
    main()
