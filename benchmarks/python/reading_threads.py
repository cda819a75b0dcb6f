"""Whether several threads of a loader read samples faster than one.

A loader with `readers` = 1, 2 and 4 reads samples of 4 channels from HDF5, NumPy and Zarr files,
and opens a file for each read, as in a data set with more files than stay open. Once with the files
in the page cache as they are, and once with a delay before each read and each look-up of a path,
for a shared file system (`--delay`, microseconds; slow_files.py). Memory-mapped reads of NumPy
files have no read call, so only their look-ups are delayed.

    python benchmarks/python/reading_threads.py                about 2 minutes
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import common
import slow_files
import torch

from pydist.comm import LocalTransport
from pydist.data import Loader, ShardDataset, UniverseOptions, generate_universes
from pydist.data.convert import convert_dataset
from pydist.data.options import ConvertOptions
from pydist.mesh import Mesh

READERS = (1, 2, 4)
STORAGES = {
    "hdf5": ConvertOptions("hdf5"),
    "numpy": ConvertOptions("numpy"),
    "zarr": ConvertOptions("zarr", chunks=(32, 32, 32), compression="zstd"),
}


def main() -> None:
    parser = common.parser(__doc__, rounds=3)
    parser.add_argument("--width", type=int, default=64, help="edge of the cube (64)")
    parser.add_argument("--count", type=int, default=8, help="files (8)")
    parser.add_argument("--epochs", type=int, default=8, help="of a round (8)")
    parser.add_argument("--delay", type=float, default=500, help="of a call, in us (500)")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.width, options.count, options.epochs, options.rounds = 16, 2, 2, 2
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
        ("storage", "delay, us", "readers", "samples/s", "over one"),
        [
            (r["storage"], r["delay_us"], r["readers"], r["samples_per_s"], r["over_one"])
            for r in rows
        ],
    )
    setting = {"width": options.width, "files": options.count}
    result = {"machine": common.machine(), **setting, "rows": rows}
    common.write(result, "reading_threads", options)


def measured(
    root: Path, storage: str, delay: float, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Times all numbers of readers in a process for which the files are slow."""
    command = [sys.executable, __file__, "--child", str(root / storage)]
    command += ["--epochs", str(options.epochs), "--rounds", str(options.rounds)]
    variables = slow_files.environment(root, root / storage, delay, delay)
    ended = subprocess.run(command, env=variables, check=True, stdout=subprocess.PIPE)
    rows = []
    for readers, seconds in json.loads(ended.stdout).items():
        summary = common.summary(seconds)
        rows.append(
            {
                "storage": storage, "delay_us": delay, "readers": readers,
                "samples_per_s": options.count * options.epochs / summary["median"], **summary,
            }
        )  # fmt: skip
    for row in rows:
        row["over_one"] = rows[0]["median"] / row["median"]
    return rows


def times(folder: Path, options: argparse.Namespace) -> dict[int, list[float]]:
    """Returns the seconds of each number of readers by round; in the child process."""
    torch.set_num_threads(1)
    seconds: dict[int, list[float]] = {readers: [] for readers in READERS}
    for number in range(options.rounds + 1):
        for readers in READERS:
            took = by_readers(folder, readers, options.epochs)
            if number:  # in the first round modules are imported
                seconds[readers].append(took)
    return seconds


def by_readers(folder: Path, readers: int, epochs: int) -> float:
    """Reads epochs of single samples with a new loader, opening a file for each; returns seconds.

    Samples of the epoch after them, which are read ahead, compete with the last ones.
    """
    data = ShardDataset(folder, open_files=1)
    with Loader(data, Mesh(LocalTransport()), 1, readers=readers) as loader:
        began = time.perf_counter()
        for epoch in range(epochs):
            for _ in loader.batches(epoch):
                pass
        return time.perf_counter() - began


if __name__ == "__main__":
    main()
