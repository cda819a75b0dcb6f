"""The part of the halo's time that a step still waits for, on ranks that share a GPU.

A step of the paper's CosmoFlow in three ways: halos overlapped with the main convolutions
("overlapped"), each halo awaited as soon as it is posted ("awaited"), and no messages ("silent").
The exposed time is overlapped minus silent; its goal is 10 % of awaited minus silent. Each way is
one CUDA graph: at this size the host takes longer to launch a step's kernels than they run, and
would hide what the device waits for.

Streams simulate the neighbors (`lone_rank.py`): they return sent messages over a link of a given
bandwidth. Where NCCL lets several ranks share a GPU (2.30, with NCCL_MULTI_RANK_GPU_ENABLE=1), two
processes also exchange over NCCL: their times mean something if they compute at the same time
(see `gpu.sharing`). A trace of one of these steps, in Chrome's format, is written beside the
result: "hidden" is the part of the time of NCCL's kernels in which another kernel of the same rank
runs. A final table of `pydist.profile` shows the wait of each layer. A step uses more memory than
the L2 cache.

    python benchmarks/python/gpu_overlap.py
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import common
import gpu
import torch
from device_steps import Split, adam
from lone_rank import Neighbors, choosing_alone
from silenced_transport import SilencedTransport, as_transport

from pydist.comm import Transport
from pydist.comm.transports.nccl.device_assignment import (
    MIN_SHARING_VERSION,
    SHARE_VARIABLE,
    missing,
    open_nccl,
)
from pydist.launch import launcher_env
from pydist.layout import layout_for_sample
from pydist.mesh import Mesh
from pydist.models import CosmoFlow
from pydist.profile import Profiler
from pydist.train.device import in_format, own_stream

GOAL = 0.10
RANKS = 4
"""Size of the group; one rank in the middle runs. Over NCCL, there are two processes."""
LINKS = {"NVLink, 200 GB/s": 200e9, "400 Gb/s, 50 GB/s": 50e9}
NCCL_SECONDS = 50.0
"""Seconds for two processes to start and to connect, with a margin."""
WAYS = ("overlapped", "awaited", "silent")


Kernel = tuple[str, int, float, float]
"""Name, stream, start and end in microseconds."""


def kernels_of(step: gpu.Call) -> list[Kernel]:
    """Returns the kernels and copies of a step, in the order in which they start."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    results = profiler.profiler.kineto_results if profiler.profiler is not None else None
    events = results.events() if results is not None else []
    found = [
        (e.name(), e.device_resource_id(), e.start_ns() / 1e3, e.end_ns() / 1e3)
        for e in events
        if e.device_type().name == "CUDA"
    ]
    return sorted(found, key=lambda kernel: kernel[2])


def hidden_part(kernels: Sequence[Kernel]) -> tuple[float, float]:
    """Returns the microseconds in which NCCL's kernels run, and of these, beside another kernel."""
    edges = sorted(
        (time, step, "nccl" in name.lower())
        for name, _, start, end in kernels
        for time, step in ((start, 1), (end, -1))
    )
    running = {True: 0, False: 0}
    messages = hidden = before = 0.0
    for time, step, is_message in edges:
        if running[True]:
            messages += time - before
            hidden += (time - before) * bool(running[False])
        running[is_message] += step
        before = time
    return messages, hidden


def write_trace(kernels: Sequence[Kernel], path: Path) -> None:
    """Writes kernels in Chrome's format, a row for each stream."""
    first = kernels[0][2]
    events = [
        {"name": name[:80], "ph": "X", "pid": 0, "tid": stream, "ts": round(start - first, 3),
         "dur": round(end - start, 3)}
        for name, stream, start, end in kernels
    ]  # fmt: skip
    path.write_text(json.dumps({"traceEvents": events}) + "\n")


def measure(
    world: Transport,
    precision: str,
    options: argparse.Namespace,
    device: torch.device,
    most: float | None,
) -> dict[str, Any]:
    """Measures step times in the three ways, and waits of layers. Collective over `world`."""
    width = 32 if options.quick else 256
    amp = precision == "bf16"
    memory_format = torch.channels_last_3d if amp else torch.contiguous_format
    activations = SilencedTransport(world)
    mesh = Mesh(as_transport(activations), 1, (world.size, 1, 1), seed=1)
    mesh.world = world  # transport of gradients in all three ways
    shape = (1, 4, width, width, width)
    torch.manual_seed(0)
    network = CosmoFlow(width, dropout=0.0).to(device)
    in_format(network, memory_format)
    shard = torch.rand(layout_for_sample(mesh, shape).local_shape, device=device)
    shard = shard.contiguous(memory_format=memory_format)
    targets = torch.zeros(1, 4, device=device)
    watch = gpu.Stopwatch(device)
    steps = 1 if options.quick else 3

    def switch(way: str) -> None:
        activations.awaited, activations.quiet = way == "awaited", way == "silent"

    def split(way: str, graph: bool) -> Split:
        switch(way)
        model = copy.deepcopy(network)
        return Split(model, mesh, shape, shard, targets, amp, adam, graph)

    def step(way: str) -> float:
        switch(way)
        return watch.steps(splits[way].step, steps)

    alone = choosing_alone() if isinstance(world, Neighbors) else nullcontext()
    with gpu.precision(precision), alone:
        splits = {way: split(way, device.type == "cuda") for way in WAYS}
        seconds = gpu.timed({way: partial(step, way) for way in WAYS}, options.rounds, most)
        profiled = split("overlapped", False)  # the device's events in a graph have no layers
        with Profiler(mesh, profiled.model, warmup=1) as profiler:
            for _ in range(2 if options.quick else 4):
                profiled.step()
                profiler.step()
        summary = profiler.summary()
        kernels = kernels_of(splits["overlapped"].step) if options.trace is not None else []
    for each in splits.values():
        each.close()
    exposed = common.paired(seconds["overlapped"], seconds["silent"])
    whole = common.paired(seconds["awaited"], seconds["silent"])
    row: dict[str, Any] = {way: common.summary(taken) for way, taken in seconds.items()}
    layers = {} if summary is None else {p: dict(r) for p, r in summary.layers.items()}
    if kernels and world.rank == 0:
        messages, hidden = hidden_part(kernels)
        row |= {"nccl_us": messages, "hidden": hidden / messages if messages else None}
        write_trace(kernels, options.trace)
    return {
        **row, "precision": precision, "ranks": world.size, "exposed": exposed, "halo": whole,
        "ratio": exposed / whole if whole > 0 else None, "layers": layers,
        "table": profiler.table(),
    }  # fmt: skip


