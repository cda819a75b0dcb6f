"""`pydist data stage`: copies the part of a pack that one node needs to the node."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from pydist._loader import native
from pydist.cli.console import Console
from pydist.cli.data import progress_bar
from pydist.cli.options import parse
from pydist.errors import UsageError


@dataclass(frozen=True)
class _Arguments:
    """Copies the index of a pack, and the partitions of one node, to a folder of this node.

    Run it on each node; partitions that FOLDER has already are kept. Then `pydist data serve
    FOLDER` on each node gives the others what they lack.
    """

    source: tyro.conf.Positional[Path]
    """Folder of the pack."""
    folder: tyro.conf.Positional[Path]
    """Folder on the node's own disk, or in its memory (/dev/shm)."""
    node: Annotated[str, tyro.conf.arg(metavar="I/N")]
    """Number of this node, from 0, and the number of nodes: from 0/4 to 3/4."""
    copies: int = 1
    """How many nodes each partition is copied to."""
    broadcast: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Folder in the pack that all nodes get, with all partitions that hold files of it. Folders
    that were given to `pydist data pack --broadcast` need not be named."""


def stage(arguments: Sequence[str]) -> int:
    """Runs `pydist data stage`; see `pydist data stage --help`."""
    from pydist.packs import staging

    chosen = parse(_Arguments, arguments, "pydist data stage")
    node = re.fullmatch(r"(\d{1,9})/(\d{1,9})", chosen.node)
    if node is None:
        raise UsageError(f"--node {chosen.node}: I/N is expected, such as 0/4")
    console = Console()
    began = time.perf_counter()
    with progress_bar(console) as told:
        parts = staging.stage(
            chosen.source,
            chosen.folder,
            int(node[1]),
            int(node[2]),
            copies=chosen.copies,
            broadcast=chosen.broadcast,
            progress=told,
        )
    files = [chosen.folder / native.partition_name(part) for part in parts]
    partitions = native.PackFolder(bytes(chosen.folder)).partitions
    console.print(
        f"data       {len(parts)} of {partitions} partitions, "
        f"{sum(file.stat().st_size for file in files):,} bytes in {chosen.folder}  "
        f"{time.perf_counter() - began:.0f} s",
        soft_wrap=True,
        markup=False,
    )
    return 0
