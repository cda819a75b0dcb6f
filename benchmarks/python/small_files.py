"""Compares a pack of many small files with a folder, tar and zip, warm and on a shared file system.

Files of 1 to 128 kB (uniform in the logarithm) in 100 folders are read in a random order,

- folder: scandir, then stat, open and read of each file;
- pack, POSIX: the same program on the pack, by `pydist store exec`;
- pack, fsspec: `PackFileSystem`: find, then info and cat_file of each file;
- tar, zip (stored): tarfile and zipfile of Python, the directory first, then each file;
- pack, sequential: the partitions from start to end, as the bound.

Each reader is a process of its own, alone, with the files in the page cache: once as it is, and
once with a delay before each call that looks up a path (`--delay`, microseconds; slow_files.py),
for a shared file system. All readers must get the same bytes. The table also has the time to make
each of them from the folder, and the `stat` calls per second.

    python benchmarks/python/small_files.py                    about 3 minutes
    python benchmarks/python/small_files.py --files 100000     the full size
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import common
import numpy as np
import slow_files

from pydist.cli.mounting import mounted
from pydist.packs import PackFileSystem, PackOptions, pack

FOLDERS = 100
READERS = ("folder", "pack, POSIX", "pack, fsspec", "tar", "zip", "pack, sequential")
MADE = {"folder": "copy", "tar": "all.tar", "zip": "all.zip", "pack": "pack"}

Content = Callable[[str], bytes]


def main() -> None:
    parser = common.parser(__doc__, rounds=3)
    parser.add_argument("--files", type=int, default=20_000, help="number of files (20000)")
    parser.add_argument("--delay", type=float, default=200, help="of a look-up, in us (200)")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        do, what, where = options.child
        print(json.dumps({"make": make, "read": read}[do](what, Path(where))))
        return
    if options.quick:
        options.files, options.rounds = 200, 2
    with tempfile.TemporaryDirectory() as name:
        rows = measured(Path(name).resolve(), options)
    report(rows)
    setting = {"files": options.files, "delay_us": options.delay}
    common.write({"machine": common.machine(), **setting, "rows": rows}, "small_files", options)


def measured(root: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Makes the files, and times all makers and readers in turns, without and with the delay."""
    shared = root / "shared"
    sizes = write_files(shared / "source", options.files)
    rows = []
    delays = (options.delay,) if options.quick else (0.0, options.delay)
    for delay in delays:
        for what, name in MADE.items():
            remove(shared / name)
            seconds = child(root, "make", what, delay)["seconds"]
            rows.append(row("make", what, delay, [seconds], options.files, sum(sizes)))
    order = random.Random(0)
    for delay in delays:
        found: dict[str, list[dict[str, Any]]] = {what: [] for what in READERS}
        for _ in range(options.rounds):
            for what in order.sample(READERS, len(READERS)):
                found[what].append(child(root, "read", what, delay))
        said = {what: results[0]["said"] for what, results in found.items()}
        if len(set(map(str, (said[what] for what in READERS[:-1])))) > 1:
            raise SystemExit(f"small_files: the readers differ: {said}")
        for what, results in found.items():
            times = [each["seconds"] for each in results]
            made = row("read", what, delay, times, options.files, sum(sizes))
            stats = [each["stats_per_s"] for each in results if each["stats_per_s"]]
            made["stats_per_s"] = statistics.median(stats) if stats else None
            made["names_s"] = statistics.median(each["names_s"] for each in results)
            rows.append(made)
    for each in rows:
        same = [r for r in rows if (r["do"], r["delay_us"]) == (each["do"], each["delay_us"])]
        each["over_folder"] = same[0]["median"] / each["median"]
    return rows


def row(
    do: str, what: str, delay: float, seconds: list[float], files: int, nbytes: int
) -> dict[str, Any]:
    """Returns the result of one maker or reader."""
    summary = common.summary(seconds)
    return {
        "do": do, "what": what, "delay_us": delay, "files_per_s": files / summary["median"],
        "mb_per_s": nbytes / summary["median"] / 1e6, **summary,
    }  # fmt: skip


def child(root: Path, do: str, what: str, delay: float) -> Any:
    """Runs a maker or a reader in a process for which the folder "shared" is slow."""
    shared = root / "shared"
    places = {"pack, POSIX": root / "mount", "folder": shared / "source"}
    where = places.get(what, shared) if do == "read" else shared
    command = [sys.executable, __file__, "--child", do, what, str(where)]
    with ExitStack() as stack:
        base = dict(os.environ)
        if what == "pack, POSIX":
            base = stack.enter_context(mounted(str(root / "mount"), str(shared / "pack")))
        variables = slow_files.environment(root, shared, delay, base=base)
        ended = subprocess.run(command, env=variables, check=True, stdout=subprocess.PIPE)
    return json.loads(ended.stdout)


