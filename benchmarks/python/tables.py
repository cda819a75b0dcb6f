"""Generator of docs/performance.md: the results in benchmarks/results as tables.

python benchmarks/python/tables.py > docs/performance.md
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "results"
SPLITS = ("depth", "height", "width")

INTRODUCTION = """\
# Performance

Measurements on one small machine: 2 cores, one thread per rank, Open MPI. Contestants of one run
took turns: a row of the first table, a column of the second. Other figures are from other runs,
when the machine was faster or slower by up to 40 %, and from other commits: compare ratios. The
figures are medians. Every contestant of a step was first checked with a double-precision reference.
[`benchmarks/results`](../benchmarks/results) has the full results, with commit, quartiles, page
faults, errors and the machine; `tools/bench NAME` repeats one, and
`python benchmarks/python/tables.py > docs/performance.md` makes this page. The last part is from
one GPU.
"""

STEP = """\
## A training step

Seconds: forward, backward, Adam; batch 1. In brackets: speedup over plain torch with both cores.
"Of the bound": the time of the same shards, kernels and optimizer on both ranks without
exchanges, divided by pydist's time (for CosmoFlow, halo and statistics only).
"""

STACK = """\
## The same split in other implementations

Four 3×3×3 convolutions with ReLU, 4 → 16 → 16 → 16 → 16 channels, forward and backward, on 2 ranks:
time divided by pydist's; above 1 is slower than pydist. "+ malloc" has pydist's allocator settings,
"+ oneDNN" its convolution path as well. At 48³, a shard is smaller than torch's own minimum
for oneDNN convolutions.
"""

HALO = """\
## A halo exchange

Time of packing, sending and unpacking one face between 2 ranks, divided by that of bare MPI
messages of the same size (the faster of persistent and immediate calls), with a send buffer
rewritten each time.
"""

MEMORY = """\
## Memory

Resident memory per rank of a 128³ CosmoFlow step, beyond model and optimizer:
"""

ACTIVATIONS = """\
Memory of activations, counted by the allocator's events (peak of a step):
"""


FRONTIER = """\
## The largest image

Edge of the largest image that a 2D U-Net trains on with {limit:g} MiB per rank of activations,
their gradients and buffers, counted by the allocator's events. Naive: stages of equally many
layers, with skips through all stages between. Model-aware: stages of equal memory, with direct
skips. Spatial: the image is cut. Composed: two stages, and each cuts the image over half of
the ranks.
"""

DEVICE = """\
## One GPU

On one {device} (driver {driver}, CUDA {cuda}, cuDNN {cudnn}, torch {torch}), by the scripts
that [`tools/gpu_check.sh`](../tools/gpu_check.sh) runs. Contestants of a run took turns; medians of
times by the device's events. Nothing has been measured on two GPUs.

