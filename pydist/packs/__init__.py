"""Packs of many small files: a few large files with an index, read without unpacking them.

`pack` writes a folder's files into a pack folder, `verify` compares one with its checksums,
`PackFileSystem` reads it through fsspec, and `PackFiles` is a data set of its files for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydist.packs.dataset import PackFiles
    from pydist.packs.filesystem import PackFileSystem
    from pydist.packs.verifying import verify
    from pydist.packs.writing import PackOptions, pack

# Imported on first use: packing needs no torch.
_HOMES = {
    "PackFileSystem": "filesystem",
    "PackFiles": "dataset",
    "PackOptions": "writing",
    "pack": "writing",
    "verify": "verifying",
}

__all__ = ["PackFileSystem", "PackFiles", "PackOptions", "pack", "verify"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"pydist.packs.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'pydist.packs' has no attribute {name!r}")
