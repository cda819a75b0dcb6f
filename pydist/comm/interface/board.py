"""Boards: shared memory in which ranks of one machine read the state of each other's ledgers."""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import tempfile
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from pydist import owner
from pydist._loader import native

_PAGE_BYTES = native.CallBoard.PAGE_BYTES
_ROW_BYTES = 512


class Group(Protocol):
    """Operations that boards and ledgers need of a group of ranks; see `Primitives`."""

    rank: int
    size: int

    def _send(self, tensor: Tensor, dest: int, tag: int) -> None: ...

    def _recv(self, tensor: Tensor, source: int, tag: int) -> None: ...

    def _all_gather(self, tensor: Tensor, out: Tensor) -> None: ...


def share_board(board: native.CallBoard, group: Group) -> bool:
    """Maps a rank's board into its neighbors' memory, and theirs into its own. Collective.

    Each rank writes to its own file in shared memory and maps the files of the ranks before and
    after it, if they run on its machine. The files are unlinked once all ranks have mapped them. If
    the job is killed earlier, the next start removes them (`pydist.launch.leftovers`).

    Args:
        board: this rank's board.
        group: the ranks that make the same calls.

    Returns:
        Whether every rank of the group reads its neighbors' boards, so that all differences are
        found without messages.
    """
    path, page = _make()
    try:
        rows = _gather(group, f"{owner.kernel()}\n{path}" if page is not None else "")
        near = {(group.rank + step) % group.size for step in (1, -1)} - {group.rank}
        machine = rows[group.rank].partition("\n")[0]
        neighbors = []
        for peer in sorted(near):
            theirs, _, file = rows[peer].partition("\n")
            if page is None or not theirs or theirs != machine:
                continue
            with contextlib.suppress(OSError, ValueError):
                neighbors.append((peer, _mapped(file)))
        if page is not None:
            board.share(page, neighbors)
        sees_all = len(neighbors) == len(near)
        return all(each == "all" for each in _gather(group, "all" if sees_all else ""))
    finally:
        if page is not None:
            Path(path).unlink(missing_ok=True)


def _make() -> tuple[str, mmap.mmap | None]:
    """Creates and maps a new file of zeros; None instead of the mapping if that fails."""
    memory = Path("/dev/shm")
    folder = memory if memory.is_dir() else Path(tempfile.gettempdir())
    path = str(folder / f"pydist-{owner.tag()}-board-{secrets.token_hex(8)}")
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError:
        return "", None
    try:
        # Written, not only truncated to size: a full disk fails here, and not as SIGBUS later.
        os.write(handle, bytes(_PAGE_BYTES))
        return path, mmap.mmap(handle, _PAGE_BYTES)
    except OSError:
        Path(path).unlink()
        return "", None
    finally:
        os.close(handle)


def _mapped(path: str) -> mmap.mmap:
    """Maps another rank's file read-only."""
    handle = os.open(path, os.O_RDONLY)
    try:
        return mmap.mmap(handle, _PAGE_BYTES, access=mmap.ACCESS_READ)
    finally:
        os.close(handle)


def _gather(group: Group, text: str) -> list[str]:
    """Returns short texts of all ranks, in rank order. Collective."""
    row = torch.zeros(_ROW_BYTES, dtype=torch.uint8, device="cpu")
    data = text.encode()
    if data and len(data) <= _ROW_BYTES:
        row[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    rows = torch.empty(group.size, _ROW_BYTES, dtype=torch.uint8, device="cpu")
    group._all_gather(row, rows)
    return [each.numpy().tobytes().rstrip(b"\0").decode() for each in rows]
