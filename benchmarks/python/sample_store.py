"""Compares training input from files, from the sample store, and without any cost, on 2 ranks.

CosmoFlow-like samples, 4 channels of int16 counts, one file each, either divided over 2 sample
groups or cut in 2 along the depth. The contestants make the same batches:

- whole files: each rank reads all of a sample and cuts its block out of it;
- blocks: each rank reads its block (without cuts, the same as whole files);
- store: blocks come from the ranks' memory, by messages between groups; nothing is read;
- disk raw, disk zstd, disk lz4: the same from a store without memory, whose blocks are all on local
  disk (in the page cache, unless `--spill` names a folder on a disk that is slow enough to tell);
- synthetic: one batch made beforehand, which costs nothing.

One table has the input alone (an epoch, with no computation between batches), another one training
steps of CosmoFlow. Files are in the page cache. Each turn is one epoch of all contestants in a
random order; the store is filled before.

The last table compares the store's fetch of one block from the other rank, in both directions at
the same time, with bare messages of the same transport from fixed buffers (a channel made once).

    python benchmarks/python/sample_store.py
    python benchmarks/python/sample_store.py --mpi mpich
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
import jobs

MESHES = {"2 groups": (2, (1, 1, 1)), "depth in 2": (1, (2, 1, 1))}
DISKS = {"disk raw": "raw", "disk zstd": "zstd", "disk lz4": "lz4"}
FEEDS = ("synthetic", "store", *DISKS, "blocks", "whole files")
BATCH = 2
FETCHED_MB = (1, 8, 32)


def main() -> None:
    parser = common.parser(__doc__, rounds=9)
    parser.add_argument("--width", type=int, default=64, help="edge of the cube (64)")
    parser.add_argument("--samples", type=int, default=16, help="samples of an epoch (16)")
    parser.add_argument("--mpi", default="auto", help="openmpi, mpich, gloo or auto")
    parser.add_argument("--spill", type=Path, help="folder of blocks on disk (beside the data)")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--data", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.width, options.samples, options.rounds = 32, 4, 2
    if options.rank:
        work(options)
        return
    machine = common.machine(threads_per_rank=1)
    with tempfile.TemporaryDirectory() as folder:
        data = make(Path(folder), options)
        more = ["--data", str(data), "--width", str(options.width)]
        more += ["--samples", str(options.samples)]
        more += ["--spill", str(options.spill or Path(folder) / "spill")]
        result = common.on_ranks(__file__, options, options.mpi, more=more)
    report(result, options)
    machine["mpi_library"] = result.pop("library")
    setting = {"width": options.width, "samples": options.samples, "batch": BATCH}
    name = "sample_store" if options.mpi == "auto" else f"sample_store_{options.mpi}"
    common.write({"machine": machine, **setting, **result}, name, options)


def make(folder: Path, options: argparse.Namespace) -> Path:
    """Makes the samples: one universe each, all of them for training."""
    from pydist.data import UniverseOptions, generate_universes

    width = options.width
    generate_universes(
        folder,
        UniverseOptions(count=options.samples, width=width, box_width=width, validation=0),
    )
    return folder


def report(result: dict[str, Any], options: argparse.Namespace) -> None:
    """Prints the tables."""
    head = (
        "mesh", "feed", "samples/s", "of synthetic", "over blocks", "waited", "MB from files",
        "MB from disk", "compression",
    )  # fmt: skip
    for what, title in (("input", "the input alone"), ("training", "training steps")):
        print(f"\n{title}: {options.samples} samples of {options.width}³, batch {BATCH}, 2 ranks")
        common.show(head, [
            (
                row["mesh"], row["feed"], row["samples_per_second"], row["of_synthetic"],
                row["over_blocks"], row["waited"], row["file_bytes"] / 1e6,
                row["disk_bytes"] / 1e6, row["compression"],
            )
            for row in result[what]
        ])  # fmt: skip
    print("\none block from the other rank, both ways at the same time")
    common.show(
        ("MB", "store, ms", "bare, ms", "store / bare", "store GB/s"),
        [
            (
                row["bytes"] / 1e6, row["store"]["median"] * 1e3, row["bare"]["median"] * 1e3,
                row["over_bare"], row["bytes"] / row["store"]["median"] / 1e9,
            )
            for row in result["fetch"]
        ],
    )  # fmt: skip


# -- the ranks ------------------------------------------------------------------------------


def work(options: argparse.Namespace) -> None:
    """Measures all tables on this rank; rank 0 writes them."""
    import pydist

    world = pydist.init().world
    result: dict[str, Any] = {"library": jobs.library(world)}
    for what in ("input", "training"):
        result[what] = [
            row for mesh in MESHES for row in measured(world, mesh, what == "training", options)
        ]
    sizes = FETCHED_MB[:1] if options.quick else FETCHED_MB
    rounds = options.rounds if options.quick else 10 * options.rounds
    result["fetch"] = [fetched(world, size * 10**6, rounds) for size in sizes]
    if world.rank == 0:
        options.rank.write_text(json.dumps(result))


class Feed:
    """One contestant: the batches of an epoch, and what they have cost."""

    def __init__(self, name: str, mesh: Any, data: Path, spill: Path) -> None:
        from pydist.data import Loader, ShardDataset

        self.dataset = ShardDataset(data, normalize="log1p")
        source: Any = Whole(self.dataset) if name == "whole files" else self.dataset
        store: dict[str, Any] = {"store": "memory"} if name == "store" else {}
        if name in DISKS:
            store = {
                "store": "memory", "store_memory": 1, "store_disk": "1TB", "store_folder": spill,
                "store_codec": DISKS[name],
            }  # fmt: skip
        self.loader = Loader(
            source,
            mesh,
            BATCH,
            seed=0,
            **store,
        )
        self._made = [next(iter(self.loader))] if name == "synthetic" else []
        self._steps = len(self.loader)
        self._number = 0

    def epoch(self) -> Any:
        """Yields the batches of the next epoch."""
        if self._made:
            return iter(self._made * self._steps)
        self._number += 1
        return self.loader.batches(self._number - 1)

    def figures(self) -> Any:
        """Returns this rank's figures of the store since the last call; zeros without one."""
        from pydist.data.store.figures import Figures

        store = self.loader.store
        return Figures() if store is None else store.counted()


