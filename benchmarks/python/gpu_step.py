"""Measures the overhead of the ability to split: one-rank steps with pydist and plain torch.

CosmoFlow as in MLPerf HPC and as in the paper, at 128³, in the same precision and memory format,
with the same fused optimizer; each directly and as one CUDA graph, which is also made without the
fusions of activations with norms and pools. Times are of consecutive steps,
by events, and so include the device's waits for the host. Goals: 1.02 times plain torch, and 200
samples/s of the MLPerf network in bf16 (published: 207 per GPU on one H100 of a large system).
A step uses far more memory than the L2 cache.

    python benchmarks/python/gpu_step.py
"""

from __future__ import annotations

import argparse
import gc
import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import common
import gpu
import torch
from device_steps import Plain, Split, adam, sgd
from fusions import switches

from pydist.comm import LocalTransport
from pydist.errors import PydistError
from pydist.mesh import Mesh
from pydist.models import CosmoFlow
from pydist.models.cosmoflow import Variant
from pydist.train.device import in_format, own_stream

UNFUSED = "pydist unfused, graph"
GOAL, SAMPLES_GOAL, PUBLISHED = 1.02, 200.0, 207.0
STEPS = 4
"""Consecutive steps per timing."""


class Config(NamedTuple):
    network: Variant
    precision: str
    batch: int

    def __str__(self) -> str:
        return f"{self.network}, {self.precision}, batch {self.batch}"


# Configurations with goals come first.
CONFIGS = [
    Config("mlperf", "bf16", 8),
    Config("mlperf", "bf16", 1),
    Config("paper", "bf16", 1),
    Config("paper", "fp32", 1),
    Config("mlperf", "fp32", 1),
    Config("paper", "bf16", 8),
    Config("paper", "tf32", 1),
    Config("mlperf", "tf32", 1),
    Config("mlperf", "tf32", 8),
    Config("paper", "tf32", 8),
    Config("paper", "fp32", 8),
    Config("mlperf", "fp32", 8),
]


def contestants(config: Config, width: int, device: torch.device) -> dict[str, Any]:
    """Returns plain torch and pydist, directly and, on a CUDA device, as graphs."""
    amp = config.precision == "bf16"
    memory_format = torch.channels_last_3d if amp else torch.contiguous_format
    optimizer = sgd if config.network == "mlperf" else adam
    generator = torch.Generator().manual_seed(0)
    shape = (config.batch, 4, width, width, width)
    inputs = torch.rand(shape, generator=generator).to(device)
    inputs = inputs.contiguous(memory_format=memory_format)
    targets = torch.rand(config.batch, 4, generator=generator).to(device)

    def model() -> torch.nn.Module:
        torch.manual_seed(0)
        made = CosmoFlow(width, variant=config.network).to(device)
        in_format(made, memory_format)
        return made

    made: dict[str, Callable[[], Plain | Split]] = {}
    for graph in (False, True) if device.type == "cuda" else (False,):
        suffix = ", graph" if graph else ""
        made["torch" + suffix] = partial(
            lambda graph: Plain(model(), inputs, targets, amp, optimizer, graph), graph
        )
        made["pydist" + suffix] = partial(
            lambda graph: Split(
                model(), Mesh(LocalTransport(), seed=1), shape, inputs, targets, amp, optimizer,
                graph,
            ),
            graph,
        )  # fmt: skip
    if device.type == "cuda":
        made[UNFUSED] = partial(_unfused, made["pydist, graph"])
    return made


def _unfused(make: Callable[[], Plain | Split]) -> Plain | Split:
    """Makes a contestant without the fusions of `fusions.py`; a graph keeps what it captured."""
    with common.replaced([patch for patches in switches().values() for patch in patches]):
        return make()


def measure(
    config: Config, options: argparse.Namespace, device: torch.device, budget: gpu.Budget
) -> dict[str, Any]:
    """Times a configuration; contestants that can't run go to the budget's `failed`."""
    watch = gpu.Stopwatch(device)
    steps = 1 if options.quick else STEPS
    made: dict[str, Plain | Split] = {}
    with gpu.precision(config.precision):
        for name, make in contestants(config, 32 if options.quick else 128, device).items():
            try:
                made[name] = make()
            except (RuntimeError, PydistError) as error:
                budget.failed.append(f"{config}, {name} ({str(error).splitlines()[0]})")
        seconds = gpu.timed(
            {name: partial(watch.steps, each.step, steps) for name, each in made.items()},
            options.rounds,
            most=4.0,
        )
        losses = {name: float(each.loss) for name, each in made.items()}
        for each in made.values():
            each.close()
    if not all(map(math.isfinite, losses.values())):
        budget.failed.append(f"{config}: losses {losses}")
    row: dict[str, Any] = {**config._asdict(), "losses": losses}
    row["steps"] = {name: common.summary(taken) for name, taken in seconds.items()}
    for suffix in ("", ", graph"):
        if {"torch" + suffix, "pydist" + suffix} <= seconds.keys():
            ours, plain = seconds["pydist" + suffix], seconds["torch" + suffix]
            ratios = [one / other for one, other in zip(ours, plain, strict=True)]
            row["ratio" + suffix.replace(", ", "_")] = common.summary(ratios)["median"]
    if {UNFUSED, "pydist, graph"} <= seconds.keys():
        pairs = zip(seconds[UNFUSED], seconds["pydist, graph"], strict=True)
        row["unfused_over_fused"] = common.summary([one / two for one, two in pairs])["median"]
    best = min(
        (row["steps"][name]["median"] for name in row["steps"] if "pydist" in name),
        default=math.inf,
    )
    row["samples_per_s"] = config.batch / best
    return row


def main() -> None:
    options = gpu.options_of(__doc__, rounds=12).parse_args()
    device = gpu.device_of(options)
    budget = gpu.Budget(options.seconds)
    rows = []
    for config in CONFIGS[1:4:2] if options.quick else CONFIGS:
        if not budget.allows(str(config)):
            continue
        with own_stream(device):
            rows.append(measure(config, options, device, budget))
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    names = ["torch", "pydist", "torch, graph", "pydist, graph"]
    common.show(
        ["", *(f"{name} ms" for name in names), "ratio", "graphs", "unfused", "samples/s"],
        [
            [
                str(Config(row["network"], row["precision"], row["batch"])),
                *(row["steps"][n]["median"] * 1e3 if n in row["steps"] else None for n in names),
                row.get("ratio"), row.get("ratio_graph"), row.get("unfused_over_fused"),
                row["samples_per_s"],
            ]
            for row in rows
        ],
    )  # fmt: skip
    worst = {
        which: max((row[key] for row in rows if key in row), default=None)
        for which, key in {"as they are": "ratio", "as graphs": "ratio_graph"}.items()
    }
    said = ", ".join(f"{each} {ratio:.3f}" for each, ratio in worst.items() if ratio is not None)
    mlperf = [row for row in rows if (row["network"], row["precision"]) == ("mlperf", "bf16")]
    fastest = max(row["samples_per_s"] for row in mlperf)
    print(
        f"pydist over torch at most: {said} (goal {GOAL}); MLPerf network in bf16: {fastest:.0f}"
        f" samples/s (goal {SAMPLES_GOAL:.0f}, published {PUBLISHED:.0f} per GPU)"
    )
    gpu.report(
        options, device, budget, rows=rows, worst_ratio=worst, goal=GOAL,
        mlperf_samples_per_s=fastest, published_samples_per_s=PUBLISHED,
    )  # fmt: skip


if __name__ == "__main__":
    main()
