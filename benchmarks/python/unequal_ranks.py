"""Training steps on two ranks of unequal speed, with even parts and with those of `pydist balance`.

Each rank has a core of its own; that of rank 1 also runs another process that never waits, so that
the rank gets half of the core. CosmoFlow 128^3 is cut along its depth, and by channels. After the
search for parts, even and balanced ones are measured in turn. The ideal is the work of both ranks,
by the time of the fast one, over the sum of the speeds, plus the communication and waiting of a
step with balanced parts.

    python benchmarks/python/unequal_ranks.py
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any, Literal

import common

AXES: dict[str, dict[str, Any]] = {"depth": {"spatial": (2, 1, 1)}, "channel": {"channel": 2}}
HEAD = ("axis", "even", "s", "balanced", "s", "even / balanced", "ideal, s", "balanced / ideal")


def main() -> None:
    """Starts the ranks and shows their measurements, or runs one of them."""
    parser = common.parser(__doc__, rounds=3)
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.rounds = 1
    if options.rank is not None:
        measure(options)
        return
    machine = common.machine(threads_per_rank=1)
    rows = common.on_ranks(__file__, options)
    common.show(HEAD, [shown(row) for row in rows])
    common.write({"machine": machine, "rows": rows}, "unequal_ranks", options)


def shown(row: dict[str, Any]) -> tuple[Any, ...]:
    """Returns a row of the table."""
    sizes = [" + ".join(map(str, row[name]["sizes"])) for name in ("even", "balanced")]
    even, balanced, ideal = row["even"]["seconds"], row["balanced"]["seconds"], row["ideal"]
    return row["axis"], sizes[0], even, sizes[1], balanced, even / balanced, ideal, balanced / ideal


def measure(options: argparse.Namespace) -> None:
    """Measures both axes, on one rank."""
    import pydist
    from pydist.data import UniverseOptions, generate_universes

    world = pydist.init(spatial=(2, 1, 1)).world
    width: Literal[32, 128] = 32 if options.quick else 128
    data = options.rank.parent / "data"
    if world.rank == 0:
        generate_universes(data, UniverseOptions(count=2, width=width, box_width=width))
    world.barrier()
    with sharing_its_core(world.rank):
        rows = [balanced_axis(name, data, width, world, options) for name in AXES]
    if world.rank == 0:
        options.rank.write_text(json.dumps(rows))


def balanced_axis(
    name: str, data: Path, width: Literal[32, 128], world: Any, options: argparse.Namespace
) -> dict[str, Any]:
    """Searches for parts of an axis, then measures even and balanced ones in turn."""
    from pydist.train import balancing, parts
    from pydist.train.config import Config, CosmoFlowConfig, DataConfig, MeshConfig, TrainConfig

    steps = 2 if options.quick else 10
    config = Config(
        model=CosmoFlowConfig(width=width),
        data=DataConfig(path=data),
        mesh=MeshConfig(**AXES[name]),
        train=TrainConfig(batch=1),
    )
    axis = parts.axis_of(config, world.size)
    rounds: list[Any] = []
    best = balancing.find_parts(config, world, axis, steps, 5, rounds.append)
    pairs = [
        [balancing.measure(config, world, axis, each.sizes, steps) for each in (rounds[0], best)]
        for _ in range(options.rounds)
    ]
    even, balanced = (middle(each) for each in zip(*pairs, strict=True))
    fast, slow = even["busy"]
    ideal = 2 * fast / (1 + fast / slow) + balanced["seconds"] - max(balanced["busy"])
    row = {"axis": name, "even": even, "balanced": balanced, "ideal": ideal}
    return {**row, "search": [asdict(each) for each in rounds]}


def middle(rounds: tuple[Any, ...]) -> dict[str, Any]:
    """Returns the medians of rounds with the same parts."""
    busy = [median(each) for each in zip(*(r.busy for r in rounds), strict=True)]
    return {"sizes": rounds[0].sizes, "busy": busy, "seconds": median(r.seconds for r in rounds)}


@contextmanager
def sharing_its_core(rank: int) -> Iterator[None]:
    """Binds the rank to a core, which rank 1 shares with a process that never waits."""
    if not hasattr(os, "sched_setaffinity") or len(cores := sorted(os.sched_getaffinity(0))) < 2:
        raise SystemExit("this benchmark binds two ranks to two cores of a Linux machine")
    os.sched_setaffinity(0, {cores[rank]})
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"]) if rank == 1 else None
    try:
        yield
    finally:
        if busy is not None:
            busy.kill()
            busy.wait()


if __name__ == "__main__":
    main()
