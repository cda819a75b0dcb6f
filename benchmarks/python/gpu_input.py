"""Compares converting stored counts to normalized inputs on a CUDA device with a copy.

int16 to float32: GB/s of bytes read and written, and the fraction of the rate of a copy within the
device of the same number of elements; the data is several times the L2 cache. Every result is
compared with the CPU's before it is timed.

    python benchmarks/python/gpu_input.py
"""

from __future__ import annotations

from functools import partial
from typing import Any

import common
import gpu
import numpy as np
import torch

from pydist.data.manifest import Manifest
from pydist.data.normalize import Normalizer


def calls(width: int, device: torch.device) -> dict[str, tuple[int, gpu.Call]]:
    """Returns, by name, the bytes that a call moves, and the call."""
    found: dict[str, tuple[int, gpu.Call]] = {}
    mean, std = (0.3,) * 4, (0.6,) * 4
    shape = (4, width, width, width)
    manifest = Manifest(shape, "CDHW", "int16", (), log1p_mean=mean, log1p_std=std)
    counts = np.random.default_rng(0).poisson(1.0, shape).astype(np.int16)
    expected = torch.empty(counts.shape)
    flag = torch.zeros(1, dtype=torch.int32, device=device)
    stored = torch.from_numpy(counts).to(device)
    for kind in ("log1p", "standardize"):
        normalizer = Normalizer(kind, manifest, "float32")
        normalizer(counts, 0, 1.0, expected.numpy())
        out = torch.full(counts.shape, torch.nan, device=device)

        def call(normalizer: Normalizer = normalizer, out: torch.Tensor = out) -> None:
            if device.type == "cuda":
                normalizer.launch(stored, counts.dtype, 0, 1.0, out, flag)
            else:
                normalizer(counts, 0, 1.0, out.numpy())

        call()
        if not torch.equal(out.cpu(), expected):
            raise SystemExit(f"gpu_input: {kind} differs from the CPU's")
        found[kind] = stored.nbytes + out.nbytes, call
    return found


def main() -> None:
    options = gpu.options_of(__doc__, rounds=30).parse_args()
    device = gpu.device_of(options)
    width = 16 if options.quick else 256
    watch = gpu.Stopwatch(device)
    source = torch.randn(4 * width**3, device=device)
    target = torch.empty_like(source)
    copy = 2 * source.nbytes, lambda: target.copy_(source)
    contestants: dict[str, tuple[int, gpu.Call]] = {"copy": copy, **calls(width, device)}
    seconds = gpu.timed(
        {name: partial(watch.kernels, [call]) for name, (_, call) in contestants.items()},
        options.rounds,
        options.seconds - 10,
    )
    rows: list[dict[str, Any]] = []
    for name, taken in seconds.items():
        moved, summary = contestants[name][0], common.summary(taken)
        rows.append({"what": name, "bytes": moved, "rate": moved / summary["median"], **summary})
    for row in rows:
        row["of_copy"] = row["rate"] / rows[0]["rate"]
    common.show(
        ["", "MB", "µs", "GB/s", "of copy"],
        [
            [r["what"], r["bytes"] / 1e6, r["median"] * 1e6, r["rate"] / 1e9, r["of_copy"]]
            for r in rows
        ],
    )
    gpu.report(options, device, rows=rows)


if __name__ == "__main__":
    main()