def by_streams(
    options: argparse.Namespace, device: torch.device, budget: gpu.Budget
) -> list[dict[str, Any]]:
    """Returns rows with neighbors simulated by streams."""
    rows = []
    for precision in ("fp32",) if options.quick else ("bf16", "fp32"):
        for link, bytes_per_s in LINKS.items():
            if budget.allows(f"streams, {link}, {precision}"):
                world = Neighbors(RANKS // 2, RANKS, device, bytes_per_s)
                row = measure(world, precision, options, device, most=2.0)
                rows.append({"neighbors": f"streams, {link}", **row})
    return rows


def nccl_obstacle() -> str:
    """Returns why two processes can't share the GPU over NCCL, if known without trying."""
    obstacle = missing()
    if not obstacle and open_nccl().version < MIN_SHARING_VERSION:
        obstacle = f"NCCL {open_nccl().version} lets no ranks share a GPU"
    return obstacle


def by_nccl(
    options: argparse.Namespace, budget: gpu.Budget, obstacle: str, seconds: float
) -> list[dict[str, Any]]:
    """Returns rows of two processes that share the GPU, or adds the reason to `left_out`."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rows.json")
        command = [
            sys.executable, "-m", "pydist.launch", "2", "auto", str(Path(__file__).resolve()),
            "--rounds", str(options.rounds), "--json", str(path), *["--quick"] * options.quick,
            "--trace", str(options.trace or Path(folder, "trace.json")),
        ]  # fmt: skip
        try:
            if not obstacle:
                ended = subprocess.run(
                    command, env={**os.environ, SHARE_VARIABLE: "1"}, cwd=Path(__file__).parent,
                    timeout=seconds, capture_output=True, text=True, check=False,
                )  # fmt: skip
                if ended.returncode == 0:
                    rows: list[dict[str, Any]] = json.loads(path.read_text())
                    return rows
                said = (ended.stderr.strip() or "no reason given").splitlines()[-1]
                obstacle = f"exit code {ended.returncode}: {said}"
        except subprocess.TimeoutExpired:
            obstacle = f"not done within {seconds:.0f} s"
    budget.left_out.append(f"two processes over NCCL ({obstacle})")
    return []


def rank_of_nccl(options: argparse.Namespace) -> None:
    """Runs one of the two processes."""
    from pydist.runtime import connect

    world = connect("nccl")
    device = torch.device("cuda", torch.cuda.current_device())
    with own_stream(device):
        row = measure(world, "bf16", options, device, most=None)
    if world.rank == 0:
        options.json.write_text(json.dumps([{"neighbors": "two processes, NCCL", **row}]))


def main() -> None:
    parser = gpu.options_of(__doc__, rounds=10)
    parser.add_argument("--trace", type=Path, help="where the trace is written")
    options = parser.parse_args()
    device = gpu.device_of(options)
    if launcher_env.detect() is not None:
        rank_of_nccl(options)
        return
    obstacle = nccl_obstacle() if device.type == "cuda" else ""
    kept = NCCL_SECONDS if device.type == "cuda" and not obstacle else 0.0
    budget = gpu.Budget(options.seconds - kept)
    trace, options.trace = options.trace, None
    with own_stream(device):
        rows = by_streams(options, device, budget)
    options.trace = trace
    if device.type == "cuda":
        torch.cuda.empty_cache()
        rows += by_nccl(options, budget, obstacle, kept + max(0.0, budget.left))
    for row in rows:
        print(f"{row['neighbors']}, {row['precision']}\n{row.pop('table')}\n")
    common.show(
        ["", "", *(f"{way} ms" for way in WAYS), "exposed ms", "halo ms", "ratio"],
        [
            [row["neighbors"], row["precision"], *(row[way]["median"] * 1e3 for way in WAYS),
             row["exposed"] * 1e3, row["halo"] * 1e3, row["ratio"]]
            for row in rows
        ],
    )  # fmt: skip
    print(f"goal: exposed at most {GOAL:.0%} of what is awaited without overlap")
    for row in rows:
        if "hidden" in row:
            print(f"NCCL's kernels ran for {row['nccl_us']:.0f} µs, {row['hidden']:.0%} hidden")
    gpu.report(options, device, budget, rows=rows, goal=GOAL, sharing=gpu.sharing())


if __name__ == "__main__":
    main()
