"""Whether several threads of one process read blocks faster than one.

Blocks (half of the depth) of 4-channel samples are read by 1, 2 and 4 threads, from HDF5, NumPy and
Zarr: each thread has a `ShardDataset` of its own, so that no lock of pydist is between them, and
opens a file for each read, as in a data set with more files than stay open. Once with the files in
the page cache as they are, and once with a delay before each read and each look-up of a path, for a
shared file system (`--delay`, microseconds; slow_files.py). Memory-mapped reads of NumPy files have
no read call, so only their look-ups are delayed.

    python benchmarks/python/reading_threads.py                about 2 minutes
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import common
import slow_files
import torch

from pydist.data import ShardDataset, UniverseOptions, generate_universes
from pydist.data.convert import convert_dataset
from pydist.data.options import ConvertOptions
from pydist.partition import Box

THREADS = (1, 2, 4)
STORAGES = {
    "hdf5": ConvertOptions("hdf5"),
    "numpy": ConvertOptions("numpy"),
    "zarr": ConvertOptions("zarr", chunks=(32, 32, 32), compression="zstd"),
}


def main() -> None:
    parser = common.parser(__doc__, rounds=3)
    parser.add_argument("--width", type=int, default=64, help="edge of the cube (64)")
    parser.add_argument("--count", type=int, default=8, help="files (8)")
    parser.add_argument("--reads", type=int, default=32, help="blocks in a round (32)")
    parser.add_argument("--delay", type=float, default=500, help="of a call, in us (500)")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.width, options.count, options.reads, options.rounds = 16, 2, 4, 2
    if options.child:
        print(json.dumps(times(options.child, options)))
        return
    rows = []
    with tempfile.TemporaryDirectory() as name:
        root = Path(name).resolve()
        sizes = {"width": options.width, "box_width": options.width}
        generate_universes(
            root / "source", UniverseOptions(count=options.count, validation=0, **sizes)
        )
        for storage, convert in STORAGES.items():
            convert_dataset(root / "source", root / storage, convert)
            for delay in (0.0, options.delay):
                rows += measured(root, storage, delay, options)
    common.show(
        ("storage", "delay, us", "readers", "blocks/s", "over one"),
        [
            (r["storage"], r["delay_us"], r["readers"], r["blocks_per_s"], r["over_one"])
            for r in rows
        ],
    )
    setting = {"width": options.width, "reads": options.reads}
    result = {"machine": common.machine(), **setting, "rows": rows}
    common.write(result, "reading_threads", options)


def measured(
    root: Path, storage: str, delay: float, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Times all numbers of readers in a process for which the files are slow."""
    command = [sys.executable, __file__, "--child", str(root / storage)]
    command += ["--reads", str(options.reads), "--rounds", str(options.rounds)]
    command += ["--width", str(options.width)]
    variables = slow_files.environment(root, root / storage, delay, delay)
    ended = subprocess.run(command, env=variables, check=True, stdout=subprocess.PIPE)
    rows = []
    for readers, seconds in json.loads(ended.stdout).items():
        summary = common.summary(seconds)
        rows.append(
            {
                "storage": storage, "delay_us": delay, "readers": readers,
                "blocks_per_s": options.reads / summary["median"], **summary,
            }
        )  # fmt: skip
    for row in rows:
        row["over_one"] = rows[0]["median"] / row["median"]
    return rows


def times(folder: Path, options: argparse.Namespace) -> dict[str, list[float]]:
    """Returns the seconds of each number of readers by round; in the child process."""
    torch.set_num_threads(1)
    contestants = {
        f"{count} thread{'s' * (count > 1)}": partial(by_threads, folder, count, options.reads)
        for count in THREADS
    }
    for step in contestants.values():
        step()  # imports, and the first opens
    return {name: [step() for _ in range(options.rounds)] for name, step in contestants.items()}


def by_threads(folder: Path, count: int, reads: int) -> float:
    """Reads blocks by threads; returns the seconds from their start to the last end."""
    barrier = threading.Barrier(count + 1, timeout=60)
    threads = [
        threading.Thread(target=read, args=(folder, number, count, reads, barrier))
        for number in range(count)
    ]
    for thread in threads:
        thread.start()
    barrier.wait()
    began = time.perf_counter()
    for thread in threads:
        thread.join()
    return time.perf_counter() - began


def read(folder: Path, number: int, count: int, reads: int, barrier: Any) -> None:
    """Reads one reader's part of the blocks."""
    data = ShardDataset(folder)
    channels, depth, height, width = data.sample_shape
    box = Box((0, 0, 0, 0), (channels, depth // 2, height, width))
    out = torch.empty((channels, depth // 2, height, width), dtype=torch.int16)
    barrier.wait()
    for index in range(number, reads, count):
        data.read_stored(index % len(data), box, out)
        data.close()


if __name__ == "__main__":
    main()