class Whole:
    """Source that reads full samples."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.identity = f"{dataset.identity}, whole"

    def __getattr__(self, name: str) -> Any:
        if name in ("read_stored", "normalize", "stored_dtype"):
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __len__(self) -> int:
        return len(self.dataset)

    def read_block(self, index: int, box: Any, out: Any) -> Any:
        import torch

        stored = torch.empty(self.dataset.shape_of(index), dtype=self.dataset.stored_dtype)
        self.dataset.read_stored(index, None, stored)
        ends = zip(box.lo, box.hi, strict=True)
        block = stored[tuple(slice(lo, hi) for lo, hi in ends)].contiguous()
        found = torch.zeros(1, dtype=torch.int32)
        self.dataset.normalize(index, box.lo[0], block, out, found)
        return out


def measured(
    world: Any, title: str, trains: bool, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Times epochs of all feeds on one mesh."""
    import torch

    from pydist.mesh import Mesh

    mesh = Mesh(world, *MESHES[title])
    feeds = {name: Feed(name, mesh, options.data, options.spill) for name in FEEDS}
    step = training_step(mesh, options.width) if trains else None
    check(feeds)
    waited: dict[str, list[float]] = {name: [] for name in FEEDS}

    def turn(name: str) -> None:
        feed = feeds[name]
        before = feed.loader.waited_s
        for batch in feed.epoch():
            if step is not None:
                step(batch)
            world.progress()
        world.barrier()
        waited[name].append(feed.loader.waited_s - before)

    def pause() -> None:
        time.sleep(0.05)  # what the last one reads ahead
        world.barrier()

    for name in FEEDS:
        turn(name)
        waited[name].clear()
    pause()
    before = {name: feed.dataset.bytes_read for name, feed in feeds.items()}
    for feed in feeds.values():
        feed.figures()
    seconds = common.in_turns(
        {name: lambda name=name: turn(name) for name in FEEDS},  # type: ignore[misc]
        options.rounds,
        pause,
    )
    pause()
    found = []
    for name in FEEDS:
        median = statistics.median(seconds[name])
        sums = torch.tensor([
            statistics.median(waited[name]) / median / world.size,
            (feeds[name].dataset.bytes_read - before[name]) / options.rounds,
        ], dtype=torch.float64)  # fmt: skip
        world.all_reduce(sums)
        figures = feeds[name].figures().over(world)
        found.append({
            "mesh": title,
            "feed": name,
            **common.summary(seconds[name]),
            "samples_per_second": options.samples / median,
            "of_synthetic": statistics.median(seconds["synthetic"]) / median,
            "over_blocks": statistics.median(seconds["blocks"]) / median,
            "waited": float(sums[0]),
            "file_bytes": int(sums[1]),
            "disk_bytes": figures.disk_bytes // options.rounds,
            "compression": figures.compression,
        })  # fmt: skip
    for feed in feeds.values():
        feed.loader.close()
    return found


