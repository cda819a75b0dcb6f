"""What the kernels beside the convolutions reach of a CUDA device's memory bandwidth.

Packing and unpacking of faces of 8 MB and more, and stored counts to inputs: GB/s, bytes read and
written, and as a part of what a copy within the device reaches. Run as

    python benchmarks/python/gpu_input.py

Every result is compared with the CPU's before it is timed. Times are medians of CUDA events.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
import numpy as np
import torch

from pydist import _native as native
from pydist.data.normalize import Normalizer

LAST = torch.channels_last_3d
FORMATS = {"contiguous": torch.contiguous_format, "channels last": LAST}


def seconds(call: Callable[[], object], rounds: int) -> float:
    """Median time on the device, after three calls that do not count."""
    for _ in range(3):
        call()
    found = []
    for _ in range(rounds):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        call()
        ended.record()
        ended.synchronize()
        found.append(began.elapsed_time(ended) / 1000)
    return statistics.median(found)


def copy(elements: int, rounds: int) -> dict[str, Any]:
    """A copy within the device: what is compared with."""
    source = torch.empty(elements, device="cuda").normal_()
    target = torch.empty_like(source)
    spent = seconds(lambda: target.copy_(source), rounds)
    return {"what": "copy", "bytes": 2 * source.nbytes, "seconds": spent}


def faces(width: int, channels: int, rounds: int) -> list[dict[str, Any]]:
    """Packing and unpacking the faces of a cube of floats."""
    rows = []
    for format_name, memory_format in FORMATS.items():
        x = torch.randn(1, channels, width, width, width).contiguous(memory_format=memory_format)
        on_device = x.cuda().contiguous(memory_format=memory_format)
        for dim, face in enumerate(("depth", "height", "width"), 2):
            hi = [1, channels, width, width, width]
            hi[dim] = 1
            regions = native.Regions([native.Box([0] * 5, hi)])
            expected = torch.empty(regions.elements)
            native.pack(x, regions, expected)
            buffer = torch.full((regions.elements,), torch.nan, device="cuda")
            native.pack(on_device, regions, buffer)
            assert torch.equal(buffer.cpu(), expected), (format_name, face)
            for name, kernel, order in (
                ("pack", native.pack, (on_device, regions, buffer)),
                ("unpack", native.unpack, (buffer, regions, on_device)),
            ):
                spent = seconds(lambda kernel=kernel, order=order: kernel(*order), rounds)
                what = f"{name} {face}, {format_name}"
                rows.append({"what": what, "bytes": 2 * buffer.nbytes, "seconds": spent})
    return rows


class Counts:
    """As much of a manifest as a normalisation needs."""

    sample_shape = (4, 1, 1, 1)
    log1p_mean, log1p_std = (0.3,) * 4, (0.6,) * 4
    files = ()


def inputs(width: int, rounds: int) -> list[dict[str, Any]]:
    """int16 counts to normalised floats."""
    rows = []
    counts = np.random.default_rng(0).poisson(1.0, (4, width, width, width)).astype(np.int16)
    expected = torch.empty(counts.shape)
    found = torch.zeros(1, dtype=torch.int32, device="cuda")
    stored = torch.from_numpy(counts).cuda()
    for kind in ("log1p", "standardize"):
        normalizer = Normalizer(kind, Counts, "float32")  # type: ignore[arg-type]
        normalizer(counts, 0, 1.0, expected.numpy())
        out = torch.full(counts.shape, torch.nan, device="cuda")

        def call(normalizer: Normalizer = normalizer, out: torch.Tensor = out) -> None:
            normalizer.launch(stored, counts.dtype, 0, 1.0, out, found)

        call()
        assert torch.equal(out.cpu(), expected), kind
        moved = stored.nbytes + out.nbytes
        rows.append({"what": f"{kind}, int16", "bytes": moved, "seconds": seconds(call, rounds)})
    return rows


def main() -> None:
    options = common.parser(__doc__, rounds=30).parse_args()
    width, channels = (32, 4) if options.quick else (256, 32)
    rows = [copy(width**3 * channels, options.rounds)]
    rows += faces(width, channels, options.rounds) + inputs(width, options.rounds)
    ceiling = rows[0]["bytes"] / rows[0]["seconds"]
    for row in rows:
        row["gb_per_s"] = row["bytes"] / row["seconds"] / 1e9
        row["of_copy"] = row["bytes"] / row["seconds"] / ceiling
    common.show(
        ["", "MB", "us", "GB/s", "of copy"],
        [
            [r["what"], r["bytes"] / 1e6, r["seconds"] * 1e6, r["gb_per_s"], r["of_copy"]]
            for r in rows
        ],
    )
    device = torch.cuda.get_device_properties(0)
    about = {"device": device.name, "cuda": torch.version.cuda}
    result = {"machine": common.machine(**about), "rounds": options.rounds, "rows": rows}
    common.write(result, Path(__file__).stem, options)


if __name__ == "__main__":
    main()