A training step at 128³: forward, backward and a fused optimizer, on a mesh of one rank, against
plain torch. "Graph": the whole step as one CUDA graph. MLPerf's CosmoFlow in bf16 trains
{samples:.0f} samples/s with its inputs in device memory. (The best published figure, 207 samples/s
per H100, is of whole runs of a large system, with input and all-reduces.)
"""

UNETS = """\
U-Nets in a loop as users write it, without a graph, batch 1. pydist's host work per call is several
times torch's: where the device is faster than the host, as for MONAI's UNet of many small layers,
the step takes as long as the host needs.
"""

BOUNDARY = """\
The contribution of a halo slab to its neighbor's boundary planes, which cuDNN computes as a
convolution of the slab and an addition. Ratio: cuDNN's time divided by that of pydist's choice,
which may be cuDNN; geometric mean, and the range, over {count} layers and passes of CosmoFlow and
the U-Net, as far as time allowed.
"""

PACKING = """\
Packing faces of 8.4 MB of a tensor of 32 × 256³ floats, from memory: bytes read and written per
second, divided by those of a contiguous copy of the same size; in brackets, torch's strided copy of
the face takes that many times as long. A width face of a contiguous tensor has one float in each 64
bytes, which the device reads together.
"""

OVERLAP = """\
A step of the paper's CosmoFlow at 256³ as one of {ranks} ranks, with neighbors that streams
simulate at the bandwidth of a link. "Awaited": each halo is awaited as soon as it is posted;
"silent": without messages. Exposed is the overlapped step minus the silent one, in brackets as part
of what is exposed without overlap.
"""

EXCHANGES = """\
Exchanges of a face between two processes that share the GPU by MPS, with packing and Python, in µs,
one after the other. The link is the GPU's own memory, so the times are mostly start-up times.
"""

WHOLE = """\
One sample whole, in plain torch, and cut over two processes that share the GPU (in turns, so two
can't be faster), in float32. The error is taken over all gradients together.
"""


def main() -> None:
    """Prints the page."""
    sys.stdout.write(page())


def page() -> str:
    """Returns the page, as Markdown."""
    parts = [INTRODUCTION, STEP, _steps(), STACK, _stack(), HALO, _halo(), MEMORY, _memory()]
    return "\n".join([*parts, ACTIVATIONS, _activations(), *_frontier(), *_device()])


def _steps() -> str:
    names = ("cosmoflow_step_64", "cosmoflow_step_128", "unet_step_monai_96", "unet_step_paper_64")
    titles = ("CosmoFlow, 64³", "CosmoFlow, 128³", "MONAI UNet, 96³", "the paper's U-Net, 64³")
    head = ["", "torch, 2 threads", "pydist, 1 rank", *(f"2 ranks, {s}" for s in SPLITS)]
    return _table(
        [*head, "of the bound"],
        [[title, *_step_row(_result(name))] for title, name in zip(titles, names, strict=True)],
    )


def _step_row(result: Mapping[str, Any]) -> Iterator[str]:
    rows = {row["name"]: row for row in result["rows"]}
    torch = rows["plain torch, 2 threads"]["median"]
    yield _seconds(torch)
    ours = ["pydist, 1 rank", *(f"pydist, 2 ranks, {split}" for split in SPLITS)]
    for name in ours:
        seconds = rows[name]["median"]
        yield f"{_seconds(seconds)} ({torch / seconds:.2f}×)"
    costs = {cost["name"]: 1 / cost["halo_and_statistics"] for cost in result.get("costs", ())
             if cost["halo_and_statistics"]}  # fmt: skip
    bounds = costs or {name: rows[name]["of_bound"] for name in ours}
    yield " / ".join(f"{bounds[name]:.2f}" for name in ours[1:])


def _stack() -> str:
    results = [_result(f"conv_stack_{width}") for width in (48, 64, 128)]
    columns = [{row["name"]: row["over_pydist"] for row in each["rows"]} for each in results]
    rows = [[name, *(f"{column[name]:.2f}" for column in columns)] for name in columns[0]]
    table = _table(["", "48³", "64³", "128³"], rows)
    absent = {each["name"]: each["reason"] for each in results[0]["not_run"]}
    absences = [f"{name} ({reason})" for name, reason in absent.items() if "+" not in name]
    return table + ("\nNot run: " + "; ".join(absences) + ".\n" if absences else "")


def _halo() -> str:
    rows = _result("halo_exchange")["rows"]
    sizes = sorted({row["bytes"] for row in rows})
    kinds = list(dict.fromkeys((row["face"], row["layout"]) for row in rows))
    ratios = {(row["face"], row["layout"], row["bytes"]): row["over_bare"] for row in rows}
    return _table(
        ["face", *(f"{size >> 10} KiB" for size in sizes)],
        [
            [", ".join(kind), *(_ratio(ratios.get((*kind, size))) for size in sizes)]
            for kind in kinds
        ],
    )


def _memory() -> str:
    return _table(
        ["", "ranks", "allocator", "MB per rank", "of one rank"],
        [
            [r["name"], str(r["ranks"]), r["malloc"], f"{r['step_mb']:.0f}", _ratio(r["ratio"])]
            for r in _result("memory_128")["rows"]
        ],
    )


def _activations() -> str:
    named = {"MONAI UNet, 96³": "monai_96", "the paper's U-Net, 64³": "paper_64"}
    return _table(
        ["network", "", "ranks", "MB per rank", "of one rank"],
        [
            [title, row["name"], str(row["ranks"]), f"{row['peak_mb']:.0f}", _ratio(row["ratio"])]
            for title, name in named.items()
            for row in _result(f"activations_{name}")["rows"]
        ],
    )


def _frontier() -> Iterator[str]:
    result = _result("memory_frontier")
    yield FRONTIER.format(limit=result["limit_mib"])
    edges: dict[tuple[int, int], dict[tuple[int, str], int]] = {}
    for row in result["rows"]:
        of_network = edges.setdefault((row["features"], row["levels"]), {})
        of_network[row["ranks"], row["division"]] = row["edge"]
    divisions = ("naive", "model-aware", "spatial", "composed")
    yield _table(
        ["channels, levels", "ranks", "one rank", *divisions],
        [
            [", ".join(map(str, network)), str(ranks)]
            + [str(found[1, "one rank"])]
            + [str(found.get((ranks, division), "")) for division in divisions]
            for network, found in edges.items()
            for ranks in (2, 4, 8)
        ],
    )


def _device() -> Iterator[str]:
    steps = _result("gpu_step")
    samples = steps["mlperf_samples_per_s"]
    yield DEVICE.format(samples=samples, **_machine(steps))
    names = ("torch", "pydist", "torch, graph", "pydist, graph")
    yield _table(
        ["CosmoFlow", "precision", "batch", *(f"{n}, ms" for n in names), "torch / pydist, graphs"],
        [
            [row["network"], row["precision"], str(row["batch"])]
            + [_seconds(row["steps"][name]["median"] * 1e3) for name in names]
            + [_ratio(1 / row["ratio_graph"])]
            for row in steps["rows"]
        ],
    )
    yield UNETS
    kinds = ("torch", "torch, compiled", "pydist")
    rows = _result("gpu_unet")["rows"]
    yield _table(
        ["U-Net", "precision", *(f"{kind}, ms" for kind in kinds)],
        [
            [row["network"], row["precision"]]
            + [
                _seconds(row["steps"][k]["median"] * 1e3) if k in row["steps"] else ""
                for k in kinds
            ]
            for row in rows
        ],
    )
    boundary = _result("gpu_boundary")
    yield BOUNDARY.format(count=len({(r["layer"], r["role"]) for r in boundary["rows"]}))
    precisions = list(boundary["gains"])
    gains = {
        kind: [row["gain"] for row in boundary["rows"] if row["precision"] == kind]
        for kind in precisions
    }
    cells = [
        f"{boundary['gains'][kind]:.2f} ({min(gains[kind]):.2f} – {max(gains[kind]):.1f})"
        for kind in precisions
    ]
    counts = [str(len(gains[kind])) for kind in precisions]
    yield _table(["", *precisions], [["cuDNN / pydist", *cells], ["measured", *counts]])
    yield PACKING
    packed = [row for row in _result("gpu_pack")["rows"] if row["face"]]
    kernels = list(dict.fromkeys(row["kernel"] for row in packed))
    faces = list(dict.fromkeys((row["face"], row["format"]) for row in packed))
    shares = {
        (row["kernel"], (row["face"], row["format"])): (
            f"{row['memory']['of_copy']:.2f} ({row['memory']['of_torch']:.2f})"
        )
        for row in packed
    }
    yield _table(
        ["face", *kernels],
        [[", ".join(face), *(shares[kernel, face] for kernel in kernels)] for face in faces],
    )
    yield from _exchanges()


def _exchanges() -> Iterator[str]:
    """Returns what was measured of messages on one GPU, and of two ranks that share it."""
    rows = [row for row in _result("gpu_overlap")["rows"] if "streams" in row["neighbors"]]
    yield OVERLAP.format(ranks=rows[0]["ranks"])
    ways = ("overlapped", "awaited", "silent")
    yield _table(
        ["link", "precision", *(f"{way}, ms" for way in ways), "exposed, ms"],
        [
            [row["neighbors"].removeprefix("streams, "), row["precision"]]
            + [_seconds(row[way]["median"] * 1e3) for way in ways]
            + [f"{row['exposed'] * 1e3:.3f} ({row['ratio']:.0%})"]
            for row in rows
        ],
    )
    transports = _result("gpu_transports")["rows"]
    names = list(transports[0]["seconds"])
    yield EXCHANGES
    yield _table(
        ["", "bytes", *names],
        [
            [row["what"], f"{row['bytes']:,}"]
            + [f"{row['seconds'][name]['median'] * 1e6:.0f}" for name in names]
            for row in transports
        ],
    )
    yield WHOLE
    yield _table(
        ["", "whole, s", "GiB", "2 ranks, s", "GiB a rank", "error"],
        [
            [row["what"]]
            + [
                f"{value:.3g}"
                for ranks in ("1", "2")
                for value in (min(row[ranks]["seconds"]), row[ranks]["peak_gib"])
            ]
            + [f"{row['gradient_error']:.1e}"]
            for row in _result("gpu_whole")["rows"]
            if "gradient_error" in row
        ],
    )


def _machine(result: Mapping[str, Any]) -> dict[str, str]:
    """Returns what a result says of its device."""
    found = {name: str(value) for name, value in result["machine"].items()}
    found["driver"] = found.get("driver_version", found.get("driver", ""))
    return found


def _result(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


def _seconds(value: float) -> str:
    return f"{value:.3g}"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    main()
