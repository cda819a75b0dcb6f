"""Compares loading of a data set's description in versions 2 (mapped table) and 1 (JSON objects).

A description of `--samples` files with one sample each is written in both versions. Processes load
it and make a `ShardDataset`, as each rank does:

- seconds of `Manifest.load`, and of what a run asks of it: the data set, its identity, and 1,000
  samples;
- private memory and all memory (PSS counts shared pages in part) that this adds to a process, while
  `--processes` of them have it loaded at the same time, as the ranks of one node;
- bytes that the last of them has read from the disk, and by system calls.

    python benchmarks/python/manifest.py                       about 2 minutes
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import common


def main() -> None:
    parser = common.parser(__doc__, rounds=3)
    parser.add_argument("--samples", type=int, default=524_288, help="of the data set (524288)")
    parser.add_argument("--processes", type=int, default=2, help="at the same time (2)")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        load(options.child)
        return
    if options.quick:
        options.samples, options.rounds, options.processes = 300, 1, 1
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folders = write(Path(name), options.samples)
        found: dict[int, list[list[dict[str, float]]]] = {version: [] for version in folders}
        for _ in range(options.rounds):
            for version, folder in folders.items():
                found[version].append(together(folder, options.processes))
        for version, rounds in found.items():
            size = sum(p.stat().st_size for p in folders[version].rglob("*") if p.is_file())
            each = [result for results in rounds for result in results]
            medians = {key: statistics.median(r[key] for r in each) for key in each[0]}
            rows.append({"version": version, "bytes": size, "samples": options.samples, **medians})
    common.show(
        ("version", "MB", "load, s", "use, s", "private, MB", "PSS, MB", "read, MB", "rchar, MB"),
        [
            (
                r["version"], r["bytes"] / 1e6, r["load_s"], r["use_s"], r["private"] / 1e6,
                r["pss"] / 1e6, r["read_bytes"] / 1e6, r["rchar"] / 1e6,
            )
            for r in rows
        ],
    )  # fmt: skip
    common.write({"machine": common.machine(), "rows": rows}, "manifest", options)


def write(root: Path, samples: int) -> dict[int, Path]:
    """Writes the description in both versions; returns their folders."""
    from pydist.data.manifest import DataFile, Manifest

    files = tuple(
        DataFile(
            f"train/univ_{n // 64:06}_{n % 64:02}.hdf5", "train" if n % 10 else "val", 16_785_408,
            f"{n:08x}", ((0, 0, 0),), (n / 7,),
        )
        for n in range(samples)
    )  # fmt: skip
    manifest = Manifest((4, 128, 128, 128), "CDHW", "int16", files, target_names=tuple("abcd"))
    folders = {1: root / "1", 2: root / "2"}
    for folder in folders.values():
        folder.mkdir()
    manifest.save(folders[2])
    record = json.loads(manifest.dumps())
    record["files"] = [
        {
            "path": f.path, "split": f.split, "bytes": f.bytes, "crc32": f.checksum,
            "offsets": f.offsets, "means": f.means, "extents": None,
        }
        for f in files
    ]  # fmt: skip
    (folders[1] / "dataset.json").write_text(json.dumps(record, indent=1))
    return folders


def together(folder: Path, processes: int) -> list[dict[str, float]]:
    """Loads a description in several processes, one after another; all keep it until the end."""
    started, results = [], []
    for _ in range(processes):
        child = subprocess.Popen(
            [sys.executable, __file__, "--child", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(child)
        assert child.stdout is not None
        results.append(json.loads(child.stdout.readline()))
    memories = [json.loads(child.communicate("\n")[0]) for child in started]
    return [{**result, **each} for result, each in zip(results, memories, strict=True)]


def load(folder: Path) -> None:
    """Loads a description and uses it; prints the seconds, then the memory when it is asked to."""
    from pydist.data import Manifest, ShardDataset

    Manifest((1, 1, 1, 1), "CDHW", "int16", ())  # imports and caches
    Manifest.loads(Manifest((1, 1, 1, 1), "CDHW", "int16", ()).dumps(), "none")
    before, counted = memory(), read_so_far()
    began = time.perf_counter()
    manifest = Manifest.load(folder)
    loaded = time.perf_counter()
    data = ShardDataset(folder, "train", manifest=manifest)
    assert len(data.identity) > 64
    for index in range(0, len(data), max(1, len(data) // 1000)):
        data.shape_of(index)
    used = time.perf_counter()
    after = {key: value - counted[key] for key, value in read_so_far().items()}
    print(json.dumps({"load_s": loaded - began, "use_s": used - loaded, **after}), flush=True)
    sys.stdin.readline()
    print(json.dumps({key: value - before[key] for key, value in memory().items()}), flush=True)


def memory() -> dict[str, int]:
    """Returns this process's private bytes, and its proportional share of all (PSS)."""
    found = numbers("/proc/self/smaps_rollup", 1024)
    private = found["Private_Clean"] + found["Private_Dirty"]
    return {"private": private, "pss": found["Pss"]}


def read_so_far() -> dict[str, int]:
    """Returns the bytes that this process has read from disks, and by system calls."""
    found = numbers("/proc/self/io", 1)
    return {key: found[key] for key in ("read_bytes", "rchar")}


def numbers(path: str, unit: int) -> dict[str, int]:
    """Returns the numbers of a file of /proc by name."""
    pairs = (line.split() for line in Path(path).read_text().splitlines() if ": " in line)
    return {pair[0].rstrip(":"): unit * int(pair[1]) for pair in pairs if pair[1].isdigit()}


if __name__ == "__main__":
    main()
