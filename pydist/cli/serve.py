"""`pydist data serve`: serves the partitions of a pack that this node has."""

from __future__ import annotations

import signal
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import tyro

from pydist.cli.options import parse


@dataclass(frozen=True)
class _Arguments:
    """Serves the partitions of a pack that are in FOLDER, until it gets SIGTERM or SIGINT.

    Readers find the servers of all nodes in PYDIST_PACKS_SERVERS (addresses, separated by commas).
    Servers and readers need the same PYDIST_PACKS_SECRET.
    """

    folder: tyro.conf.Positional[Path]
    """Folder with the pack's index and at least one of its partitions."""
    listen: str = "0.0.0.0:0"
    """Address, as HOST:PORT (port 0: any), or the path of a Unix socket."""
    threads: int = 8
    """How many requests are answered at a time."""


def serve(arguments: Sequence[str]) -> int:
    """Runs `pydist data serve`; see `pydist data serve --help`."""
    from pydist.packs import servers

    chosen = parse(_Arguments, arguments, "pydist data serve")
    stopped = threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        stopped.set()

    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, stop)
    server = servers.serve(chosen.folder, chosen.listen, chosen.threads)
    print(f"serving    {server.partitions} partitions at {server.address}", flush=True)
    stopped.wait()
    print(f"served     {server.requests:,} requests, {server.sent_bytes:,} bytes", flush=True)
    return 0
