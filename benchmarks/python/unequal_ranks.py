"""Compares steps on ranks of unequal speed with even parts and with those of `pydist balance`.

Two ranks: each has a core of its own; that of rank 1 also runs another process that never waits, so
that the rank gets half of the core. CosmoFlow 128^3 is cut along its depth, and by channels.

Three ranks (`--three`): rank 0 runs in 70 % of the time, on a core of its own, rank 1 in 25 % and
rank 2 in 5 %, on another core; a process stops them and lets them continue by signals. Batches of
20 samples of 32^3 are divided over sample groups, and a sample of 64^3 along its depth.

After the search for parts, even and balanced ones are measured in turn. The ideal is the work of
all ranks over the sum of their speeds, as measured with even parts, plus the communication and
waiting of a step with balanced parts.

    python benchmarks/python/unequal_ranks.py
    python benchmarks/python/unequal_ranks.py --three
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from select import select
from statistics import median
from typing import Any, Literal, NamedTuple

import common


class Case(NamedTuple):
    """An axis whose parts are searched.

    Attributes:
        mesh: settings of the mesh.
        width: of the samples.
        batch: samples of a step.
        steps: timed steps of a measurement.
    """

    mesh: dict[str, Any]
    width: Literal[32, 64, 128]
    batch: int
    steps: int


TWO = {
    "depth": Case({"spatial": (2, 1, 1)}, 128, 1, 10),
    "channel": Case({"channel": 2}, 128, 1, 10),
}
THREE = {"data": Case({"data": 3}, 32, 20, 4), "depth": Case({"spatial": (3, 1, 1)}, 64, 1, 4)}
PARTS_OF_TIME = (0.7, 0.25, 0.05)
"""In which the three ranks run."""
PERIOD = 0.02
"""Seconds in which each rank runs for its part of the time, and is stopped for the rest."""
HEAD = ("axis", "even", "s", "balanced", "s", "even / balanced", "ideal, s", "balanced / ideal")


def main() -> None:
    """Starts the ranks and shows their measurements, or runs one of them."""
    parser = common.parser(__doc__, rounds=3)
    parser.add_argument("--three", action="store_true", help="three ranks: 70, 25 and 5 %%")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--stops", type=int, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.stops is not None:
        stop_in_turns(*options.stops)
        return
    if options.quick:
        options.rounds = 1
    if options.rank is not None:
        measure(options)
        return
    machine = common.machine(threads_per_rank=1)
    rows = common.on_ranks(__file__, options, ranks=3 if options.three else 2)
    common.show(HEAD, [shown(row) for row in rows])
    name = "unequal_ranks_3" if options.three else "unequal_ranks"
    common.write({"machine": machine, "rows": rows}, name, options)


def shown(row: dict[str, Any]) -> tuple[Any, ...]:
    """Returns a row of the table."""
    sizes = [" + ".join(map(str, row[name]["sizes"])) for name in ("even", "balanced")]
    even, balanced, ideal = row["even"]["seconds"], row["balanced"]["seconds"], row["ideal"]
    return row["axis"], sizes[0], even, sizes[1], balanced, even / balanced, ideal, balanced / ideal


def measure(options: argparse.Namespace) -> None:
    """Measures all axes, on one rank."""
    import pydist
    from pydist.data import UniverseOptions, generate_universes

    world = pydist.init().world
    cases = THREE if world.size == 3 else TWO
    if options.quick:
        cases = {name: case._replace(width=32, steps=2) for name, case in cases.items()}
    folders = {}
    for name, case in cases.items():
        folders[name] = options.rank.parent / name
        if world.rank == 0:
            made = UniverseOptions(count=2 * case.batch, width=case.width, box_width=case.width)
            generate_universes(folders[name], made)
    world.barrier()
    slow = in_part_of_the_time if world.size == 3 else sharing_its_core
    with slow(world.rank):
        rows = [
            balanced_axis(name, case, folders[name], world, options.rounds)
            for name, case in cases.items()
        ]
    if world.rank == 0:
        options.rank.write_text(json.dumps(rows))


def balanced_axis(name: str, case: Case, data: Path, world: Any, repeats: int) -> dict[str, Any]:
    """Searches for parts of an axis, then measures even and balanced ones in turn."""
    from pydist.train import balancing, parts
    from pydist.train.config import Config, CosmoFlowConfig, DataConfig, MeshConfig, TrainConfig

    config = Config(
        model=CosmoFlowConfig(width=case.width),
        data=DataConfig(path=data),
        mesh=MeshConfig(**case.mesh),
        train=TrainConfig(batch=case.batch),
    )
    axis = parts.axis_of(config, world.size)
    rounds: list[Any] = []
    best = balancing.find_parts(config, world, axis, case.steps, 5, rounds.append)
    pairs = [
        [
            balancing.measure(config, world, axis, each.sizes, case.steps)
            for each in (rounds[0], best)
        ]
        for _ in range(repeats)
    ]
    even, balanced = (middle(each) for each in zip(*pairs, strict=True))
    speeds = [size / busy for size, busy in zip(even["sizes"], even["busy"], strict=True)]
    ideal = sum(even["sizes"]) / sum(speeds) + balanced["seconds"] - max(balanced["busy"])
    row = {"axis": name, "even": even, "balanced": balanced, "ideal": ideal}
    return {**row, "search": [asdict(each) for each in rounds]}


def middle(rounds: tuple[Any, ...]) -> dict[str, Any]:
    """Returns the medians of rounds with the same parts."""
    busy = [median(each) for each in zip(*(r.busy for r in rounds), strict=True)]
    return {"sizes": rounds[0].sizes, "busy": busy, "seconds": median(r.seconds for r in rounds)}


@contextmanager
def sharing_its_core(rank: int) -> Iterator[None]:
    """Binds the rank to a core, which rank 1 shares with a process that never waits."""
    bind(rank)
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"]) if rank == 1 else None
    try:
        yield
    finally:
        if busy is not None:
            busy.kill()
            busy.wait()


@contextmanager
def in_part_of_the_time(rank: int) -> Iterator[None]:
    """Binds the rank to a core, and lets it run in its part of the time."""
    bind(min(rank, 1))
    command = [sys.executable, __file__, "--stops", str(os.getpid()), str(rank)]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as stops:
        try:
            yield
        finally:
            stops.communicate()  # closes its input


def stop_in_turns(process: int, rank: int) -> None:
    """Stops a process and lets it continue, until standard input is closed."""
    first, part = sum(PARTS_OF_TIME[1:rank]), PARTS_OF_TIME[rank]  # ranks 1 and 2 share a core
    stops = True
    while True:
        os.kill(process, signal.SIGSTOP if stops else signal.SIGCONT)
        seconds = (first - time.monotonic() / PERIOD) % 1 * PERIOD if stops else part * PERIOD
        if select([sys.stdin], [], [], seconds)[0]:
            break
        stops = not stops
    os.kill(process, signal.SIGCONT)


def bind(core: int) -> None:
    """Binds this process to one of two cores."""
    if not hasattr(os, "sched_setaffinity") or len(cores := sorted(os.sched_getaffinity(0))) < 2:
        raise SystemExit("this benchmark binds its ranks to two cores of a Linux machine")
    os.sched_setaffinity(0, {cores[core]})


if __name__ == "__main__":
    main()
