"""Makes the part of docs/performance.md that is about one GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from formatting import ratio_text, result_of, table, three_digits

DEVICE = """\
## One GPU

On one {device} (driver {driver}, CUDA {cuda}, cuDNN {cudnn}, torch {torch}), by the scripts
that `tools/gpu_check.sh` runs. Contestants of a run took turns; medians of
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


def device_parts() -> Iterator[str]:
    """Yields texts and tables in the page's order."""
    steps = result_of("gpu_step")
    samples = steps["mlperf_samples_per_s"]
    yield DEVICE.format(samples=samples, **_machine(steps))
    names = ("torch", "pydist", "torch, graph", "pydist, graph")
    yield table(
        ["CosmoFlow", "precision", "batch", *(f"{n}, ms" for n in names), "torch / pydist, graphs"],
        [
            [row["network"], row["precision"], str(row["batch"])]
            + [three_digits(row["steps"][name]["median"] * 1e3) for name in names]
            + [ratio_text(1 / row["ratio_graph"])]
            for row in steps["rows"]
        ],
    )
    yield UNETS
    kinds = ("torch", "torch, compiled", "pydist")
    rows = result_of("gpu_unet")["rows"]
    yield table(
        ["U-Net", "precision", *(f"{kind}, ms" for kind in kinds)],
        [
            [row["network"], row["precision"]]
            + [
                three_digits(row["steps"][k]["median"] * 1e3) if k in row["steps"] else ""
                for k in kinds
            ]
            for row in rows
        ],
    )
    boundary = result_of("gpu_boundary")
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
    yield table(["", *precisions], [["cuDNN / pydist", *cells], ["measured", *counts]])
    yield PACKING
    packed = [row for row in result_of("gpu_pack")["rows"] if row["face"]]
    kernels = list(dict.fromkeys(row["kernel"] for row in packed))
    faces = list(dict.fromkeys((row["face"], row["format"]) for row in packed))
    shares = {
        (row["kernel"], (row["face"], row["format"])): (
            f"{row['memory']['of_copy']:.2f} ({row['memory']['of_torch']:.2f})"
        )
        for row in packed
    }
    yield table(
        ["face", *kernels],
        [[", ".join(face), *(shares[kernel, face] for kernel in kernels)] for face in faces],
    )
    yield from _exchanges()


def _exchanges() -> Iterator[str]:
    """Returns what was measured of messages on one GPU, and of two ranks that share it."""
    rows = [row for row in result_of("gpu_overlap")["rows"] if "streams" in row["neighbors"]]
    yield OVERLAP.format(ranks=rows[0]["ranks"])
    ways = ("overlapped", "awaited", "silent")
    yield table(
        ["link", "precision", *(f"{way}, ms" for way in ways), "exposed, ms"],
        [
            [row["neighbors"].removeprefix("streams, "), row["precision"]]
            + [three_digits(row[way]["median"] * 1e3) for way in ways]
            + [f"{row['exposed'] * 1e3:.3f} ({row['ratio']:.0%})"]
            for row in rows
        ],
    )
    transports = result_of("gpu_transports")["rows"]
    names = list(transports[0]["seconds"])
    yield EXCHANGES
    yield table(
        ["", "bytes", *names],
        [
            [row["what"], f"{row['bytes']:,}"]
            + [f"{row['seconds'][name]['median'] * 1e6:.0f}" for name in names]
            for row in transports
        ],
    )
    yield WHOLE
    yield table(
        ["", "whole, s", "GiB", "2 ranks, s", "GiB a rank", "error"],
        [
            [row["what"]]
            + [
                f"{value:.3g}"
                for ranks in ("1", "2")
                for value in (min(row[ranks]["seconds"]), row[ranks]["peak_gib"])
            ]
            + [f"{row['gradient_error']:.1e}"]
            for row in result_of("gpu_whole")["rows"]
            if "gradient_error" in row
        ],
    )


def _machine(result: Mapping[str, Any]) -> dict[str, str]:
    """Returns what a result says of its device."""
    found = {name: str(value) for name, value in result["machine"].items()}
    found["driver"] = found.get("driver_version", found.get("driver", ""))
    return found
