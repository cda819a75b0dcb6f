"""Progress of MPI messages while a rank computes: by calls of `progress`, or nothing.

Two ranks each post a halo of 4 MB to the other, compute for about 0.1 s in k library calls, and
wait. The table shows the remaining wait, and the slowdown of the computation compared with no
messages in flight. Both ways take turns within each round; the send buffer is rewritten each time.

    python benchmarks/python/progress.py
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from pathlib import Path

import common

from pydist.launch.backends import available

ELEMENTS = 1 << 20
SECONDS = 0.1
CALLS = (1, 4, 16, 64)
WAYS = ("off", "calls")
HEAD = ("MPI, way", "library calls", "wait, ms", "slower, %")


def main() -> None:
    """Starts the ranks and shows their measurements, or runs one of them."""
    parser = common.parser(__doc__, rounds=15)
    at_hand = [each.name for each in available() if each.name != "gloo"]
    parser.add_argument("--mpi", nargs="+", default=at_hand, help="MPI libraries (all)")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.rounds = 2
    if options.rank is not None:
        measure(options)
        return
    machine = common.machine(threads_per_rank=1)
    rows = [
        {"mpi": mpi, **row}
        for mpi in options.mpi
        for row in common.on_ranks(__file__, options, mpi)
    ]
    shown = [
        (f"{r['mpi']}, {r['way']}", r["calls"], r["wait"]["median"] * 1e3, r["slowdown"] * 100)
        for r in rows
    ]
    common.show(HEAD, shown)
    common.write({"machine": machine, "rows": rows}, "progress", options)


def measure(options: argparse.Namespace) -> None:
    """Measures all ways and numbers of calls per round on one rank; the order is equal on all."""
    import torch  # the parent process does not need it

    import pydist

    world = pydist.init(transport="mpi").world
    peer = 1 - world.rank
    sent, received = torch.empty(ELEMENTS), torch.empty(ELEMENTS)
    a, out = torch.randn(256, 256), torch.empty(256, 256)
    channel = world.channel([(peer, sent)], [(peer, received)], tag=1)

    def compute(products: int, calls: int, way: str) -> float:
        began = time.perf_counter()
        for call in range(calls):
            for _ in range(products * (call + 1) // calls - products * call // calls):
                torch.mm(a, a, out=out)
            if way == "calls":
                world.progress()
        return time.perf_counter() - began

    compute(50, 1, "off")
    target = SECONDS / 10 if options.quick else SECONDS
    products = torch.tensor(max(CALLS[-1], round(target / compute(200, 1, "off") * 200)))
    world.broadcast(products)

    cases = [(way, calls) for way in WAYS for calls in CALLS]
    waits: dict[tuple[str, int], list[float]] = {case: [] for case in cases}
    ratios: dict[tuple[str, int], list[float]] = {case: [] for case in cases}
    order = random.Random(0)  # the same on both ranks
    for _ in range(options.rounds):
        order.shuffle(cases)
        for way, calls in cases:
            world.barrier()
            alone = compute(int(products), calls, "off")
            sent.fill_(order.random())
            world.barrier()
            channel.start()
            beside = compute(int(products), calls, way)
            posted = time.perf_counter()
            channel.wait()
            waits[way, calls].append(time.perf_counter() - posted)
            ratios[way, calls].append(beside / alone - 1)
            assert bool((received == sent).all())
    if world.rank == 0:
        entries = [
            {
                "way": way,
                "calls": calls,
                "wait": common.summary(waits[way, calls]),
                "slowdown": statistics.median(ratios[way, calls]),
            }
            for way in WAYS
            for calls in CALLS
        ]
        options.rank.write_text(json.dumps(entries))


if __name__ == "__main__":
    main()
