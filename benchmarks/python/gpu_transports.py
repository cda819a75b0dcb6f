"""Compares exchanges between two ranks on CUDA devices: own NCCL, copies (ipc), and torch's NCCL.

A halo exchange of one face of 16 channels each way, packed and received in place, and all-reduces
of gradient buckets. Contestants: pydist's transports "nccl" and "ipc", and torch's process group
with batched isend and irecv of a face that torch copies. All in one job, interleaved; times are of
consecutive exchanges, by events. Received values are compared once. If both ranks share one GPU
(NCCL allows it from 2.30 on), its memory is the link: the latencies mean more than the bandwidths,
and only with MPS (see `gpu.sharing`): without, each exchange lasts for the processes' turns.

    python benchmarks/python/gpu_transports.py
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import common
import gpu
import torch
import torch.distributed as dist
from gpu_overlap import nccl_obstacle
from torch import Tensor

from pydist.comm import Transport
from pydist.comm.transports.nccl.device_assignment import SHARE_VARIABLE
from pydist.errors import NotSupported, UsageError
from pydist.exchange.exchanger import Exchanger
from pydist.launch import launcher_env
from pydist.partition import Box
from pydist.runtime import connect
from pydist.train.device import own_stream

CHANNELS, DEEP = 16, 8
EDGES = (16, 32, 64, 128, 256, 512)
BUCKETS = (1 << 20, 4 << 20, 38 << 20)
REPEATS = 20
TORCH = "torch NCCL"


def exchange_of(world: Transport, x: Tensor) -> tuple[Callable[[], None], Tensor]:
    """Returns an exchange of the faces between the ranks' shards, and where a face arrives."""
    edge = x.shape[-1]
    owned = [
        Box((0, 0, DEEP * rank, 0, 0), (1, CHANNELS, DEEP * (rank + 1), edge, edge))
        for rank in range(2)
    ]
    needed = [
        [Box((0, 0, DEEP - rank, 0, 0), (1, CHANNELS, DEEP - rank + 1, edge, edge))]
        for rank in range(2)
    ]
    exchanger = Exchanger(world, owned, needed)
    slots = exchanger.empty_slots(x)
    return partial(exchanger.gather, x, slots), slots[0]


def exchange_by_torch(group: Any, x: Tensor) -> tuple[Callable[[], None], Tensor]:
    """Returns the same exchange by torch's process group."""
    rank = dist.get_rank(group)
    face = x.narrow(2, 0 if rank else DEEP - 1, 1)
    sent, received = torch.empty_like(face.contiguous()), torch.empty_like(face.contiguous())

    def exchange() -> None:
        sent.copy_(face)
        operations = [
            dist.P2POp(dist.isend, sent, 1 - rank, group),
            dist.P2POp(dist.irecv, received, 1 - rank, group),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    return exchange, received


def work(options: argparse.Namespace) -> None:
    """Measures all exchanges on one of the two ranks; rank 0 writes the results."""
    device = gpu.device_of(options)
    on_device = device.type == "cuda"
    worlds: dict[str, Transport] = {}
    lacks: dict[str, str] = {}
    for name in ("nccl", "ipc") if on_device else ("host",):
        try:
            worlds[name] = connect(name)
        except (NotSupported, UsageError) as error:  # the same on all ranks
            lacks[name] = str(error)
    group = None
    if not on_device or dist.is_nccl_available():
        group = dist.new_group([0, 1], backend="nccl" if on_device else "gloo")
    else:
        lacks[TORCH] = "torch was built without NCCL"
    world = next(iter(worlds.values()))
    rows = []
    with own_stream(device):
        watch = gpu.Stopwatch(device)
        for edge in EDGES[:1] if options.quick else EDGES:
            x = torch.randn(1, CHANNELS, DEEP, edge, edge, device=device)
            made = {name: exchange_of(each, x) for name, each in worlds.items()}
            if group is not None:
                made[TORCH] = exchange_by_torch(group, x)
            for exchange, _ in made.values():
                exchange()
            faces = [face for _, face in made.values()]
            if not all(torch.equal(face, faces[0]) for face in faces):
                raise SystemExit("gpu_transports: received faces differ")
            calls = {name: exchange for name, (exchange, _) in made.items()}
            rows.append(row_of("halo", 4 * CHANNELS * edge**2, calls, watch, options))
        for nbytes in BUCKETS[:1] if options.quick else BUCKETS:
            bucket = torch.zeros(nbytes // 4, device=device)
            calls = {name: partial(each.all_reduce, bucket) for name, each in worlds.items()}
            if group is not None:
                calls[TORCH] = partial(dist.all_reduce, bucket, group=group)
            rows.append(row_of("all-reduce", nbytes, calls, watch, options))
    if world.rank == 0:
        options.result.write_text(json.dumps({"rows": rows, "lacks": lacks}))


def row_of(
    what: str,
    nbytes: int,
    calls: dict[str, Callable[[], None]],
    watch: gpu.Stopwatch,
    options: argparse.Namespace,
) -> dict[str, Any]:
    """Times calls, interleaved, in the same number of rounds on both ranks."""
    timers = {name: partial(watch.steps, call, REPEATS) for name, call in calls.items()}
    seconds = gpu.timed(timers, options.rounds)
    return {
        "what": what, "bytes": nbytes,
        "seconds": {name: common.summary(taken) for name, taken in seconds.items()},
    }  # fmt: skip


def main() -> None:
    parser = gpu.options_of(__doc__, rounds=15)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    device = gpu.device_of(options)
    if launcher_env.detect() is not None:
        work(options)
        return
    budget = gpu.Budget(options.seconds)
    obstacle = nccl_obstacle() if device.type == "cuda" else ""
    found: dict[str, Any] = {"rows": [], "lacks": {}}
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "rows.json")
        command = [sys.executable, "-m", "pydist.launch", "2", "auto"]
        command += [str(Path(__file__).resolve()), "--result", str(result)]
        command += ["--rounds", str(options.rounds)]
        command += ["--device", options.device, *["--quick"] * options.quick]
        try:
            if not obstacle:
                subprocess.run(
                    command, env={**os.environ, SHARE_VARIABLE: "1"}, cwd=Path(__file__).parent,
                    timeout=options.seconds + 20, check=True,
                )  # fmt: skip
                found = json.loads(result.read_text())
        except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
            budget.failed.append(f"two ranks: {error}")
    for name, reason in {**found["lacks"], **({"nccl": obstacle} if obstacle else {})}.items():
        budget.left_out.append(f"{name} ({reason})")
    names = list(dict.fromkeys(name for row in found["rows"] for name in row["seconds"]))
    common.show(
        ["", "bytes", *(f"{name} µs" for name in names)],
        [
            [row["what"], row["bytes"], *(row["seconds"][n]["median"] * 1e6 for n in names)]
            for row in found["rows"]
        ],
    )
    gpu.report(options, device, budget, rows=found["rows"], sharing=gpu.sharing())


if __name__ == "__main__":
    main()
