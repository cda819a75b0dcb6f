"""Compares kernels for a halo slab's contribution, and measures the gain by autotuning.

For layers of CosmoFlow and of the 3D U-Net, forward, dgrad and wgrad: cuDNN on the slab and an
addition ("library"), the tiled kernel ("plain"), the tensor-core kernels ("mma", "tf32"), and the
one that pydist chooses. Results are compared before they are timed. Goals: 1.3 times as fast as the
library in the geometric mean, and no choice slower than the library.

Slabs and boundary planes are small and in the L2 cache, as in a training step.

    python benchmarks/python/gpu_boundary.py
"""

from __future__ import annotations

import argparse
import math
import os
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import common
import gpu
import torch

from pydist import Mesh
from pydist.backend import slab_tuning
from pydist.backend.autotuner import Autotuner
from pydist.backend.problem import ROLES
from pydist.backend.slabs import SlabProblem, run_slab, unsupported
from pydist.comm import LocalTransport

GOAL = 1.3
SLOWER = 1.05
"""Ratio of two medians from which the larger one counts as slower."""
CALLS = 10
# Channels in and out, and the slab's spatial extents.
LAYERS = {
    "CosmoFlow 1, depth": (4, 16, (1, 128, 128)),
    "CosmoFlow 1, width": (4, 16, (128, 128, 1)),
    "CosmoFlow 2": (16, 32, (1, 64, 64)),
    "CosmoFlow 3": (32, 64, (1, 32, 32)),
    "CosmoFlow 4": (64, 128, (1, 16, 16)),
    "CosmoFlow 5": (128, 256, (1, 8, 8)),
    "U-Net, 128³": (32, 64, (1, 128, 128)),
    "U-Net, 64³": (64, 64, (64, 1, 64)),
    "U-Net, 32³": (128, 256, (1, 32, 32)),
}
TINY = {"CosmoFlow 1, depth": (4, 4, (1, 6, 6)), "U-Net": (2, 4, (6, 1, 6))}
# dtype, channels-last, and whether float32 products may be rounded to tf32.
PRECISIONS = {
    "bf16": (torch.bfloat16, True, False),
    "fp32": (torch.float32, False, False),
    "tf32": (torch.float32, True, True),
    "fp16": (torch.float16, True, False),
}


def problem(
    layer: tuple[int, int, tuple[int, int, int]], role: str, precision: str, device: str
) -> SlabProblem:
    """Returns a slab before the first of four planes of outputs, or of their gradient."""
    ci, co, slab = layer
    dtype, channels_last, tf32 = PRECISIONS[precision]
    block = tuple(4 if n == 1 else n for n in slab)
    before = tuple(-1 if n == 1 else 0 for n in slab)
    weight, origin, one = (co, ci, 3, 3, 3), (0, 0, 0), (1, 1, 1)
    shapes = {
        "forward": ((1, ci, *slab), weight, (1, co, *block)),
        "dgrad": ((1, co, *slab), weight, (1, ci, *block)),
        "wgrad": ((1, ci, *slab), (1, co, *block), weight),
    }[role]
    return SlabProblem(
        role, *shapes, before, origin, one, one, one, 1, dtype, channels_last, device, tf32
    )


def contestants(
    case: SlabProblem, like: torch.Tensor, watch: gpu.Stopwatch, budget: gpu.Budget
) -> dict[str, Callable[[], float]]:
    """Returns the kernels that support the problem; results unlike the library's are failures."""
    first, second, target = slab_tuning.operands(case, like)
    where = case.first_lo, case.target_lo
    names = case.candidates if like.is_cuda else ["library", "plain"]
    results = {}
    for name in names:
        if unsupported(name, case, first, second, target):
            continue
        result = target.clone()
        run_slab(name, case, first, second, result, *where)
        results[name] = result.double()
    scale = float(results["library"].abs().max())
    right = []
    for name, result in results.items():
        error = float((result - results["library"]).abs().max()) / scale
        if error <= 2**-6:
            right.append(name)
        else:
            budget.failed.append(f"{name} and the library differ by {error:.1e}: {case}")
    return {
        name: partial(
            watch.kernels, [partial(run_slab, name, case, first, second, target, *where)] * CALLS
        )
        for name in right
    }


def chosen(case: SlabProblem, like: torch.Tensor) -> str:
    """Returns pydist's choice in a run with an empty cache."""
    world = LocalTransport()
    names = slab_tuning.choose(Autotuner(Mesh(world)), [[case]], world, like, learns=True)
    return (names or slab_tuning.by_rule([case]))[0]


def measure(
    options: argparse.Namespace, device: torch.device, budget: gpu.Budget
) -> list[dict[str, Any]]:
    """Returns a row per precision, layer and role, within the time limit."""
    watch, like = gpu.Stopwatch(device), torch.empty(1, device=device)
    layers = TINY if options.quick else LAYERS
    rows = []
    for precision in list(PRECISIONS)[: 2 if options.quick else None]:
        with gpu.precision(precision):
            for title, layer in layers.items():
                if not budget.allows(f"{title} {precision}"):
                    continue
                for role in ROLES:
                    case = problem(layer, role, precision, device.type)
                    those = contestants(case, like, watch, budget)
                    times = gpu.timed(those, options.rounds, most=1.0)
                    seconds = {n: common.summary(t)["median"] for n, t in times.items()}
                    name = chosen(case, like)
                    if name in seconds:
                        rows.append({
                            "layer": title, "role": role, "precision": precision, "chosen": name,
                            "seconds": seconds, "gain": seconds["library"] / seconds[name],
                        })  # fmt: skip
    return rows


def geometric_mean(values: list[float]) -> float:
    """Returns the geometric mean of positive numbers."""
    return math.exp(sum(map(math.log, values)) / len(values))


def main() -> None:
    options = gpu.options_of(__doc__, rounds=9).parse_args()
    device = gpu.device_of(options)
    budget = gpu.Budget(options.seconds - 5)
    with tempfile.TemporaryDirectory() as nothing:
        os.environ["PYDIST_CACHE"] = nothing  # does not affect the user's cache
        rows = measure(options, device, budget)
    if not rows:
        raise SystemExit(f"gpu_boundary: nothing was done within {options.seconds:g} s")
    names = ("library", "plain", "mma", "tf32")
    common.show(
        ["layer", "role", "", *(f"{name} µs" for name in names), "chosen", "gain"],
        [
            [r["layer"], r["role"], r["precision"],
             *(r["seconds"][n] * 1e6 if n in r["seconds"] else None for n in names),
             r["chosen"], r["gain"]]
            for r in rows
        ],
    )  # fmt: skip
    gains = {
        precision: geometric_mean([r["gain"] for r in rows if r["precision"] == precision])
        for precision in dict.fromkeys(r["precision"] for r in rows)
    }
    gain = geometric_mean([r["gain"] for r in rows])
    slower = [f"{r['layer']} {r['role']} {r['precision']}" for r in rows if r["gain"] * SLOWER < 1]
    by_precision = ", ".join(f"{name} {value:.2f}" for name, value in gains.items())
    print(
        f"chosen against library, geometric mean: {gain:.2f}x ({by_precision}), goal {GOAL};"
        f" slower by choice: {', '.join(slower) or 'none'}"
    )
    gpu.report(
        options, device, budget, rows=rows, gain=gain, gains=gains, slower_by_choice=slower,
        goal=GOAL, met=gain >= GOAL and not slower,
    )  # fmt: skip


if __name__ == "__main__":
    main()
