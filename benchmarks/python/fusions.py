"""Measures the savings of each fusion in a training step: time, and peak of torch's allocator.

CosmoFlow (convolution, leaky ReLU in place, average pool), CosmoFlow with batch norm (convolution,
norm, leaky ReLU in place, average pool) and MONAI's UNet (convolution, instance norm, PReLU) are
trained on one rank and split over two. In each round every variant takes a step: all fusions on,
each of them off, all off. A fusion is disabled by replacing the function that looks for it. Shown
is the median over rounds of a step's time without the fusion minus its time with all fusions.

    python benchmarks/python/fusions.py
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

import common

POOL, NORM, PRELU = "ReLU + pool", "norm + ReLU", "norm + PReLU"
VARIANTS: dict[str, tuple[str, ...]] = {
    "all on": (),
    f"without {POOL}": (POOL,),
    f"without {NORM}": (NORM,),
    f"without {PRELU}": (PRELU,),
    "all off": (POOL, NORM, PRELU),
}
OF = {
    "CosmoFlow 128³": (POOL,),
    "CosmoFlow 128³, batch norm": (NORM,),
    "MONAI UNet 96³": (PRELU,),
}
"""Possible fusions by network."""
HEAD = ("network", "ranks", "step", "median, s", "cost, s", "cost, %", "peak, MB", "peak, %")


def main() -> None:
    """Starts the ranks and shows their measurements, or runs one of them."""
    options = common.rank_options(__doc__, 15)
    if options.rank is not None:
        measure(options)
        return
    machine = common.machine(threads_per_rank=1)
    rows: list[dict[str, Any]] = []
    shown = []
    for ranks in (1, 2):
        for name, found in common.on_ranks(__file__, options, ranks=ranks).items():
            on, peak_on = found["seconds"]["all on"], found["peaks"]["all on"]
            for variant, seconds in found["seconds"].items():
                step, cost = common.summary(seconds), common.paired(seconds, on)
                peak = found["peaks"][variant]
                names = {"network": name, "ranks": ranks, "variant": variant}
                rows.append({**names, "step": step, "cost": cost, "peak_mb": peak / 1e6})
                percent = cost / common.summary(on)["median"] * 100
                more = (peak / peak_on - 1) * 100
                shown.append((*names.values(), step["median"], cost, percent, peak / 1e6, more))
    common.show(HEAD, shown)
    common.write({"machine": machine, "rows": rows}, "fusions", options)


def measure(options: argparse.Namespace) -> None:
    """Measures the steps of each network with and without fusions; rank 0 writes the results."""
    import pydist

    world = pydist.init().world
    mesh = pydist.Mesh(world, 1, (world.size, 1, 1))
    off = switches()
    results = {}
    for name, fusions in OF.items():
        step = make_step(name, mesh, options.quick)
        variants = {
            variant: [patch for fusion in switched for patch in off[fusion]]
            for variant, switched in VARIANTS.items()
            if variant == "all off" or set(switched) <= set(fusions)
        }
        peaks = {}
        for variant, patches in variants.items():
            with common.replaced(patches):
                step()  # chooses kernels, creates buffers
                peaks[variant] = common.peak(step)
        steps = dict.fromkeys(variants, step)
        seconds = common.in_turns(steps, options.rounds, world.barrier, variants)
        results[name] = {"seconds": seconds, "peaks": peaks}
    if world.rank == 0:
        options.rank.write_text(json.dumps(results))


def make_step(name: str, mesh: Any, quick: bool) -> Callable[[], None]:
    """Returns a training step of a network: forward, backward, SGD."""
    import torch
    from monai.networks.nets.unet import UNet
    from torch import nn

    import pydist
    from pydist.models import CosmoFlow

    torch.manual_seed(0)
    net: nn.Module
    target: torch.Tensor
    if name.startswith("MONAI"):
        width, channels = 32 if quick else 96, 1
        net = UNet(3, 1, 2, channels=(16, 32, 64, 128), strides=(2, 2, 2), num_res_units=2)
        target = pydist.distribute_tensor(torch.rand(1, 2, *(width,) * 3), mesh)
    else:
        width, channels = 64 if quick else 128, 4
        net = CosmoFlow(width, dropout=0.0, batch_norm=name.endswith("batch norm"))
        target = torch.rand(1, 4)
    model = pydist.parallelize(net, mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    x = pydist.distribute_tensor(torch.rand(1, channels, *(width,) * 3), mesh)

    def step() -> None:
        nn.functional.mse_loss(model(x), target).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    return step


def switches() -> dict[str, list[common.Patch]]:
    """Returns the patches that disable each fusion."""
    from pydist.ops import activations
    from pydist.ops.fusion.norm import DeferredNorm
    from pydist.ops.pool import pool

    def none(*_: Any, **__: Any) -> None:
        return None

    return {
        POOL: [(pool, "average_pool_of_relu", none)],
        NORM: [(DeferredNorm, "with_relu", none)],
        PRELU: [(activations, "parametric", none)],
    }


if __name__ == "__main__":
    main()
