"""`tools/kills`: kills operations at each step and at random instants, and lets them end."""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch

from support.killed.children import in_child
from support.killed.operations import OPERATIONS, Operation


def kill(operation: Operation, kills: int, *, seed: int = 0, every: int = 8) -> Counter[str]:
    """Kills an operation, and now and then lets it end, when its result must be whole.

    Two thirds of the kills are at steps in the file system, spread over all of a run, and one third
    at random instants.

    Args:
        operation: the operation.
        kills: their number.
        seed: of the random instants.
        every: number of kills before a run that is not killed.

    Returns:
        The kills by what they left, and the runs that ended.
    """
    chance, counts = random.Random(seed), Counter[str]()
    first = in_child(operation.work, operation.folder)
    operation.completed(first.result)
    steps, seconds = first.steps, first.seconds
    at_steps = max(1, 2 * kills // 3)
    killed = 0
    while killed < kills:
        operation.start_anew()
        for _ in range(every):  # upon what the kills before have left
            if killed < at_steps:
                step = 1 + killed * steps // at_steps
                ended = in_child(operation.work, operation.folder, step=step)
            else:
                delay = chance.uniform(0.0, 1.1) * seconds
                ended = in_child(operation.work, operation.folder, delay=delay)
            if ended.killed:
                counts[operation.check()] += 1
                killed += 1
            else:  # it went on from what was there, and had less to do
                operation.completed(ended.result)
                operation.start_anew()
        ended = in_child(operation.work, operation.folder)
        assert not ended.killed
        operation.completed(ended.result)
        counts["runs that ended"] += 1
        seconds = ended.seconds  # with the wait for an abandoned lock
    return counts


def main(arguments: Sequence[str] | None = None) -> int:
    """Kills the operations that the command line names."""
    parser = argparse.ArgumentParser(prog="tools/kills", description=__doc__)
    parser.add_argument("operations", nargs="*", help=f"of {', '.join(OPERATIONS)} (all)")
    parser.add_argument("--kills", type=int, default=120, help="of each operation (120)")
    parser.add_argument("--seed", type=int, default=0, help="of the random instants (0)")
    parser.add_argument("--every", type=int, default=8, help="kills before a run may end (8)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # a fork has none of a pool's threads
    # multiprocessing would warn about the semaphores of each killed process.
    os.environ["PYTHONWARNINGS"] = "ignore:resource_tracker"
    if unknown := set(options.operations) - set(OPERATIONS):
        parser.error(f"{', '.join(unknown)}: choose of {', '.join(OPERATIONS)}")
    for name in options.operations or OPERATIONS:
        with tempfile.TemporaryDirectory() as folder:
            operation = OPERATIONS[name](Path(folder).resolve())
            counts = kill(operation, options.kills, seed=options.seed, every=options.every)
        left = ", ".join(f"{number} × {what}" for what, number in sorted(counts.items()))
        sys.stdout.write(f"{name}: {options.kills} kills; {left}\n")
        sys.stdout.flush()
    return 0
