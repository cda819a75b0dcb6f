"""Packs and spills counts by blosc, and damages them; see test_blosc.py.

Usage: blosc_program.py FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pydist._loader import native
from pydist.data.store.spill import Spill
from pydist.errors import DataError
from pydist.packs import PackFiles, PackFileSystem, PackOptions, pack, verify

root = Path(sys.argv[1])
counts = np.random.default_rng(2).poisson(0.7, (3, 40_000)).astype(np.int16)
(root / "source").mkdir()
for number, values in enumerate(counts):
    (root / "source" / f"{number}").write_bytes(values.tobytes())
(root / "source" / "random").write_bytes(np.random.default_rng(3).bytes(5000))

stored = {}
ways: dict[str, Any] = {
    "zstd": {"codec": "zstd"}, "bytes": {"codec": "blosc"},
    "counts": {"codec": "blosc", "item_size": 2},
}  # fmt: skip
for name, options in ways.items():
    origin = pack(root / "source", root / name, PackOptions(**options))
    assert origin["options"].get("item_size") == (
        None if name == "zstd" else options.get("item_size", 1)
    )
    assert pack(root / "source", root / name, PackOptions(**options)) == origin, "it is kept"
    assert verify(root / name) == []
    found = {path: content for path, content in PackFiles(root / name)}
    for path, content in found.items():
        assert content == (root / "source" / path).read_bytes()
    stored[name] = origin["stored_bytes"]
assert stored["counts"] < 0.9 * stored["zstd"], stored
assert stored["counts"] < stored["bytes"], stored

files = PackFileSystem(root / "counts")
assert [files.entry(name).codec for name in ("0", "random")] == ["blosc", "raw"]
entry = files.entry("1")
partition = root / "counts" / native.partition_name(entry.partition)
content = bytearray(partition.read_bytes())
content[entry.offset + 4] ^= 1  # the size that the chunk declares
partition.write_bytes(content)
(fault,) = verify(root / "counts")
assert "1: damaged: its stored bytes do not match" in fault

spill = Spill(root, "blosc", 2)
block = torch.from_numpy(counts[0]).view(torch.uint8)
spill.write(7, block)
out = torch.empty_like(block)
assert spill.read(7, out) == spill.stored_bytes < block.nbytes / 5
assert torch.equal(out, block)
try:
    spill.write(8, torch.zeros(0, dtype=torch.uint8))
    spill.read(8, out)
except DataError as error:
    print(error)
