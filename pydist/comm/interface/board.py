"""Boards: memory in which ranks of one machine read how far each other's ledgers have come."""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import socket
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from pydist import owner

if TYPE_CHECKING:
    from pydist.comm.interface.primitives import Primitives

SLOTS = 64
"""Calls that a rank may be ahead of another and still be compared with it."""
TEXT_BYTES = 304
_PAIR = 2  # number and state of a call, each a word of 8 bytes
_NUMBERS_BYTES = SLOTS * _PAIR * 8
_BYTES = _NUMBERS_BYTES + SLOTS * TEXT_BYTES
_ROW_BYTES = 512
_RECHECK_S = 0.002


class Board:
    """The last calls of this rank, for others of its machine to read, and theirs.

    Each rank writes to its own file in memory and maps those of the ranks before and after it, as
    far as they run on its machine. The files lose their names once all have mapped them. Of a job
    that is killed before, the next start removes them (`pydist.launch.leftovers`).

    Attributes:
        is_complete: whether every rank of the group reads its neighbors' boards: they see each
            difference then without a message.
    """

    def __init__(self, group: Primitives) -> None:
        """Makes this rank's board and maps its neighbors'. Collective."""
        self.is_complete = False
        self._neighbors: list[tuple[int, memoryview, memoryview]] = []
        path, memory = _make()
        try:
            self._map_neighbors(group, path, memory)
        finally:
            if memory is not None:
                Path(path).unlink(missing_ok=True)
        self._numbers, self._texts = _parts(memory or mmap.mmap(-1, _BYTES))

    def _map_neighbors(self, group: Primitives, path: str, memory: mmap.mmap | None) -> None:
        rows = _gather(group, f"{_machine()}\n{path}" if memory is not None else "")
        near = {(group.rank + step) % group.size for step in (1, -1)} - {group.rank}
        machine = rows[group.rank].partition("\n")[0]
        for peer in sorted(near):
            theirs, _, file = rows[peer].partition("\n")
            if memory is None or not theirs or theirs != machine:
                continue
            with contextlib.suppress(OSError, ValueError):
                self._neighbors.append((peer, *_parts(_mapped(file))))
        sees_all = len(self._neighbors) == len(near)
        self.is_complete = all(each == "all" for each in _gather(group, "all" if sees_all else ""))

    def write(self, number: int, state: int, text: bytes) -> None:
        """Enters a call of this rank; its number comes last, as it makes the entry valid.

        Args:
            number: of the call, from 1.
            state: of the ledger after it.
            text: `TEXT_BYTES` long.
        """
        slot = number % SLOTS
        self._numbers[_PAIR * slot] = 0
        self._texts[slot * TEXT_BYTES : (slot + 1) * TEXT_BYTES] = text
        self._numbers[_PAIR * slot + 1] = state
        self._numbers[_PAIR * slot] = number

    def differing(self, number: int, state: int) -> int | None:
        """A neighbor whose call of this number left another state.

        Neighbors that have not come so far, or are far ahead, are left out: the one that comes
        second to a call compares.
        """
        place = number % SLOTS * _PAIR
        for peer, numbers, _ in self._neighbors:
            if numbers[place] == number and numbers[place + 1] != state:
                # Memory may show the number before the state.
                time.sleep(_RECHECK_S)
                if numbers[place] == number and numbers[place + 1] != state:
                    return peer
        return None

    def call(self, peer: int, number: int) -> tuple[int, str] | None:
        """State and text of a call of a neighbor, if its board has it."""
        slot = number % SLOTS
        for rank, numbers, texts in self._neighbors:
            if rank == peer and numbers[_PAIR * slot] == number:
                text = bytes(texts[slot * TEXT_BYTES : (slot + 1) * TEXT_BYTES])
                return numbers[_PAIR * slot + 1], text.rstrip(b"\0").decode(errors="replace")
        return None


def _make() -> tuple[str, mmap.mmap | None]:
    """A new file of zeros, mapped; None where there is no place for one."""
    memory = Path("/dev/shm")
    folder = memory if memory.is_dir() else Path(tempfile.gettempdir())
    path = str(folder / f"pydist-{owner.tag()}-board-{secrets.token_hex(8)}")
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError:
        return "", None
    try:
        # Written, not only made long: a full disk shows here, and not as SIGBUS later.
        os.write(handle, bytes(_BYTES))
        return path, mmap.mmap(handle, _BYTES)
    except OSError:
        Path(path).unlink()
        return "", None
    finally:
        os.close(handle)


def _mapped(path: str) -> mmap.mmap:
    """Another rank's file, to be read."""
    handle = os.open(path, os.O_RDONLY)
    try:
        return mmap.mmap(handle, _BYTES, access=mmap.ACCESS_READ)
    finally:
        os.close(handle)


def _parts(memory: mmap.mmap) -> tuple[memoryview, memoryview]:
    """The numbers, as words, and the texts."""
    view = memoryview(memory)
    return view[:_NUMBERS_BYTES].cast("q"), view[_NUMBERS_BYTES:]


def _machine() -> str:
    """What tells machines apart, and containers that share no files are told by opening."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return socket.gethostname() + (boot.read_text().strip() if boot.exists() else "")


def _gather(group: Primitives, text: str) -> list[str]:
    """Short texts of all ranks, in rank order. Collective."""
    row = torch.zeros(_ROW_BYTES, dtype=torch.uint8, device="cpu")
    data = text.encode()
    if data and len(data) <= _ROW_BYTES:
        row[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    rows = torch.empty(group.size, _ROW_BYTES, dtype=torch.uint8, device="cpu")
    group._all_gather(row, rows)
    return [each.numpy().tobytes().rstrip(b"\0").decode() for each in rows]
