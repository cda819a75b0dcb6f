"""Compares 3D U-Nets of 128³ on one GPU: plain torch, torch compiled, and pydist on one rank.

The U-Net of the paper and MONAI's UNet (residual units, instance norm, PReLU), batch 1, three
classes, cross-entropy, fused Adam, in bf16 (autocast, channels-last) and in tf32. All contestants
run the same network from the same weights in loops as users write them; losses of the first step
are compared before anything is timed. Times are of consecutive steps, by events.

    python benchmarks/python/gpu_unet.py
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import common
import gpu
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from unet_step import CLASSES, make_network

import pydist
from pydist.comm import LocalTransport
from pydist.train.device import in_format, own_stream

WIDTH, STEPS = 128, 3
NEAR = {"bf16": 2e-2, "tf32": 5e-3, "fp32": 1e-4}
"""Largest difference of losses, relative."""
CASES = [("paper", "bf16"), ("monai", "bf16"), ("paper", "tf32"), ("monai", "tf32")]
COMPILED = "torch, compiled"


class Loop:
    """Training loop that repeats one batch.

    Args:
        kind: "torch", `COMPILED` or "pydist".
        network: a network on the device.
        x: inputs [N, 1, D, H, W] on the device.
        y: classes [N, D, H, W] on the device.
        mixed: whether the network runs under autocast to bf16.
    """

    def __init__(self, kind: str, network: nn.Module, x: Tensor, y: Tensor, mixed: bool) -> None:
        self._optimizer = torch.optim.Adam(network.parameters(), 1e-4, fused=x.is_cuda)
        self._x, self._y, self._mixed = x, y, mixed
        self._model: Callable[[Tensor], Tensor] = network
        if kind == COMPILED:
            self._model = torch.compile(network)
        if kind == "pydist":
            mesh = pydist.Mesh(LocalTransport(), seed=1)
            self._model = pydist.parallelize(network, mesh)
            self._x = pydist.distribute_tensor(x, mesh)
            self._y = pydist.distribute_tensor(y, mesh, {1: "depth", 2: "height", 3: "width"})
        self.first = float(self.step())

    def step(self) -> Tensor:
        """Runs a step; returns the loss."""
        device = self._x.device.type
        with torch.autocast(device, torch.bfloat16) if self._mixed else nullcontext():
            loss = F.cross_entropy(self._model(self._x), self._y)
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.detach()


def measure(
    name: str,
    precision: str,
    options: argparse.Namespace,
    device: torch.device,
    budget: gpu.Budget,
) -> dict[str, Any]:
    """Times a network in one precision."""
    width = 16 if options.quick else WIDTH
    memory_format = torch.channels_last_3d if precision == "bf16" else torch.contiguous_format
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(1, 1, width, width, width, generator=generator).to(device)
    x = x.contiguous(memory_format=memory_format)
    y = torch.randint(CLASSES, (1, width, width, width), generator=generator).to(device)
    watch, made = gpu.Stopwatch(device), {}
    kinds = ["torch", "pydist", COMPILED] if device.type == "cuda" else ["torch", "pydist"]
    with gpu.precision(precision):
        for kind in kinds:
            if kind == COMPILED and not budget.allows(f"{name}, {precision}, {kind}"):
                continue
            network = make_network(name, width).to(device)
            in_format(network, memory_format)
            try:
                made[kind] = Loop(kind, network, x, y, precision == "bf16")
            except RuntimeError as error:
                budget.failed.append(f"{name}, {precision}, {kind}: {str(error).splitlines()[0]}")
        losses = {kind: loop.first for kind, loop in made.items()}
        reference = losses["torch"]
        for kind, loss in losses.items():
            if not abs(loss - reference) <= NEAR[precision] * abs(reference):
                budget.failed.append(f"{name}, {precision}, {kind}: loss {loss}, not {reference}")
        steps = 1 if options.quick else STEPS
        seconds = gpu.timed(
            {kind: partial(watch.steps, loop.step, steps) for kind, loop in made.items()},
            options.rounds,
            most=4.0,
        )
    row: dict[str, Any] = {"network": name, "precision": precision, "losses": losses}
    row["steps"] = {kind: common.summary(taken) for kind, taken in seconds.items()}
    for rival in (kind for kind in kinds if kind != "pydist" and kind in seconds):
        if "pydist" in seconds:
            pairs = zip(seconds[rival], seconds["pydist"], strict=True)
            ratios = [theirs / ours for theirs, ours in pairs]
            row[f"{rival} / pydist"] = common.summary(ratios)["median"]
    return row


def main() -> None:
    options = gpu.options_of(__doc__, rounds=8).parse_args()
    device = gpu.device_of(options)
    budget = gpu.Budget(options.seconds)
    rows = []
    for name, precision in CASES[3:] if options.quick else CASES:
        if not budget.allows(f"{name}, {precision}"):
            continue
        with own_stream(device):
            rows.append(measure(name, precision, options, device, budget))
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    kinds = ["torch", COMPILED, "pydist"]
    rivals = [f"{kind} / pydist" for kind in kinds[:2]]
    common.show(
        ["", "", *(f"{kind} ms" for kind in kinds), *rivals],
        [
            [
                row["network"], row["precision"],
                *(row["steps"][k]["median"] * 1e3 if k in row["steps"] else None for k in kinds),
                *(row.get(rival) for rival in rivals),
            ]
            for row in rows
        ],
    )  # fmt: skip
    gpu.report(options, device, budget, rows=rows)


if __name__ == "__main__":
    main()
