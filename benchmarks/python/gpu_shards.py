"""Measures shards of a 512³ sample on one device: step time and memory per rank of 8, 16 and 32.

The paper's CosmoFlow, split over depth. One rank of the group runs on the device by itself, without
its neighbors' messages (`lone_rank.py`): times include packing, boundary kernels and all
bookkeeping, but not the link. The first rank and one in the middle are measured; the slower one
counts. The references are the full sample on one device, divided by P as the ideal, and 52.7/P GiB,
the paper's count of activations and error signals in float32. The full sample's time is 8 times
that of 256³:
at 512³ tensors have 2^31 elements, which cuDNN does not take, and torch's own kernels take minutes.

    python benchmarks/python/gpu_shards.py
"""

from __future__ import annotations

import argparse
import gc
from functools import partial
from typing import Any

import common
import gpu
import torch
from device_steps import Split, adam
from lone_rank import LoneRank, choosing_alone

from pydist.comm import LocalTransport
from pydist.layout import layout_for_sample
from pydist.mesh import Mesh
from pydist.models import CosmoFlow
from pydist.train.device import in_format, own_stream

WIDTH, WHOLE, RANKS = 512, 256, (8, 16, 32)
PAPER_GIB = 52.7
"""Activations and error signals of a full 512³ sample in float32."""
GIB = 1 << 30
ALGORITHMS = 3
"""Number of cuDNN's algorithms that are timed for each convolution."""


def measure(
    ranks: int,
    rank: int,
    precision: str,
    width: int,
    options: argparse.Namespace,
    device: torch.device,
) -> dict[str, Any]:
    """Measures step time and peak memory of one rank."""
    amp = precision == "bf16"
    memory_format = torch.channels_last_3d if amp else torch.contiguous_format
    world = LocalTransport() if ranks == 1 else LoneRank(rank, ranks)
    mesh = Mesh(world, 1, (ranks, 1, 1), seed=1)
    shape = (1, 4, width, width, width)
    torch.manual_seed(0)
    model = CosmoFlow(width, dropout=0.0).to(device)
    in_format(model, memory_format)
    shard = torch.rand(layout_for_sample(mesh, shape).local_shape, device=device)
    shard = shard.contiguous(memory_format=memory_format)
    targets = torch.rand(1, 4, device=device)
    row: dict[str, Any] = {"ranks": ranks, "rank": rank, "precision": precision, "width": width}
    with gpu.precision(precision, ALGORITHMS), choosing_alone():
        split = Split(model, mesh, shape, shard, targets, amp, adam)
        if device.type == "cuda":
            torch.cuda.synchronize()
            gc.collect()
            before = torch.cuda.memory_allocated() - shard.nbytes
            torch.cuda.reset_peak_memory_stats()
            split.step()
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated()
            row |= {"peak_gib": peak / GIB, "step_gib": (peak - before) / GIB}
        watch = gpu.Stopwatch(device)
        steps = {"step": partial(watch.steps, split.step, 1 if options.quick else 2)}
        taken = gpu.timed(steps, options.rounds, most=1.5)["step"]
    split.close()
    return {**row, **common.summary(taken)}


def rows_of(
    options: argparse.Namespace, device: torch.device, budget: gpu.Budget
) -> list[dict[str, Any]]:
    """Returns a row per precision and number of ranks: the slower rank's, after the full sample."""
    width = 32 if options.quick else WIDTH
    rows: list[dict[str, Any]] = []

    def tried(ranks: int, rank: int, precision: str, width: int) -> list[dict[str, Any]]:
        """Returns one measurement, or none, with the reason in the budget's `left_out`."""
        what = f"{precision}, {width}³, rank {rank} of {ranks}"
        if not budget.allows(what):
            return []
        try:
            return [measure(ranks, rank, precision, width, options, device)]
        except RuntimeError as error:
            budget.left_out.append(f"{what} ({str(error).splitlines()[0]})")
        finally:
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
        return []

    for precision in ("fp32",) if options.quick else ("fp32", "bf16"):
        whole = tried(1, 0, precision, min(width, WHOLE))
        rows += whole
        ideal = whole[0]["median"] * (width // whole[0]["width"]) ** 3 if whole else None
        for ranks in (2,) if options.quick else RANKS:
            found = [
                row for rank in (0, ranks // 2) for row in tried(ranks, rank, precision, width)
            ]
            if found:
                row = dict(max(found, key=lambda each: each["median"]))
                row["ranks_measured"] = found
                for key in ("step_gib", "peak_gib"):
                    if key in row:
                        row[key] = max(each[key] for each in found)
                row["of_ideal"] = row["median"] * ranks / ideal if ideal is not None else None
                rows.append(row)
    for row in rows:
        row["paper_gib"] = PAPER_GIB * (row["width"] / WIDTH) ** 3 / row["ranks"]
        if "step_gib" in row:
            row["below_paper"] = row["step_gib"] < row["paper_gib"]
    return rows


def main() -> None:
    options = gpu.options_of(__doc__, rounds=6).parse_args()
    device = gpu.device_of(options)
    budget = gpu.Budget(options.seconds - 5)
    with own_stream(device):
        rows = rows_of(options, device, budget)
    common.show(
        ["", "ms", "of 1/P", "step GiB", "peak GiB", "paper GiB"],
        [
            [f"{r['precision']}, {r['width']}³ / {r['ranks']}", r["median"] * 1e3,
             r.get("of_ideal"), r.get("step_gib"), r.get("peak_gib"), r["paper_gib"]]
            for r in rows
        ],
    )  # fmt: skip
    gpu.report(options, device, budget, rows=rows, split="depth")


if __name__ == "__main__":
    main()
