"""Packs whose partitions are on several nodes: each serves its own, and reads the others' by TCP.

A reader finds the servers in `PYDIST_PACKS_SERVERS`, and both sides prove that they know
`PYDIST_PACKS_SECRET`, which a launcher sets for all processes of a job.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from pydist._loader import native
from pydist.errors import UsageError

SERVERS, SECRET = "PYDIST_PACKS_SERVERS", "PYDIST_PACKS_SECRET"
"""Variables of the environment."""
_SHORTEST = 16
"""Characters of a secret."""


def addresses() -> list[str]:
    """Returns the servers' addresses, from the environment; usually there are none."""
    text = os.environ.get(SERVERS, "")
    return [address.strip() for address in text.split(",") if address.strip()]


def open_pack(folder: str | Path) -> native.PackFolder:
    """Opens a pack; partitions that are not in its folder are read from the servers.

    A relative path is that of now: reads go on after `os.chdir`.

    Raises:
        DataError: there is no pack, or it is damaged.
        UsageError: there are servers, and no secret.
    """
    servers = addresses()
    path = os.fsencode(Path(folder).absolute())
    return native.PackFolder(path, servers, secret() if servers else b"")


def serve(folder: str | Path, address: str, threads: int = 8) -> native.PackServer:
    """Serves the partitions in a pack's folder until the result is deleted. Linux alone.

    Args:
        folder: a folder with the pack's index and at least one of its partitions.
        address: "HOST:PORT" (port 0: any), or the path of a Unix socket, which has a "/".
        threads: how many requests are answered at a time.

    Raises:
        DataError: there is no pack, it has no partition here or a damaged one, the address can't be
            used, or not so many threads can be started.
        UsageError: there is no secret, or the number of threads is impossible.
    """
    if not 1 <= threads <= 1024:
        raise UsageError(f"threads={threads}: from 1 to 1024")
    pack = native.PackFolder(os.fsencode(Path(folder).absolute()))
    return native.PackServer(pack, address, secret(), threads)


def secret() -> bytes:
    """Returns the key that is derived from the job's secret; raises `UsageError`."""
    text = os.environ.get(SECRET, "")
    if len(text) < _SHORTEST:
        raise UsageError(
            f"{SECRET} has {len(text)} characters: set it to {_SHORTEST} or more that "
            "others do not know, the same for servers and readers"
        )
    return hashlib.blake2b(os.fsencode(text), digest_size=16, person=b"pydist packs").digest()
