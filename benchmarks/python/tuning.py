"""Measures how kernel choices of a busy machine are corrected, and the cost of autotuning.

Correction: two ranks train a stack of four convolutions with ReLU on 64³. A run on a quiet machine
fills one cache; a run beside two foreign processes that compute all the time fills another. Ten
runs on the quiet machine follow with the second cache, each as its own job; then runs with either
cache take turns. Shown is the time of their steps, the second cache's relative to the first's.

Cost: the first twelve steps of CosmoFlow at 256³ on one rank, with an empty cache, and the time of
measuring in units of steps.

    python benchmarks/python/tuning.py
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import common

LATER, TURNS = 10, 7
FIRST_STEPS = 12
COSMOFLOW = 128
"""Minimum width for training CosmoFlow instead of the stack."""
BUSY = "while True: sum(range(100_000))"


def main() -> None:
    """Starts the runs and shows their measurements, or runs a rank of one."""
    parser = common.parser(__doc__, rounds=20)
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--width", type=int, default=64, help=argparse.SUPPRESS)
    parser.add_argument("--part", choices=["corrected", "cost"], help="only this part")
    options = parser.parse_args()
    if options.rank is not None:
        measure(options)
        return
    if options.quick:
        options.rounds = 3
    result: dict[str, Any] = {"machine": common.machine(threads_per_rank=1)}
    with tempfile.TemporaryDirectory() as folder:
        if options.part != "cost":
            result["corrected"] = corrected(options, Path(folder))
        if options.part != "corrected":
            result["cost"] = cost(options, Path(folder))
    common.write(result, "tuning", options)


# -- a choice that was made on a busy machine -----------------------------------------------


def corrected(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Measures steps of runs that begin with either cache."""
    quiet, busy = folder / "quiet", folder / "busy"
    later, turns = (2, 1) if options.quick else (LATER, TURNS)

    def run(what: str, cache: Path) -> dict[str, Any]:
        found = job(options, cache, 32 if options.quick else 64, 2)
        row = {"run": what, "step": statistics.median(found["steps"][-options.rounds :])}
        print(f"{what}: {row['step'] * 1e3:.1f} ms a step", flush=True)
        return {**row, "measured": found["problems"], "measuring": found["measuring"]}

    rows = [run("quiet, the first", quiet)]
    with foreign_processes(2):
        rows.append(run("busy, the first", busy))
    rows += [run(f"busy, then quiet, run {i + 1}", busy) for i in range(later)]
    ratios = []
    for _ in range(turns):
        pair = [run("quiet cache, in turn", quiet), run("busy cache, in turn", busy)]
        rows += pair
        ratios.append(pair[1]["step"] / pair[0]["step"])
    print(f"busy cache / quiet cache: {statistics.median(ratios):.3f} (of {sorted(ratios)})")
    return rows


@contextmanager
def foreign_processes(count: int) -> Iterator[None]:
    """Starts processes that compute all the time."""
    started = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(count)]
    try:
        yield
    finally:
        for each in started:
            each.kill()
            each.wait()


# -- what measuring costs -------------------------------------------------------------------


def cost(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measures the first steps of a run with an empty cache, in units of later steps."""
    found = job(
        options, folder / "empty", COSMOFLOW if options.quick else 256, 1, steps=FIRST_STEPS
    )
    later = statistics.median(found["steps"][-4:])
    more = sum(found["steps"]) / later - len(found["steps"])
    seconds = ", ".join(f"{each:.1f}" for each in found["steps"])
    print(f"steps with an empty cache: {seconds} s; {found['problems']} problems were measured")
    print(f"measuring and warming up took the time of {more:.1f} steps")
    return {**found, "more_steps": more}


def job(
    options: argparse.Namespace, cache: Path, width: int, ranks: int, steps: int = 0
) -> dict[str, Any]:
    """Runs its own job, with a cache of kernels' times."""
    more = argparse.Namespace(**{**vars(options), "rounds": steps or options.rounds + 5})
    variables = {"PYDIST_CACHE": str(cache), "PYDIST_TUNE": "1"}
    found: dict[str, Any] = common.on_ranks(
        __file__, more, ranks=ranks, more=["--width", str(width)], variables=variables
    )
    return found


def measure(options: argparse.Namespace) -> None:
    """Times steps of the stack on one rank."""
    import torch
    from torch import nn

    import pydist
    from pydist.backend.autotuner import autotuner_of
    from pydist.models import CosmoFlow

    world = pydist.init().world
    mesh = pydist.Mesh(world, 1, (world.size, 1, 1))
    torch.manual_seed(0)
    if options.width >= COSMOFLOW:
        net: nn.Module = CosmoFlow(options.width, dropout=0.0)
    else:
        layers: list[nn.Module] = []
        for inputs in (4, 16, 16, 16):
            layers += [nn.Conv3d(inputs, 16, 3, padding=1), nn.ReLU(inplace=True)]
        net = nn.Sequential(*layers)
    model = pydist.parallelize(net, mesh)
    x = pydist.distribute_tensor(torch.rand(1, 4, *(options.width,) * 3), mesh)
    steps = []
    for _ in range(options.rounds):
        world.barrier()
        began = time.perf_counter()
        model(x).square().mean().backward()
        model.zero_grad()
        world.barrier()
        steps.append(time.perf_counter() - began)
    tuner = autotuner_of(mesh)
    if world.rank == 0:
        found = {"steps": steps, "problems": tuner.problems, "measuring": tuner.seconds}
        options.rank.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
