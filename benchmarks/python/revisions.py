"""Two installed revisions of pydist in turns: did a change make anything slower?

Each revision is installed in a Python environment of its own; its ranks are jobs that wait while
those of the other work. Steps are forward, backward and SGD on 2 ranks, split over depth; "forward"
is MONAI's UNet at 32³, where the Python around the kernels is most of the time, on 1 and 2 ranks.
Shown is the median over rounds of the ratio after / before.

    python benchmarks/python/revisions.py --before OTHER/bin/python --commit d61e9eb
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
import jobs

CASES = {
    "conv stack, 64³": ("stack", 64, 2),
    "conv stack, 128³": ("stack", 128, 2),
    "CosmoFlow, 64³": ("cosmoflow", 64, 2),
    "MONAI UNet, 96³": ("unet", 96, 2),
    "forward of MONAI UNet, 32³": ("forward", 32, 2),
    "forward of MONAI UNet, 32³, 1 rank": ("forward", 32, 1),
}
"""Network, width and number of ranks by title."""
AT_ONCE = {"forward": 20}
"""Steps per timing, of those that take milliseconds."""
HEAD = ("step", "before, s", "after, s", "after / before", "quartiles")


def main() -> None:
    """Starts the jobs and shows their times, or runs one of the ranks."""
    if len(sys.argv) > 1 and sys.argv[1] == "--serve":
        serve()
        return
    parser = common.parser(__doc__, rounds=41)
    parser.add_argument("--before", required=True, help="Python with the earlier revision")
    parser.add_argument("--commit", required=True, help="commit of the earlier revision")
    parser.add_argument("--after", default=sys.executable, help="Python with the later one (this)")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    shown = []
    machine = common.machine(threads_per_rank=1)
    for title, (network, width, ranks) in CASES.items():
        found = compare(options, network, width // 2 if options.quick else width, ranks)
        ratios = [b / a for a, b in zip(found["before"], found["after"], strict=True)]
        ratio = common.summary(ratios)
        steps = {name: common.summary(seconds) for name, seconds in found.items()}
        rows.append({"step": title, "ranks": ranks, **steps, "after_over_before": ratio})
        quartiles = " ".join(f"{each:.3f}" for each in ratio["quartiles"])
        medians = steps["before"]["median"], steps["after"]["median"], ratio["median"]
        shown.append((title, *medians, quartiles))
    common.show(HEAD, shown)
    common.write({"machine": machine, "before": options.commit, "rows": rows}, "revisions", options)


def compare(
    options: argparse.Namespace, network: str, width: int, ranks: int
) -> dict[str, list[float]]:
    """Returns the seconds of a step of both revisions, by round."""
    pythons = {"before": options.before, "after": options.after}
    with tempfile.TemporaryDirectory() as folder:

        def start(name: str) -> jobs.Job:
            # Kernels are chosen anew, by each revision for itself.
            variables = {"PYDIST_CACHE": str(Path(folder, name))}
            arguments = ("--serve", network, str(width))
            return jobs.Job(__file__, ranks, arguments, python=pythons[name], variables=variables)

        def step(name: str, _: int) -> float:
            return max(running[name].ask("step"))

        starts: dict[str, Callable[[], jobs.Job]] = {
            name: lambda name=name: start(name)  # type: ignore[misc]  # mypy: no default seen
            for name in pythons
        }
        with jobs.running(**starts) as running:
            rounds = 3 if options.quick else options.rounds
            return jobs.interleave(list(pythons), rounds, step, warm_up=3)


def serve() -> None:
    """Runs steps on one rank, of the revision that this Python has."""
    import pydist

    network, width = sys.argv[2], int(sys.argv[3])
    world = pydist.init().world
    mesh = pydist.Mesh(world, 1, (world.size, 1, 1))
    step = make_step(network, width, mesh)
    times = AT_ONCE.get(network, 1)

    def answer(_: str) -> float:
        world.barrier()
        meter = jobs.Meter()
        return statistics.mean([meter.measure(network, step) for _ in range(times)])

    jobs.serve(world.rank, answer)


def make_step(network: str, width: int, mesh: Any) -> Callable[[], None]:
    """Returns a step of a network, which has run often enough to choose its kernels."""
    import torch
    from monai.networks.nets.unet import UNet
    from torch import nn

    import pydist
    from pydist.models import CosmoFlow

    torch.manual_seed(0)
    net: nn.Module
    if network == "stack":
        widths = (4, 16, 16, 16, 16)
        layers = [
            layer
            for inputs, outputs in itertools.pairwise(widths)
            for layer in (nn.Conv3d(inputs, outputs, 3, padding=1), nn.ReLU())
        ]
        net = nn.Sequential(*layers)
    elif network == "cosmoflow":
        net = CosmoFlow(width, dropout=0.0)
    else:
        net = UNet(3, 1, 2, channels=(16, 32, 64, 128), strides=(2, 2, 2), num_res_units=2)
    channels = 1 if isinstance(net, UNet) else 4
    model = pydist.parallelize(net, mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    x = pydist.distribute_tensor(torch.rand(1, channels, *(width,) * 3), mesh)

    def forward() -> None:
        with torch.no_grad():
            model(x)

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    chosen = forward if network == "forward" else step
    for _ in range(6):
        chosen()
    return chosen


if __name__ == "__main__":
    main()
