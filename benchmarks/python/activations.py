"""Measures the activation memory per rank of a U-Net's training step, relative to one rank.

Shown is the peak of torch's allocator in a forward and a backward, minus its start: activations,
their gradients and buffers. Gradients of parameters exist before, and do not count; nor does memory
of oneDNN and the MPI library (`memory.py` shows resident memory). The profiler's events are the
source, so that the figures are the same in every run.

    python benchmarks/python/activations.py --network paper --width 64
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import common
import jobs
from unet_step import CLASSES, make_network

SPATIAL = {1: (1, 1, 1), 2: (2, 1, 1), 4: (2, 2, 1), 8: (2, 2, 2)}
PLAIN = "plain torch"


def main() -> None:
    parser = common.parser(__doc__, rounds=1)
    parser.add_argument("--network", choices=["monai", "paper"], default="monai")
    parser.add_argument("--width", type=int, default=96, help="edge of the cube (96)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], choices=sorted(SPATIAL))
    parser.add_argument("--mpi", default="auto", help="openmpi, mpich or auto")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(**json.loads(options.worker))
        return
    width = 64 if options.quick else options.width
    rows = []
    for name, ranks in [(PLAIN, 1), *(("pydist", ranks) for ranks in sorted({1, *options.ranks}))]:
        setting = {"network": options.network, "width": width, "plain": name == PLAIN}
        arguments = ["--worker", json.dumps(setting)]
        job = {"job": lambda r=ranks, a=arguments: jobs.Job(__file__, r, a, options.mpi)}
        with jobs.running(**job) as started:
            peaks = started["job"].ask("measure")
            library = started["job"].ask("library")[0]
        rows.append({"name": name, "ranks": ranks, "peak_mb": max(peaks), "least_mb": min(peaks)})
    one = next(r for r in rows if (r["name"], r["ranks"]) == ("pydist", 1))
    for row in rows:
        row["ratio"] = row["peak_mb"] / one["peak_mb"]
    print(f"{options.network} U-Net, {width}³, batch 1: MB at the peak of a step")
    cells = [
        tuple(r[key] for key in ("name", "ranks", "peak_mb", "least_mb", "ratio")) for r in rows
    ]
    common.show(("", "ranks", "of a rank, at most", "at least", "/ one rank's"), cells)
    described = common.machine(mpi_library=library)
    result = {"machine": described, "network": options.network, "width": width, "rows": rows}
    common.write(result, f"activations_{options.network}_{width}", options)


# -- the ranks ------------------------------------------------------------------------------


def work(network: str, width: int, plain: bool) -> None:
    """Runs a rank of one of the jobs."""
    import pydist

    world = pydist.init().world

    def answer(what: str) -> Any:
        return jobs.library(world) if what == "library" else _measure(world, network, width, plain)

    jobs.serve(world.rank, answer)


def _measure(world: Any, network: str, width: int, plain: bool) -> float:
    """Returns megabytes."""
    import torch

    import pydist

    model = make_network(network, width)
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(1, 1, width, width, width, generator=generator)
    target = torch.randint(CLASSES, (1, width, width, width), generator=generator)
    if not plain:
        mesh = pydist.Mesh(world, 1, SPATIAL[world.size])
        model = pydist.parallelize(model, mesh)
        x = pydist.distribute_tensor(x, mesh)

    def step() -> None:
        torch.nn.functional.cross_entropy(model(x), target).backward()

    step()  # chooses kernels, creates gradients and buffers
    return common.peak(step) / 1e6


if __name__ == "__main__":
    main()
