"""Compares a step of a 3D U-Net in two stages: pydist's pipelines, torch's, and one rank alone.

Two ranks of one thread each train on a batch of micro-batches, cut at the same module by pydist and
by torch.distributed.pipelining over gloo; by pydist where its plan cuts; and by pydist in four
stages, which the ranks have in turn or back and forth. In each round every contestant takes a step.
"Alone" runs all micro-batches in sequence on each rank. Its half, times (M + 1) / M for the bubble,
is the ideal of two equal stages with the same kernels. Gradients are compared before anything is
timed.

    python benchmarks/python/pipelines.py
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import common

MICRO_BATCHES = 8
CUT = "unpool.0"
"""Module where the second stage begins: the decoder. torch can't cut before an in-place ReLU."""
HEAD = ("contestant", "median, ms", "least, ms", "alone / it", "it / ideal")
ALONE = {"torch": "alone, torch", "pydist": "alone, pydist"}


def main() -> None:
    """Starts the ranks and shows their measurements, or runs one of them."""
    parser = common.parser(__doc__, rounds=15)
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.rounds = 2
    if options.rank is not None:
        measure(options)
        return
    machine = common.machine(threads_per_rank=1)
    found = common.on_ranks(__file__, options)
    rows = [{"contestant": n, "step": common.summary(s)} for n, s in found["times"].items()]
    medians = {row["contestant"]: row["step"]["median"] for row in rows}
    for row in rows:
        package = next(name for name in ALONE if name in row["contestant"])
        row["alone"] = medians[ALONE[package]]
    shown = [line(row["contestant"], row["step"], row["alone"]) for row in rows]
    for name, plan in found["plans"].items():
        print(f"{name}\n{plan}\n")
    common.show(HEAD, shown)
    result = {"machine": machine, "plans": found["plans"], "rows": rows}
    common.write(result, "pipelines", options)


def line(contestant: str, step: dict[str, Any], alone: float) -> tuple[Any, ...]:
    """Returns a row of the table; `alone` is the median of one rank with the same kernels."""
    median, ideal = step["median"], alone / 2 * (MICRO_BATCHES + 1) / MICRO_BATCHES
    return contestant, median * 1e3, step["min"] * 1e3, alone / median, median / ideal


def measure(options: argparse.Namespace) -> None:
    """Measures on one rank: each round has a step of every contestant, in the same order."""
    import torch

    import pydist
    from pydist.models import UNet3d
    from pydist.stages import Stages, init_stages, pipeline

    stages = init_stages(2)
    torch.manual_seed(0)
    net = UNet3d(1, 3, 8, 2) if options.quick else UNet3d(1, 3, 16, 3)
    size = 16 if options.quick else 32
    x = torch.randn(MICRO_BATCHES, 1, size, size, size)
    labels = torch.randint(3, (MICRO_BATCHES, size, size, size))
    loss_of = torch.nn.functional.cross_entropy

    def alone(model: Any) -> Callable[[], None]:
        def step() -> None:
            for m in range(MICRO_BATCHES):
                loss = loss_of(model(x[m : m + 1]), labels[m : m + 1]) / MICRO_BATCHES
                loss.backward()

        return step

    steps: dict[str, tuple[Any, Callable[[], Any]]] = {}
    whole = copy.deepcopy(net)
    steps[ALONE["torch"]] = whole, alone(whole)
    mesh = pydist.Mesh(pydist.comm.LocalTransport(), 1)
    same = pydist.parallelize(copy.deepcopy(net), mesh)
    steps[ALONE["pydist"]] = same, alone(same)
    plans: dict[str, str] = {}
    in_turn, back = (Stages(stages.world, [{}] * 2, order=o) for o in ((0, 1, 0, 1), (0, 1, 1, 0)))
    for where, cuts, schedule, placed in (
        ("same cut", [CUT], "gpipe", stages), ("same cut", [CUT], "1f1b", stages),
        ("own plan", None, "gpipe", stages), ("own plan", None, "1f1b", stages),
        ("own plan", None, "zero-bubble", stages), ("in turn", None, "1f1b", in_turn),
        ("forth and back", None, "1f1b", back), ("forth and back", None, "zero-bubble", back),
    ):  # fmt: skip
        made = pipeline(copy.deepcopy(net), placed, x[:1], micro_batches=MICRO_BATCHES,
                        schedule=schedule, cuts=cuts)  # fmt: skip
        name = f"pydist, {where}, {schedule}"
        plans[name] = str(made.plan)
        steps[name] = made.model, partial(made.step, x, labels, loss_of)
    for schedule in ("GPipe", "1F1B"):
        steps[f"torch, {schedule}"] = torch_pipeline(
            copy.deepcopy(net), stages.index, x, labels, loss_of, schedule
        )
    for model, step in steps.values():
        for _ in range(3):
            model.zero_grad()
            step()
    compare({name: model for name, (model, _) in steps.items()})
    chosen: dict[str, Callable[[], Any]] = {name: step for name, (_, step) in steps.items()}
    times = common.in_turns(chosen, options.rounds, stages.world.barrier)
    if stages.world.rank == 0:
        options.rank.write_text(json.dumps({"plans": plans, "times": times}))


def torch_pipeline(
    net: Any, rank: int, x: Any, labels: Any, loss_of: Any, schedule: str
) -> tuple[Any, Callable[[], Any]]:
    """Returns torch's part of the network on this rank, and its step."""
    import torch
    from torch.distributed.pipelining import (
        Schedule1F1B,
        ScheduleGPipe,
        SplitPoint,
        pipeline,
    )

    made = pipeline(net, mb_args=(x[:1],), split_spec={CUT: SplitPoint.BEGINNING})
    stage = made.build_stage(rank, torch.device("cpu"))
    kind = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}[schedule]
    runs = kind(stage, MICRO_BATCHES, loss_fn=loss_of)
    if rank == 0:
        return stage.submod, lambda: runs.step(x)
    return stage.submod, lambda: runs.step(target=labels, losses=[])


def compare(models: dict[str, Any]) -> None:
    """Compares all gradients that this rank has with those of one rank alone."""
    expected = {n: p.grad for n, p in models[ALONE["torch"]].named_parameters()}
    for name, model in models.items():
        found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        assert found, name
        for parameter, grad in found.items():
            whole = expected[parameter]
            off = float((grad - whole).norm() / whole.norm())
            assert off < 1e-2, f"{name}, {parameter}: off by {off:.1e}"  # fp32, small batches


if __name__ == "__main__":
    main()
