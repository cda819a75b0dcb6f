"""Packs many small files into a few large ones with an index, from which they are read.

`pack` writes a folder's files into a pack folder, `verify` compares one with its checksums,
`PackFileSystem` reads it through fsspec, and `PackFiles` is a data set of its files for torch.
`stage` copies the partitions of one node to its disk or memory, and `serve` sends them to readers
on other nodes.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydist.packs.dataset import PackFiles
    from pydist.packs.filesystem import PackFileSystem
    from pydist.packs.options import PackOptions
    from pydist.packs.servers import serve
    from pydist.packs.staging import stage
    from pydist.packs.verifying import verify
    from pydist.packs.writing import pack

# Imported on first use: packing needs no torch.
_HOMES = {
    "PackFileSystem": "filesystem",
    "PackFiles": "dataset",
    "PackOptions": "options",
    "pack": "writing",
    "serve": "servers",
    "stage": "staging",
    "verify": "verifying",
}

__all__ = ["PackFileSystem", "PackFiles", "PackOptions", "pack", "serve", "stage", "verify"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"pydist.packs.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'pydist.packs' has no attribute {name!r}")
