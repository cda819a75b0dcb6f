"""Samples that fill a GPU: one step whole, and split over two ranks that share the device.

CosmoFlow of the paper and the 3D U-Net, in float32 (no TF32). The whole sample runs in plain torch,
in a process of its own; then two processes split it over depth, exchange over NCCL, and must find
the same loss and gradients. Shown are the seconds of a step and the peak of a rank's memory. Both
ranks share one device's compute, so two ranks can't be faster here: their memory is the point.

cuDNN takes tensors of less than 2^31 elements; for others, torch has kernels that take minutes.
CosmoFlow of 512³ has such tensors whole, and is only split here: each half fits. The U-Net has them
from 224³ on (192 channels before its last level), so it is measured at 192³.

NCCL lets two ranks share a device from 2.30 on.

    python benchmarks/python/gpu_whole.py
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import common
import gpu
import torch
import torch.nn.functional as F
from gpu_overlap import nccl_obstacle
from torch import Tensor, nn
from unet_step import CLASSES

import pydist
from pydist.comm.transports.nccl.device_assignment import SHARE_VARIABLE
from pydist.launch import launcher_env
from pydist.models import CosmoFlow, UNet3d
from pydist.train.device import own_stream

GIB = 1 << 30
TOLERANCE = 1e-4
"""Largest error of loss and of all gradients together, |Δ| / |whole|, in float32."""
RANKS = 2
CHANNELS = {"cosmoflow": 4, "unet": 1}


class Case(NamedTuple):
    network: str
    width: int
    whole: bool = True

    def __str__(self) -> str:
        return f"{self.network} {self.width}³"


CASES = [Case("cosmoflow", 256), Case("unet", 192), Case("cosmoflow", 512, whole=False)]


def network_of(case: Case) -> nn.Module:
    """Creates a network with the same weights in every process."""
    torch.manual_seed(0)
    if case.network == "unet":
        return UNet3d(classes=CLASSES)
    return CosmoFlow(case.width, dropout=0.0)


def planes(case: Case, lo: int, hi: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Draws planes lo, ..., hi - 1 of the sample, and of its classes or the targets."""
    x = torch.empty(1, CHANNELS[case.network], hi - lo, case.width, case.width, device=device)
    y = torch.zeros(1, 4, device=device)
    if case.network == "unet":
        y = torch.empty(1, hi - lo, case.width, case.width, dtype=torch.long, device=device)
    generator = torch.Generator(device)
    for plane in range(lo, hi):
        generator.manual_seed(plane)
        x[:, :, plane - lo].uniform_(generator=generator)
        if case.network == "unet":
            y[:, plane - lo].random_(0, CLASSES, generator=generator)
    return x, y


def loss_of(case: Case, output: Tensor, y: Tensor) -> Tensor:
    """Computes the network's loss."""
    return F.cross_entropy(output, y) if case.network == "unet" else F.mse_loss(output, y)


def measure(case: Case, x: Tensor, y: Tensor, model: nn.Module, kept: Path | None) -> Any:
    """Runs three steps; returns loss, seconds and peak memory, and keeps the gradients."""
    is_cuda = x.device.type == "cuda"
    watch = gpu.Stopwatch(x.device)
    seconds = []
    for at in range(3):
        model.zero_grad()
        if is_cuda and at == 1:
            torch.cuda.reset_peak_memory_stats()
        found: list[Tensor] = []

        def step(found: list[Tensor] = found) -> None:
            loss = loss_of(case, model(x), y)
            loss.backward()
            found.append(loss.detach())

        seconds.append(watch.steps(step, 1))
    if kept is not None:
        torch.save([p.grad.cpu() for p in model.parameters() if p.grad is not None], kept)
    peak = torch.cuda.max_memory_allocated() / GIB if is_cuda else None
    return {"loss": float(found[0]), "seconds": seconds[1:], "peak_gib": peak}


