"""Makes the calls of FanStore's ResNet-50 run, scaled down, on a loose folder and on its pack.

That run (64 processes, 90 epochs, 1.3 million files of 108 KB in 2,002 folders) made 128 thousand
stat and readdir (each process lists all folders at its start), 117 million stat, open and close (a
file once an epoch), and 180 million reads (1.54 per file). Here each of `--processes` processes
lists all folders, with a stat of each, and then for each epoch takes its share of a new random
order: stat, open, one or two reads, close. The program is the same for

- folder: the loose files;
- pack: the pack by `pydist store exec`, the program unchanged. The first epoch copies the files
  into memory, where they stay as far as `--cache` permits.

Both are measured with the files in the page cache, and with a delay before each call that looks a
path up (`--delay`, microseconds; slow_files.py), for a shared file system.

    python benchmarks/python/resnet_mix.py                     about 2 minutes
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import common
import numpy as np
import slow_files

from pydist.cli.mounting import mounted
from pydist.packs import pack

FILE_BYTES = 108_000
READ = 70_000
"""Bytes of a read: 1.54 reads a file, for sizes from 36 to 180 KB."""


def main() -> None:
    parser = common.parser(__doc__, rounds=3)
    parser.add_argument("--files", type=int, default=3250, help="number of files (3250)")
    parser.add_argument("--folders", type=int, default=20, help="number of folders (20)")
    parser.add_argument("--epochs", type=int, default=3, help="epochs (3)")
    parser.add_argument("--processes", type=int, default=4, help="reading processes (4)")
    parser.add_argument("--delay", type=float, default=200, help="of a look-up, in us (200)")
    parser.add_argument("--cache", default="1GiB", help="of copies that stay in memory (1GiB)")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.files, options.folders, options.epochs, options.rounds = 60, 3, 2, 2
    if options.child:
        print(json.dumps(train(options.child, options.epochs, options.processes)))
        return
    with tempfile.TemporaryDirectory() as name:
        rows = measured(Path(name).resolve(), options)
    common.show(
        ("what", "delay, us", "calls/s", "files/s", "MB/s", "over folder", "reads per file"),
        [
            (
                r["what"], r["delay_us"], r["calls_per_s"], r["files_per_s"], r["mb_per_s"],
                r["over_folder"], r["reads"] / r["opens"],
            )
            for r in rows
        ],
    )  # fmt: skip
    names = ("files", "folders", "epochs", "processes", "cache")
    setting = {name: getattr(options, name) for name in names}
    common.write({"machine": common.machine(), **setting, "rows": rows}, "resnet_mix", options)


def measured(root: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Makes the files and the pack, and runs the program on both in turns."""
    source = np.random.default_rng(0)
    content = source.integers(0, 256, 1 << 18, np.uint8).tobytes()
    sizes = source.integers(FILE_BYTES // 3, 5 * FILE_BYTES // 3, options.files).tolist()
    for number, size in enumerate(sizes):
        path = root / "shared" / "source" / f"{number % options.folders:04}" / f"{number:07}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content[number % 50_000 :][:size])
    pack(root / "shared" / "source", root / "shared" / "pack")
    delays = (options.delay,) if options.quick else (0.0, options.delay)
    found: dict[tuple[str, float], list[Any]] = {
        (what, delay): [] for delay in delays for what in ("folder", "pack")
    }
    order = random.Random(0)
    for _ in range(options.rounds):
        for what, delay in order.sample(list(found), len(found)):
            found[what, delay].append(child(root, what, delay, options))
    counts = [[each[k] for k in ("opens", "reads", "bytes")] for v in found.values() for each in v]
    if any(each != counts[0] for each in counts):
        raise SystemExit(f"resnet_mix: the runs read different bytes: {counts}")
    rows = []
    for (what, delay), results in found.items():
        summary = common.summary([each["seconds"] for each in results])
        first = {name: count for name, count in results[0].items() if name != "seconds"}
        rows.append(
            {
                "what": what, "delay_us": delay, **first,
                "calls_per_s": (first["stats"] + 2 * first["opens"] + first["reads"])
                / summary["median"],
                "files_per_s": first["opens"] / summary["median"],
                "mb_per_s": first["bytes"] / summary["median"] / 1e6, **summary,
            }
        )  # fmt: skip
    for row in rows:
        folder = next(r for r in rows if (r["what"], r["delay_us"]) == ("folder", row["delay_us"]))
        row["over_folder"] = folder["median"] / row["median"]
    return rows


def child(root: Path, what: str, delay: float, options: argparse.Namespace) -> Any:
    """Runs the program on the folder or the pack, for which the folder "shared" is slow."""
    shared = root / "shared"
    where = root / "mount" if what == "pack" else shared / "source"
    command = [sys.executable, __file__, "--child", str(where)]
    command += ["--epochs", str(options.epochs), "--processes", str(options.processes)]
    with ExitStack() as stack:
        base = dict(os.environ)
        if what == "pack":
            pack_there = str(shared / "pack")
            base = stack.enter_context(mounted(str(where), pack_there, cache=options.cache))
        variables = slow_files.environment(root, shared, delay, base=base)
        ended = subprocess.run(command, env=variables, check=True, stdout=subprocess.PIPE)
    return json.loads(ended.stdout)


def train(root: Path, epochs: int, processes: int) -> dict[str, float]:
    """Runs the processes; returns the seconds from first start to last end, and the calls."""
    context = multiprocessing.get_context("fork")
    barrier, queue = context.Barrier(processes), context.SimpleQueue()
    started = [
        context.Process(target=process, args=(root, epochs, number, processes, barrier, queue))
        for number in range(processes)
    ]
    for each in started:
        each.start()
    found: list[dict[str, float]] = [queue.get() for _ in started]
    for each in started:
        each.join()
    seconds = max(f["end"] for f in found) - min(f["begin"] for f in found)
    calls = ("lists", "stats", "opens", "reads", "bytes")
    return {"seconds": seconds, **{name: sum(f[name] for f in found) for name in calls}}


def process(root: Path, epochs: int, number: int, processes: int, barrier: Any, queue: Any) -> None:
    """Makes one process's calls, and reports how many."""
    counts = dict.fromkeys(("lists", "stats", "opens", "reads", "bytes"), 0)
    barrier.wait(60)
    began = time.monotonic()
    paths = []
    for folder in sorted(Path(root).iterdir()):
        folder.stat()
        paths += sorted(map(str, folder.iterdir()))
        counts["lists"] += 1
        counts["stats"] += 1
    for epoch in range(epochs):
        order = random.Random(epoch).sample(paths, len(paths))
        for path in order[number::processes]:
            size = os.stat(path).st_size  # noqa: PTH116
            file = os.open(path, os.O_RDONLY)
            left = size
            while left > 0:
                left -= len(os.read(file, READ if left > 2 * READ else left))
                counts["reads"] += 1
            os.close(file)
            counts["stats"] += 1
            counts["opens"] += 1
            counts["bytes"] += size
    queue.put({"begin": began, "end": time.monotonic(), **counts})


if __name__ == "__main__":
    main()
