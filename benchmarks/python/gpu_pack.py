"""Compares packing, unpacking and adding faces of a cube with a contiguous copy and with torch.

Faces of more than 8 MB, as ranks exchange them: different planes, which come from memory ("memory":
together more than twice the L2 cache), and the same plane repeatedly ("cache": as after the
convolution that has just written it). Each is compared, under the same condition, with copies of
the same number of bytes, as bytes read and written per second, and with torch's own strided call
on the same face (copy_ or add_).

Goals, from memory: no slower than torch, within 5 %; and 0.85 of the copy's rate, where a face has
contiguous pieces of 64 bytes or more. Devices read 64 bytes at a time ("granules"), and a width
face in C order uses one element of each granule: it can't reach the copy's rate. "granules": GB/s
if all bytes of the granules are counted.

    python benchmarks/python/gpu_pack.py
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import common
import gpu
import torch
from torch import Tensor

from pydist._loader import native

FACES = {"depth": 2, "height": 3, "width": 4}
FORMATS = {"contiguous": torch.contiguous_format, "channels-last": torch.channels_last_3d}
GOAL_OF_COPY = 0.85
GOAL_OF_TORCH = 0.95
# Bytes that an H100 reads at least (the default of cudaLimitMaxL2FetchGranularity).
GRANULE = 64
# Number of arrays of the face's size that each call reads or writes.
KERNELS = {"pack": 2, "unpack": 2, "unpack_add": 3}


class Case(NamedTuple):
    kernel: str
    face: str
    format: str
    source: str
    of: str = "pydist"


def planes(x: Tensor, dim: int, count: int) -> list[native.Regions]:
    """Returns planes across a dim, as far apart as possible: neighbors share sectors."""
    order = (0, 2, 3, 4, 1) if x.is_contiguous(memory_format=torch.channels_last_3d) else None
    found = []
    for at in range(0, x.shape[dim], max(1, x.shape[dim] // count)):
        lo, hi = [0] * 5, list(x.shape)
        lo[dim], hi[dim] = at, at + 1
        found.append(native.Regions([native.Box(lo, hi)], order))
    return found[:count]


def check(x: Tensor, dim: int, regions: native.Regions, at: int) -> None:
    """Checks that the kernels move the same values as torch.

    Raises:
        SystemExit: they do not.
    """
    last = x.is_contiguous(memory_format=torch.channels_last_3d)
    face = x.narrow(dim, at, 1)
    expected = (face.movedim(1, -1) if last else face).reshape(-1)
    buffer = torch.full_like(expected, torch.nan)
    native.pack(x, regions, buffer)
    target = torch.zeros_like(x)
    native.unpack(buffer, regions, target)
    native.unpack_add(buffer, regions, target)
    same = torch.equal(buffer, expected) and torch.equal(target.narrow(dim, at, 1), face * 2)
    target.narrow(dim, at, 1).zero_()
    if not same or bool(target.any()):
        raise SystemExit(f"gpu_pack: a face across dim {dim} came out wrong")


def calls(x: Tensor, dim: int, count: int) -> dict[tuple[str, str], list[gpu.Call]]:
    """Returns calls by kernel and library: one for every plane, each with its own buffer."""
    regions = planes(x, dim, count)
    step = max(1, x.shape[dim] // count)
    check(x, dim, regions[-1], (len(regions) - 1) * step)
    buffers = [x.new_empty(each.elements).normal_() for each in regions]
    each_one = list(zip(regions, buffers, strict=True))
    last = x.is_contiguous(memory_format=torch.channels_last_3d)
    faces = [x.narrow(dim, at * step, 1) for at in range(len(regions))]
    if last:
        faces = [face.movedim(1, -1) for face in faces]
    both = [(face, b.view(face.shape)) for face, b in zip(faces, buffers, strict=True)]
    return {
        ("pack", "pydist"): [partial(native.pack, x, r, b) for r, b in each_one],
        ("pack", "torch"): [partial(b.copy_, face) for face, b in both],
        ("unpack_add", "pydist"): [partial(native.unpack_add, b, r, x) for r, b in each_one],
        ("unpack_add", "torch"): [partial(face.add_, b) for face, b in both],
        ("unpack", "pydist"): [partial(native.unpack, b, r, x) for r, b in each_one],
        ("unpack", "torch"): [partial(face.copy_, b) for face, b in both],
    }


def piece_bytes(x: Tensor, dim: int) -> int:
    """Returns the bytes of a plane across a dim that follow each other in memory."""
    return x.stride(dim) * x.element_size()


def main() -> None:
    options = gpu.options_of(__doc__, rounds=25).parse_args()
    device = gpu.device_of(options)
    width, channels = (16, 4) if options.quick else (256, 32)
    face_bytes = 4 * channels * width**2
    # 64 bytes between contiguous floats: planes closer than that come from memory together.
    count = max(2, width // 16)
    watch = gpu.Stopwatch(device)
    contestants: dict[Case, Callable[[], float]] = {}

    pieces: dict[tuple[str, str], int] = {}

    def add(kernel: str, face: str, format_name: str, each: list[gpu.Call], of: str) -> None:
        sources = {"memory": each, "cache": each[:1] * len(each)}
        for source, some in sources.items():
            contestants[Case(kernel, face, format_name, source, of)] = partial(watch.kernels, some)

    pairs = [torch.randn(2, face_bytes // 4, device=device) for _ in range(count)]
    add("copy", "", "", [partial(pair[1].copy_, pair[0]) for pair in pairs], "torch")
    generator = torch.Generator(device).manual_seed(0)
    shape = (1, channels, width, width, width)
    for format_name, memory_format in FORMATS.items():
        x = torch.randn(shape, device=device, generator=generator)
        x = x.contiguous(memory_format=memory_format)
        for face, dim in FACES.items():
            pieces[face, format_name] = piece_bytes(x, dim)
            for (kernel, of), some in calls(x, dim, count).items():
                add(kernel, face, format_name, some, of)
    if device.type == "cuda" and count * face_bytes < 2 * gpu.l2_bytes(device):
        print("the planes go into twice the L2 cache: what is called memory is in part the cache")
    seconds = gpu.timed(contestants, options.rounds, options.seconds - 15)
    rows = rows_of(seconds, face_bytes, pieces)
    head = [
        "", "MB", "µs", "GB/s", "granules", "of copy", "of torch",
        "cache: µs", "of copy", "of torch", "goal", "",
    ]  # fmt: skip
    common.show(head, [cells(row) for row in rows])
    gpu.report(options, device, rows=rows, planes=count, rounds=len(next(iter(seconds.values()))))


def rows_of(
    seconds: dict[Case, list[float]], face_bytes: int, pieces: dict[tuple[str, str], int]
) -> list[dict[str, Any]]:
    """Returns a row per kernel, face and format."""
    median = {case: common.summary(taken)["median"] for case, taken in seconds.items()}
    rows = []
    for case in median:
        kernel, face, format_name, source, of = case
        if source == "cache" or (face and of == "torch"):
            continue
        row: dict[str, Any] = {
            "kernel": kernel, "face": face, "format": format_name, "bytes": face_bytes,
        }  # fmt: skip
        arrays = KERNELS.get(kernel, 2)
        moved = arrays * face_bytes
        piece = pieces.get((face, format_name), face_bytes)
        granules = face_bytes // piece * (-(-piece // GRANULE) * GRANULE)
        fetched = face_bytes + (arrays - 1) * granules
        for source in ("memory", "cache"):
            taken = median[case._replace(source=source)]
            copy = median[Case("copy", "", "", source, "torch")]
            torch_taken = median[case._replace(source=source, of="torch")]
            rate = moved / taken
            row[source] = {
                "seconds": taken, "bytes_per_s": rate, "granule_bytes_per_s": fetched / taken,
                "of_copy": rate / (2 * face_bytes / copy), "of_torch": torch_taken / taken,
                "torch_seconds": torch_taken,
                "summary": common.summary(seconds[case._replace(source=source)]),
            }  # fmt: skip
        if face:
            row["piece_bytes"] = piece
            row["goal"] = GOAL_OF_COPY if piece >= GRANULE else None
            memory = row["memory"]
            row["met"] = memory["of_torch"] >= GOAL_OF_TORCH and memory["of_copy"] >= (
                row["goal"] or 0
            )
        rows.append(row)
    return rows


def cells(row: dict[str, Any]) -> list[Any]:
    """Returns the cells of a row of the table."""
    memory, cache = row["memory"], row["cache"]
    what = ", ".join(part for part in (f"{row['kernel']} {row['face']}", row["format"]) if part)
    met = {True: "met", False: "missed", None: None}[row.get("met")]
    return [
        what, row["bytes"] / 1e6, memory["seconds"] * 1e6, memory["bytes_per_s"] / 1e9,
        memory["granule_bytes_per_s"] / 1e9, memory["of_copy"], memory["of_torch"],
        cache["seconds"] * 1e6, cache["of_copy"], cache["of_torch"], row.get("goal"), met,
    ]  # fmt: skip


if __name__ == "__main__":
    main()
