"""Compares reads of a rank's block by pydist and by the reader of each file format alone.

One sample with 4 channels of int16 counts is stored in HDF5, in Zarr (one file a chunk, or shards)
and as NumPy files. A rank's block for several cuts is read

- by pydist: `ShardDataset.read_stored`, with all checks, into a given buffer;
- by the reader alone: h5py, the zarr package or NumPy's memory map, into the same buffer.

Both open the file for each read, as in a data set with more files than stay open. Their results are
compared before the times. Files are in the page cache.

    python benchmarks/python/data_sources.py
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import common
import h5py
import numpy as np
import torch

from pydist.data import ShardDataset, UniverseOptions, generate_universes
from pydist.data.convert import convert_dataset
from pydist.data.options import ConvertOptions
from pydist.partition import Box

CUTS = {"depth 2": (2, 1, 1), "depth 2 × height 2": (2, 2, 1), "width 2": (1, 1, 2)}


def storages(side: int) -> dict[str, ConvertOptions]:
    """Returns the ways to store the sample, with chunks of a given side."""
    chunks, shards = (side,) * 3, (2 * side,) * 3
    return {
        "hdf5 contiguous": ConvertOptions("hdf5"),
        "hdf5 chunked": ConvertOptions("hdf5", chunks=chunks),
        "hdf5 gzip": ConvertOptions("hdf5", chunks=chunks, compression="gzip"),
        "numpy": ConvertOptions("numpy"),
        "zarr": ConvertOptions("zarr", chunks=chunks),
        "zarr shards": ConvertOptions("zarr", chunks=chunks, shards=shards),
        "zarr zstd": ConvertOptions("zarr", chunks=chunks, compression="zstd"),
        "zarr blosc": ConvertOptions("zarr", chunks=chunks, compression="blosc"),
        "zarr blosc shards": ConvertOptions(
            "zarr", chunks=chunks, shards=shards, compression="blosc"
        ),
    }


def main() -> None:
    parser = common.parser(__doc__, rounds=15)
    parser.add_argument("--width", type=int, default=128, help="edge of the cube (128)")
    parser.add_argument("--chunk", type=int, default=32, help="edge of a chunk (32)")
    parser.add_argument("--only", nargs="*", help="names of storages")
    options = parser.parse_args()
    if options.quick:
        options.width, options.chunk, options.rounds = 16, 8, 3
    torch.set_num_threads(1)
    machine = common.machine(**{name: version(name) for name in ("h5py", "zarr")})
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "source"
        whole = {"width": options.width, "box_width": options.width}
        generate_universes(source, UniverseOptions(count=1, validation=0, **whole))
        for name, storage in storages(options.chunk).items():
            if not options.only or name in options.only:
                root = Path(folder) / name.replace(" ", "_")
                manifest = convert_dataset(source, root, storage)
                rows += measured(name, root, root / manifest.files[0].path, options)
    report(rows)
    setting = {"width": options.width, "chunk": options.chunk}
    common.write({"machine": machine, **setting, "rows": rows}, "data_sources", options)


def measured(
    name: str, root: Path, path: Path, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Times the reads of one storage for all cuts."""
    data = ShardDataset(root)
    kind = name.split(maxsplit=1)[0]
    rows = []
    for cut, parts in CUTS.items():
        box = last_block(data.sample_shape, parts)
        window = box.slices
        shape = [part.stop - part.start for part in window]
        out = torch.empty(shape, dtype=torch.int16)
        buffer = np.empty(shape, np.int16)

        def ours(box: Box = box, out: torch.Tensor = out) -> None:
            data.read_stored(0, box, out)
            data.close()  # while it is open, HDF5's cache would serve the other contestant

        def alone(window: tuple[slice, ...] = window, buffer: Any = buffer) -> None:
            read_alone(kind, path, window, buffer)

        ours()
        alone()
        if not np.array_equal(out.numpy(), buffer):
            raise SystemExit(f"data_sources: {name}, {cut}: pydist and the reader differ")
        contestants: dict[str, Callable[[], object]] = {"pydist": ours, "reader": alone}
        times = common.in_turns(contestants, options.rounds, lambda: None)
        ratios = [a / b for a, b in zip(times["pydist"], times["reader"], strict=True)]
        for who, seconds in times.items():
            rows.append(
                {
                    "storage": name, "cut": cut, "who": who, "bytes": buffer.nbytes,
                    "over_reader": statistics.median(ratios) if who == "pydist" else 1.0,
                    **common.summary(seconds),
                }
            )  # fmt: skip
    return rows


def last_block(shape: tuple[int, ...], parts: tuple[int, int, int]) -> Box:
    """Returns the block of the last rank of a cut."""
    channels, *extents = shape
    first = (n - n // p for n, p in zip(extents, parts, strict=True))
    return Box((0, *first), (channels, *extents))


def read_alone(kind: str, path: Path, window: tuple[slice, ...], out: Any) -> None:
    """Reads a part by the format's reader alone."""
    if kind == "hdf5":
        with h5py.File(path) as file:
            file["full"].read_direct(out, window)
    elif kind == "numpy":
        np.copyto(out, np.load(path / "full.npy", mmap_mode="r")[window])
    else:
        import zarr
        from zarr.buffer.cpu import NDBuffer

        array = zarr.open_array(path / "full", mode="r")
        array.get_basic_selection(window, out=NDBuffer.from_numpy_array(out))


def report(rows: list[dict[str, Any]]) -> None:
    """Prints a line for each storage and cut."""
    pairs = zip(rows[::2], rows[1::2], strict=True)
    common.show(
        ("storage", "cut", "MB", "pydist, ms", "reader, ms", "pydist / reader", "MB/s"),
        [
            (
                mine["storage"], mine["cut"], mine["bytes"] / 1e6, mine["median"] * 1e3,
                alone["median"] * 1e3, mine["over_reader"], mine["bytes"] / mine["median"] / 1e6,
            )
            for mine, alone in pairs
        ],
    )  # fmt: skip


if __name__ == "__main__":
    main()
