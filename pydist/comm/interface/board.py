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
        mine = f"{owner.kernel()}\n{path}" if page is not None else "\n"
        rows = {rank: text.decode() for rank, text in gather_texts(group, mine.encode()).items()}
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
        seen = gather_texts(group, b"all" if sees_all else b"some").values()
        return all(each == b"all" for each in seen)
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


def gather_texts(group: Group, mine: bytes) -> dict[int, bytes]:
    """Gathers byte strings of all ranks of a group, bypassing the ledger. Collective.

    Args:
        group: the ranks.
        mine: at least one byte.

    Returns:
        The byte strings by rank, in rank order.
    """
    size = torch.tensor([len(mine)], device="cpu")
    sizes = torch.empty(group.size, 1, dtype=torch.int64, device="cpu")
    group._all_gather(size, sizes)
    longest = int(sizes.max())
    row = torch.zeros(longest, dtype=torch.uint8, device="cpu")
    row[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
    rows = torch.empty(group.size, longest, dtype=torch.uint8, device="cpu")
    group._all_gather(row, rows)
    lengths: list[int] = sizes.flatten().tolist()
    return {r: rows[r, :length].numpy().tobytes() for r, length in enumerate(lengths)}