def check(feeds: dict[str, Feed]) -> None:
    """Fills the store, and compares an epoch of each feed with that of blocks."""
    import torch

    for _ in range(2):
        epochs = [feeds[name].epoch() for name in FEEDS if name != "synthetic"]
        for batches in zip(*epochs, strict=True):
            inputs = [batch.inputs.to_local() for batch in batches]
            if not all(torch.equal(each, inputs[0]) for each in inputs):
                raise SystemExit("the contestants make different batches")


def training_step(mesh: Any, width: int) -> Callable[[Any], None]:
    """Returns a step of CosmoFlow with SGD."""
    import torch
    import torch.nn.functional as F

    from pydist import parallelize
    from pydist.models import CosmoFlow

    torch.manual_seed(0)
    model = parallelize(CosmoFlow(width=width, dropout=0.0), mesh)
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        loss = F.mse_loss(model(batch.inputs), batch.targets)
        (loss * batch.loss_scale).backward()
        optimizer.step()

    return step


class Block:
    """Source that makes two samples, each as large as one message."""

    num_targets, labeled = 1, False

    def __init__(self, nbytes: int) -> None:
        import torch

        self.dtype = torch.float32
        self.sample_shape = (1, 1, 1, nbytes // 4)
        self.identity = f"{nbytes} bytes"

    def __len__(self) -> int:
        return 2

    def shape_of(self, index: int) -> tuple[int, int, int, int]:
        return self.sample_shape

    def read_block(self, index: int, box: Any = None, out: Any = None) -> Any:
        return out.fill_(index + 1)

    def read_labels(self, index: int, box: Any = None, out: Any = None) -> Any:
        raise NotImplementedError

    def target(self, index: int) -> Any:
        import torch

        return torch.tensor([float(index)])


def fetched(world: Any, nbytes: int, rounds: int) -> dict[str, Any]:
    """Times a block's way from rank to rank, by the store and by bare messages."""
    import torch

    from pydist.data.store.memory import MemoryStore
    from pydist.mesh import Mesh

    mesh, source = Mesh(world, 2), Block(nbytes)
    store, peer = MemoryStore(source, mesh), 1 - world.rank
    filling = store.order({0: [0], 1: [1]})
    filling.arrive()
    filling.source.read_block(world.rank, None, torch.empty(source.sample_shape))
    filling.source.target(world.rank)
    filling.end()
    bytes_of_entry = store.entries[world.rank].memory.nbytes
    sent = torch.full((bytes_of_entry,), world.rank, dtype=torch.uint8)
    received = torch.empty_like(sent)
    channel = world.channel([(peer, sent)], [(peer, received)], 0)

    def by_store() -> None:
        delivery = store.order({0: [1], 1: [0]})
        delivery.arrive()
        delivery.end()

    def bare() -> None:
        channel.start()
        channel.wait()

    delivery = store.order({0: [1], 1: [0]})
    delivery.arrive()
    out = torch.empty(source.sample_shape)
    delivery.source.read_block(peer, None, out)
    delivery.end()
    bare()
    if not (bool((out == peer + 1).all()) and bool((received == peer).all())):
        raise SystemExit("a block arrived with other values than were sent")
    by_store()  # the second buffer
    seconds = common.in_turns({"store": by_store, "bare": bare}, rounds, world.barrier)
    channel.close()
    store.close()
    summaries = {name: common.summary(taken) for name, taken in seconds.items()}
    return {
        "bytes": bytes_of_entry,
        **summaries,
        "over_bare": summaries["store"]["median"] / summaries["bare"]["median"],
    }


if __name__ == "__main__":
    main()