def in_processes(
    case: Case, ranks: int, folder: Path, options: argparse.Namespace, seconds: float
) -> Any:
    """Returns what rank 0 of a job measured, or the reason why there is nothing."""
    result = folder / f"{ranks}.json"
    command = [str(Path(__file__).resolve()), "--case", json.dumps(case), "--result", str(result)]
    command += ["--device", options.device, *["--quick"] * options.quick]
    launcher = ["-m", "pydist.launch", str(ranks), "auto"] if ranks > 1 else []
    try:
        ended = subprocess.run(
            [sys.executable, *launcher, *command],
            env={**os.environ, SHARE_VARIABLE: "1"}, cwd=Path(__file__).parent,
            timeout=max(seconds, 1.0), capture_output=True, text=True, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"not done within {seconds:.0f} s"
    if ended.returncode == 0:
        return json.loads(result.read_text())
    return f"exit code {ended.returncode}: {(ended.stderr.strip() or 'none').splitlines()[-1]}"


def work(options: argparse.Namespace) -> None:
    """Measures the whole sample in plain torch, or this rank's part of it."""
    case, result = Case(*json.loads(options.case)), options.result
    device = gpu.device_of(options)
    kept = result.with_suffix(".pt")
    if launcher_env.detect() is None:
        with own_stream(device), gpu.precision("fp32", algorithms=0):
            x, y = planes(case, 0, case.width, device)
            found = measure(case, x, y, network_of(case).to(device), kept)
        result.write_text(json.dumps(found))
        return
    transport = "nccl" if device.type == "cuda" else "auto"
    mesh = pydist.init(spatial=(RANKS, 1, 1), transport=transport)
    device = mesh.world.device or device
    channels = CHANNELS[case.network]
    layout = pydist.layout_for_sample(mesh, (1, channels, *(case.width,) * 3))
    with own_stream(device), gpu.precision("fp32", algorithms=0):
        x, y = planes(case, layout.box.lo[2], layout.box.hi[2], device)
        shard = pydist.ShardedTensor.from_local(x, layout)
        if case.network == "unet":
            splits = (layout.splits[0], *layout.splits[2:])
            of_classes = pydist.Layout(mesh, (1, *(case.width,) * 3), splits)
            y = pydist.ShardedTensor.from_local(y, of_classes)
        model = pydist.parallelize(network_of(case).to(device), mesh)
        found = measure(case, shard, y, model, kept if mesh.rank == 0 else None)
    if mesh.rank == 0:
        result.write_text(json.dumps(found))


def error_of(one: Path, other: Path) -> float:
    """Returns the distance of all gradients together, relative to the first ones'."""
    pairs = list(zip(torch.load(one), torch.load(other), strict=True))
    far = sum(float((a.double() - b.double()).square().sum()) for a, b in pairs)
    size = sum(float(a.double().square().sum()) for a, _ in pairs)
    return float((far / size) ** 0.5)


def main() -> None:
    parser = gpu.options_of(__doc__, rounds=2)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.case:
        work(options)
        return
    device = gpu.device_of(options)
    budget = gpu.Budget(options.seconds)
    obstacle = nccl_obstacle() if device.type == "cuda" else ""
    rows: list[dict[str, Any]] = []
    for case in [Case("cosmoflow", 32)] if options.quick else CASES:
        row: dict[str, Any] = {"what": str(case)}
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            for ranks in (1, RANKS) if case.whole else (RANKS,):
                what = f"{case} on {ranks}"
                if not budget.allows(what):
                    continue
                found: Any = obstacle if ranks > 1 else ""
                found = found or in_processes(case, ranks, folder, options, budget.left + 20)
                if isinstance(found, str):
                    budget.left_out.append(f"{what} ({found})")
                else:
                    row[str(ranks)] = found
            if {"1", str(RANKS)} <= row.keys():
                one, two = row["1"]["loss"], row[str(RANKS)]["loss"]
                row["loss_error"] = abs(one - two) / abs(one)
                row["gradient_error"] = error_of(folder / "1.pt", folder / f"{RANKS}.pt")
                if max(row["loss_error"], row["gradient_error"]) > TOLERANCE:
                    budget.failed.append(f"{case}: {row}")
        rows.append(row)
    head = ["", "whole s", "GiB", f"{RANKS} ranks s", "GiB a rank", "error of gradients"]
    cells = []
    for row in rows:
        both = [row.get(ranks, {}) for ranks in ("1", str(RANKS))]
        shown = [(min(b["seconds"]) if b else None, b.get("peak_gib")) for b in both]
        cells.append([row["what"], *shown[0], *shown[1], row.get("gradient_error")])
    common.show(head, cells)
    gpu.report(options, device, budget, rows=rows)


if __name__ == "__main__":
    main()
