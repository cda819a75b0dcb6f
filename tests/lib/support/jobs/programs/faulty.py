"""Trains until a rank fails in a given way; `tests/parallel/test_faults.py` starts it.

    faulty.py FOLDER FAULT

Each rank writes its process id to FOLDER; the failing rank also writes the time of its failure.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
from torch import nn

import pydist

FOLDER, FAULT = Path(sys.argv[1]), sys.argv[2]


def fail(_: object = None) -> None:
    (FOLDER / "time").write_text(str(time.time()))
    if FAULT == "exit":
        sys.exit(5)
    if FAULT == "kill":
        os.kill(os.getpid(), 9)
    raise ArithmeticError("the fault")


def main() -> None:
    world = pydist.init(spatial=(2, 1, 1)).world
    (FOLDER / f"pid{world.rank}").write_text(str(os.getpid()))
    world.barrier()
    if FAULT == "mesh":
        (FOLDER / "time").write_text(str(time.time()))
        pydist.init(spatial=(3, 1, 1))
    if FAULT == "sleep":
        (FOLDER / "ready").touch()
        time.sleep(100 if world.rank == 1 else 0)  # rank 0 waits inside the MPI library
        world.barrier()
    train(failing=world.rank == 1)


def train(failing: bool) -> None:
    mesh = pydist.init(spatial=(2, 1, 1))
    net = nn.Sequential(
        nn.Conv3d(1, 64, 3, padding=1), nn.Conv3d(64, 128, 3, padding=1), nn.Conv3d(128, 1, 1)
    )
    model = pydist.parallelize(net, mesh)
    weight = net[1].weight
    assert isinstance(weight, nn.Parameter)
    if failing and FAULT in ("forward", "exit", "kill"):
        net[1].register_forward_hook(lambda *_: fail())
    if failing and FAULT == "backward":
        net[1].register_full_backward_hook(lambda *_: fail())
    if failing and FAULT == "buckets":
        # Gradients become ready from the last layer to the first.
        weight.register_post_accumulate_grad_hook(fail)
    for _ in range(3):
        loss = model(torch.ones(1, 1, 4, 4, 4)).mean()
        loss.backward()


if __name__ == "__main__":
    main()
