"""Measures the memory per rank of a training step of CosmoFlow on 1, 2 and 4 ranks.

Shown is the memory of a step beyond the model: the peak of resident memory over some steps, minus
resident memory after creation of model and optimizer. Adam creates its state in the first step, so
it counts, and is shown. Each figure comes from new processes; the ratio to one rank, with default
malloc, is the saving by the split. More rows are with free memory returned during backward
(`pydist.memory.relieve`), as in `init(keep_freed_memory=False)` on several ranks (the reducer
returns it, which one rank lacks), and with pydist's malloc settings, which keep freed memory.

    python benchmarks/python/memory.py --width 128
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import common
import jobs

SPATIAL = {1: (1, 1, 1), 2: (2, 1, 1), 4: (4, 1, 1)}
PLAIN = "plain torch"
DEFAULT, GIVEN_BACK, KEPT = "as it comes", "given back in backward", "kept"
"""Treatment of freed memory."""


def main() -> None:
    parser = common.parser(__doc__, rounds=3)
    parser.add_argument("--width", type=int, default=128, help="edge of the cube (128)")
    parser.add_argument("--batch", type=int, default=1, help="samples a step (1)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], choices=sorted(SPATIAL))
    parser.add_argument("--mpi", default="auto", help="openmpi, mpich or auto")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not Path("/proc/self/clear_refs").exists():
        parser.error("resident memory is read from /proc, which only Linux has")
    if options.worker:
        work(**json.loads(options.worker))
        return
    if options.quick:
        options.width, options.rounds, options.ranks = 32, 1, [1, 2]
    settings = (DEFAULT, GIVEN_BACK) if options.quick else (DEFAULT, GIVEN_BACK, KEPT)
    setting = {"width": options.width, "batch": options.batch}
    ours = [(n, m) for m in settings for n in options.ranks if (n, m) != (1, GIVEN_BACK)]
    cases = [(PLAIN, 1, DEFAULT), *(("pydist", *each) for each in ours)]
    rows = []
    for name, ranks, malloc in cases:
        text = json.dumps({**setting, "malloc": malloc, "plain": name == PLAIN})
        job = {"job": lambda r=ranks, t=text: jobs.Job(__file__, r, ["--worker", t], options.mpi)}
        with jobs.running(**job) as started:
            answers = started["job"].ask("measure", steps=options.rounds)
            library = started["job"].ask("library")[0]
        most = max(answers, key=lambda answer: answer["step_mb"])
        rows.append({"name": name, "ranks": ranks, "malloc": malloc, **most})
    one = next(r for r in rows if (r["name"], r["ranks"], r["malloc"]) == ("pydist", 1, DEFAULT))
    for row in rows:
        row["ratio"] = row["step_mb"] / one["step_mb"]
    print(f"CosmoFlow {options.width}³, batch {options.batch}, MB per rank, {options.rounds} steps")
    head = ("", "ranks", "freed memory", "with the model", "peak", "of the step", "of it Adam's")
    names = ("name", "ranks", "malloc", "model_mb", "peak_mb", "step_mb", "optimizer_mb", "ratio")
    common.show((*head, "/ one rank's"), [tuple(row[key] for key in names) for row in rows])
    described = common.machine(mpi_library=library)
    result = {"machine": described, **setting, "steps": options.rounds, "rows": rows}
    common.write(result, f"memory_{options.width}", options)


# -- the ranks ------------------------------------------------------------------------------


def work(width: int, batch: int, malloc: str, plain: bool) -> None:
    """Runs a rank of one of the jobs."""
    import pydist
    from pydist.memory import allow_relief

    world = pydist.init(keep_freed_memory=malloc == KEPT).world
    if malloc == DEFAULT:
        allow_relief(False)

    def answer(what: str, **details: Any) -> Any:
        if what == "library":
            return jobs.library(world)
        return _measure(world, width, batch, plain, **details)

    jobs.serve(world.rank, answer)


def _measure(world: Any, width: int, batch: int, plain: bool, steps: int) -> dict[str, float]:
    import cosmoflow_contestants as c
    import torch

    from pydist.models import CosmoFlow

    torch.manual_seed(0)
    model = CosmoFlow(width, batch_norm=True, dropout=0.0)
    spatial = SPATIAL[world.size]
    made = c.Plain(model, 1) if plain else c.Pydist(model, world, spatial)
    world.barrier()
    # Resets the peak, which is that of imports and of the model's creation.
    Path("/proc/self/clear_refs").write_text("5")
    before = common.status_mb("VmRSS")
    kinds = {kind: common.status_mb(kind) for kind in ("RssAnon", "RssFile", "RssShmem")}
    generator = torch.Generator().manual_seed(world.rank)
    losses = []
    for _ in range(steps):
        shard = torch.empty(batch, 4, *(width // n for n in spatial))
        shard.uniform_(-1, 1, generator=generator)
        made.take(shard, torch.ones(batch, 4))
        del shard
        losses.append(made.step())
    if not all(map(math.isfinite, losses)):
        raise SystemExit("the loss is not a number")
    peak = common.status_mb("VmHWM")
    return {
        "model_mb": before,
        "peak_mb": peak,
        "step_mb": peak - before,
        # Remaining memory: own arrays, touched code of libraries, MPI's shared segments.
        "stays_mb": {kind: common.status_mb(kind) - was for kind, was in kinds.items()},
        "optimizer_mb": made.state_bytes() / 1e6,
        "loss": losses[0],
    }


if __name__ == "__main__":
    main()