def write_files(folder: Path, count: int) -> list[int]:
    """Writes the files, and returns their sizes."""
    source = np.random.default_rng(0)
    content = source.integers(0, 256, 1 << 18, np.uint8).tobytes()
    sizes = np.exp(source.uniform(math.log(1e3), math.log(128e3), count)).astype(int).tolist()
    for number, size in enumerate(sizes):
        path = folder / f"{number % FOLDERS:03}" / f"{number:07}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content[number % 100_000 :][:size])
    return sizes


def remove(path: Path) -> None:
    """Removes a file or a folder, if it is there."""
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)


def make(what: str, shared: Path) -> dict[str, Any]:
    """Makes a copy, an archive or a pack of the folder; in the child process."""
    source, made = shared / "source", shared / MADE[what]
    began = time.perf_counter()
    if what == "pack":
        pack(source, made, PackOptions())
    elif what == "tar":
        with tarfile.open(made, "w") as archive:
            archive.add(source, ".")
    elif what == "zip":
        with zipfile.ZipFile(made, "w") as archive:
            for path in sorted(source.rglob("*.bin")):
                archive.write(path, path.relative_to(source))
    else:
        shutil.copytree(source, made)
    return {"seconds": time.perf_counter() - began}


def read(what: str, where: Path) -> dict[str, Any]:
    """Reads all files in a random order; in the child process."""
    began = time.perf_counter()
    stats_per_s, said = None, [0]
    if what == "pack, sequential":
        names_s, said = 0.0, [sum(map(read_through, sorted((where / "pack").glob("part-*"))))]
    else:
        found, content, status = opened(what, where)
        names = sorted(found)
        names_s = time.perf_counter() - began
        random.Random(1).shuffle(names)
        total = first = 0
        for name in names:
            data = content(name)
            total += len(data)
            first += int.from_bytes(data[:8], "little")
        said = [len(names), total, first]
    seconds = time.perf_counter() - began
    if what != "pack, sequential":
        began = time.perf_counter()
        for name in names[:10_000]:
            status(name)
        stats_per_s = min(len(names), 10_000) / (time.perf_counter() - began)
    return {"seconds": seconds, "names_s": names_s, "said": said, "stats_per_s": stats_per_s}


def opened(what: str, where: Path) -> tuple[Iterable[str], Content, Callable[[str], object]]:
    """Opens what is read: returns its files, and the functions that read one and its status."""
    if what == "pack, fsspec":
        packed = PackFileSystem(where / "pack")

        def of_pack(name: str) -> bytes:
            assert packed.info(name)["type"] == "file"
            return packed.cat_file(name)

        return packed.find(""), of_pack, packed.info
    if what == "tar":
        tar = tarfile.open(where / "all.tar")  # noqa: SIM115 -- open until the process ends
        members = {m.name.removeprefix("./"): m for m in tar.getmembers() if m.isfile()}

        def of_tar(name: str) -> bytes:
            file = tar.extractfile(members[name])
            assert file is not None
            return file.read()

        return members, of_tar, members.__getitem__
    if what == "zip":
        archive = zipfile.ZipFile(where / "all.zip")
        return archive.namelist(), archive.read, archive.getinfo

    def of_folder(name: str) -> bytes:
        path = f"{where}/{name}"
        os.stat(path)  # noqa: PTH116 -- as a fast loader does it
        with open(path, "rb", buffering=0) as file:  # noqa: PTH123
            return file.readall()

    def status(name: str) -> object:
        return os.stat(f"{where}/{name}")  # noqa: PTH116

    return listed(where), of_folder, status


def listed(where: Path) -> Iterable[str]:
    """Returns the files in the folders of a folder."""
    with os.scandir(where) as folders:
        for folder in folders:
            with os.scandir(folder.path) as entries:
                for entry in entries:
                    yield f"{folder.name}/{entry.name}"


def read_through(path: Path) -> int:
    """Reads a file from start to end, 4 MiB at a time into new memory, and returns its size."""
    total = 0
    with path.open("rb", buffering=0) as file:
        while piece := file.read(1 << 22):
            total += len(piece)
    return total


def report(rows: list[dict[str, Any]]) -> None:
    """Prints a line for each maker and reader."""
    common.show(
        ("do", "what", "delay, us", "files/s", "MB/s", "over folder", "names, s", "stat/s"),
        [
            (
                r["do"], r["what"], r["delay_us"], r["files_per_s"], r["mb_per_s"],
                r["over_folder"], r.get("names_s"), r.get("stats_per_s"),
            )
            for r in rows
        ],
    )  # fmt: skip


if __name__ == "__main__":
    main()
