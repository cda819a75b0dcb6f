"""Compares reads of a rank's block from a contiguous HDF5 file by pydist and by `pread`.

A sample with 4 channels of int16 counts is cut over 2 and 4 ranks. Each row is one rank's block,
into a given buffer, from the page cache:

- pydist: `ShardDataset.read_stored`, with all checks; the file stays open;
- pread: the runs of the block, by `os.preadv` into the same buffer, without any library;
- MPI-IO: pydist with `MpiIo()`, if h5py is built with MPI.

The goal is .9 of pread. `read / file` is what all ranks have asked the kernel for (rchar of
/proc/self/io) over the bytes of the sample: 1.00 if no byte is read twice.

    python benchmarks/python/block_reads.py
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import common
import h5py
import numpy as np
import torch

from pydist.data import MpiIo, ShardDataset, UniverseOptions, generate_universes
from pydist.partition import Box

CUTS = {"depth 2": (2, 1, 1), "depth 4": (4, 1, 1), "depth 2 × height 2": (2, 2, 1)}


def main() -> None:
    parser = common.parser(__doc__, rounds=25)
    parser.add_argument("--widths", type=int, nargs="+", default=[128, 256], help="edges of cubes")
    options = parser.parse_args()
    if options.quick:
        options.widths, options.rounds = [16], 3
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for width in options.widths:
        with tempfile.TemporaryDirectory() as folder:
            root, whole = Path(folder), {"width": width, "box_width": width}
            generate_universes(root, UniverseOptions(count=1, validation=0, **whole))
            for cut, parts in CUTS.items():
                rows.append({"width": width, **measured(root, cut, parts, options)})
    common.show(
        ("width", "cut", "MB", "pydist, ms", "pread, ms", "of pread", "read / file", "MPI-IO, ms"),
        [
            (
                r["width"], r["cut"], r["bytes"] / 1e6, r["pydist"]["median"] * 1e3,
                r["pread"]["median"] * 1e3, r["of_pread"], r["read_over_file"]["pydist"],
                r["mpi_io"]["median"] * 1e3 if "mpi_io" in r else "-",
            )
            for r in rows
        ],
    )  # fmt: skip
    result = {"machine": common.machine(), "rows": rows}
    common.write(result, "block_reads", options)


def measured(
    root: Path, cut: str, parts: tuple[int, int, int], options: argparse.Namespace
) -> dict[str, Any]:
    """Times the last rank's read for one cut, and counts the bytes of all ranks' reads."""
    data = ShardDataset(root)
    boxes = list(blocks(data.sample_shape, parts))
    path = root / data.manifest.files[0].path
    with h5py.File(path) as file:
        start = file["full"].id.get_offset()
    shape = [b - a for a, b in zip(boxes[-1].lo, boxes[-1].hi, strict=True)]
    buffer = np.empty(shape, np.int16)  # one for both: pages of other sizes take other times
    out = torch.from_numpy(buffer)
    runs = list(runs_of(boxes[-1], data.sample_shape, start, buffer))
    descriptor = os.open(path, os.O_RDONLY)

    def by_pread() -> None:
        for offset, memory in runs:
            if os.preadv(descriptor, [memory], offset) != memory.nbytes:
                raise SystemExit("block_reads: pread returned less than the block")

    sources = {"pydist": data}
    if h5py.get_config().mpi:
        sources["mpi_io"] = ShardDataset(root, driver=MpiIo())
    contestants: dict[str, Callable[[], object]] = {
        who: partial(source.read_stored, 0, boxes[-1], out) for who, source in sources.items()
    }
    contestants["pread"] = by_pread
    found = []
    for step in contestants.values():
        buffer[...] = 0
        step()
        found.append(buffer.copy())
    if not all(np.array_equal(each, found[0]) for each in found):
        raise SystemExit(f"block_reads: {cut}: the blocks differ")

    def over_file(source: ShardDataset) -> float:
        before = asked()
        for box in boxes:
            shape = [b - a for a, b in zip(box.lo, box.hi, strict=True)]
            source.read_stored(0, box, torch.empty(shape, dtype=torch.int16))
        return (asked() - before) / (2 * math.prod(data.sample_shape))

    read = {who: over_file(source) for who, source in sources.items()}
    times = common.in_turns(contestants, options.rounds, lambda: None)
    os.close(descriptor)
    ratios = [b / a for a, b in zip(times["pydist"], times["pread"], strict=True)]
    return {
        "cut": cut, "bytes": buffer.nbytes, "of_pread": statistics.median(ratios),
        "read_over_file": read, **{who: common.summary(seconds) for who, seconds in times.items()},
    }  # fmt: skip


def blocks(shape: tuple[int, ...], parts: tuple[int, int, int]) -> Iterator[Box]:
    """Yields the blocks of all ranks."""
    channels, *extents = shape
    for place in itertools.product(*map(range, parts)):
        spans = list(zip(place, extents, parts, strict=True))
        lo = tuple(i * n // p for i, n, p in spans)
        hi = tuple((i + 1) * n // p for i, n, p in spans)
        yield Box((0, *lo), (channels, *hi))


def runs_of(
    box: Box, shape: tuple[int, ...], start: int, buffer: Any
) -> Iterator[tuple[int, memoryview]]:
    """Yields offset and destination of each contiguous part of a block, [C, D, H, W]."""
    _, depth, height, width = shape
    whole_planes = box.hi[2] - box.lo[2] == height
    for c in range(buffer.shape[0]):
        for d in range(1 if whole_planes else buffer.shape[1]):
            plane = (box.lo[0] + c) * depth + box.lo[1] + d
            at = start + 2 * (plane * height + box.lo[2]) * width
            yield at, memoryview(buffer[c] if whole_planes else buffer[c, d]).cast("B")


def asked() -> int:
    """Returns the bytes that this process has read by system calls so far."""
    for line in Path("/proc/self/io").read_text().splitlines():
        if line.startswith("rchar:"):
            return int(line.split()[1])
    raise SystemExit("block_reads: /proc/self/io does not count reads here")


if __name__ == "__main__":
    main()
