"""Measures the gain from redistributing thin blocks onto fewer ranks.

Trains CosmoFlow for some steps with `coarsen_if_faster` and, interleaved, without it, on ranks
under MPI, and prints the median time of a step. Run as

    pydist run -n 4 benchmarks/python/thin_blocks.py --width 32
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch
import torch.nn.functional as F

import pydist
from pydist.mesh import Mesh
from pydist.models import CosmoFlow


def step(model: torch.nn.Module, x: torch.Tensor, target: torch.Tensor) -> None:
    model.zero_grad()
    F.mse_loss(model(x), target).backward()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    world = pydist.init().world
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(options.batch, 4, *(options.width,) * 3, generator=generator)
    target = torch.rand(options.batch, 4, generator=generator)
    models = {}
    for name, keep in (("chosen", False), ("kept", True)):
        mesh = Mesh(world, 1, (world.size, 1, 1), keep_thin_blocks=keep)
        models[name] = pydist.parallelize(CosmoFlow(options.width), mesh)
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for round_ in range(options.rounds + 2):
        for name, model in models.items():
            world.barrier()
            start = time.perf_counter()
            step(model, x, target)
            world.barrier()
            if round_ >= 2:
                seconds[name].append(time.perf_counter() - start)
    if world.rank == 0:
        medians = {name: statistics.median(s) for name, s in seconds.items()}
        print(json.dumps({"width": options.width, "ranks": world.size} | medians))
        print(f"kept / chosen: {medians['kept'] / medians['chosen']:.2f}")


if __name__ == "__main__":
    main()
