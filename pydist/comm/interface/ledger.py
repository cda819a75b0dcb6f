"""Keeps the ledger of a group: a running hash of each rank's calls, which the ranks compare.

All ranks of a group must start the same calls in the same order, or a rank receives data of another
call. So each rank keeps a hash of its calls so far. Entries hold only what all ranks share: global
shapes, dtypes, the calling module. The ranks compare their hashes

- on boards in memory that ranks of one machine share, at each call: the second rank to reach a
  call sees what the first one has started there, and needs no message;
- in each message of an exchange between hosts, which begins with `Ledger.stamp`;
- at the end of each backward (`pydist.exchange.consistency`);
- in groups over several machines, by a message before a call that follows its predecessor for the
  first time.

A repeated step finds each entry in a table and sends no message for it.
"""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Hashable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import torch
from torch import nn

from pydist._loader import native
from pydist.comm.interface.board import Group, share_board
from pydist.errors import RankFailed, RankLost, UsageError
from pydist.watchdog import MODULE_PATH

STAMP_BYTES = 32
STAMPED_TAG = 1023
"""The tag of all messages with a stamp. They match in the order in which ranks start their
exchanges, so that the stamp of an exchange that is out of order arrives, and is detected."""
_STAMP = struct.Struct("=qqqq")
_SHOWN_BYTES = 304
_COMPARED = _SHOWN_BYTES - 16  # characters of a text, which a board may truncate
_MOST_NODES = 1 << 14
"""Most entries in the table; when it is full it is cleared."""
_MODULE_CALL = nn.Module._call_impl.__code__
_graph_task = torch._C._current_graph_task_id
IN_BACKWARD = "backward"


class _Cause(threading.local):
    """The running call on sharded tensors; thread-local, as ranks can be threads.

    Attributes:
        history: see `pydist.exchange.history`; 0 outside of such calls.
        module: the cached `calling_module`, if set; None outside of such calls.
    """

    history = 0
    module: str | None = None


CAUSE = _Cause()
GROUP_SIZES: set[int] = set()
"""Sizes above 1 of the groups in which this process has made calls; while there are none, it is the
only rank of its job, and no call needs a history. The same on all ranks of a job, whatever meshes
they have."""

DIFFERENT = "the ranks make different calls"

What = tuple[Hashable, ...]
"""The name of a call, and the arguments that all ranks share."""


class LedgerEntry:
    """Call that the ledger holds.

    Attributes:
        text: the call in words, for errors.
        shown: the same for the board, truncated or padded to a fixed length.
        digest: the hash that the ranks compare.
        after: the calls that have followed it so far.
    """

    __slots__ = ("after", "digest", "shown", "text")

    def __init__(self, text: str, digest: int) -> None:
        self.text, self.digest = text, digest
        self.shown = text.encode()[:_SHOWN_BYTES].ljust(_SHOWN_BYTES, b"\0")
        self.after: dict[tuple[Hashable, ...], LedgerEntry] = {}


class Ledger:
    """Record of the calls that one rank has started in a group.

    Attributes:
        last: the call that was started last.
        process: id of the process that owns the ledger; a fork of it is not a rank.
        job_ranks: the rank in the job of each rank of the group; empty if they are the same.
        place: a label of the next calls, for calls that ranks make at different places of their
            programs; empty where the calling module identifies them.
        history: a running hash of the operations that have produced the exchanged tensors.
    """

    def __init__(self) -> None:
        self.process = os.getpid()
        self.job_ranks: Sequence[int] = ()
        self.place = ""
        self.history = 0
        self.last = LedgerEntry("nothing", 0)
        self._entries: dict[tuple[Hashable, ...], LedgerEntry] = {}
        self._board = native.CallBoard()
        self._enter = self._board.enter
        self._sees_all: bool | None = None  # the result of `share_board`, once called

    @property
    def count(self) -> int:
        """Number of calls that this rank has made so far."""
        return self._board.count

    @property
    def state(self) -> int:
        """Running hash that covers all calls so far."""
        return self._board.state

    def note(self, group: Group, what: What, *, waits: bool) -> None:
        """Enters a call that is about to start.

        Args:
            group: the group of this ledger.
            what: the call.
            waits: whether the caller waits for the other ranks before it starts another call of
                this kind, so that they can compare; False for gradients, which some ranks start
                later than others.

        Raises:
            UsageError: the ranks start different calls; the same error on all of them.
        """
        place = self.place or calling_module()
        if place != IN_BACKWARD and CAUSE.history:  # backward recomputes, on some ranks
            self.history = hash((self.history, CAUSE.history))
        key = (what, place)
        last = self.last
        entry = last.after.get(key)
        is_new = entry is None
        if entry is None:
            entry = last.after[key] = self._entry(key)
        self.last = entry
        if waits and self._sees_all is None:
            self.open(group)
        peer = self._enter(entry.digest, entry.shown)
        error = None if peer < 0 else self._on_board(group.rank, peer)
        if error is not None:
            raise error
        if is_new and waits and self._sees_all is False:
            self._compare(group)

    def open(self, group: Group) -> None:
        """Shares the board with the neighbors, once. Collective; the first waiting call does it."""
        if self._sees_all is None and group.size > 1:
            try:
                self._sees_all = share_board(self._board, group)
            except RankLost as error:
                if self.last.digest:
                    error.args = (f"{error}; rank {self.name(group.rank)} calls {self.last.text}",)
                raise

    def _entry(self, key: tuple[What, str]) -> LedgerEntry:
        if len(self._entries) >= _MOST_NODES:
            self._entries.clear()
        found = self._entries.get(key)
        if found is None:
            digest = blake2b(repr(key).encode(), digest_size=8).digest()
            text = _describe(*key)
            found = self._entries[key] = LedgerEntry(
                text, int.from_bytes(digest, "little", signed=True)
            )
        return found

    # -- comparing ----------------------------------------------------------------------------

    def _compare(self, group: Group) -> None:
        """Compares the stamp with the stamps of the ranks before and after this one. Collective.

        Stamps use the tag of exchanges: a rank that waits for a message of another exchange
        receives this one.
        """
        near = sorted({(group.rank + step) % group.size for step in (1, -1)} - {group.rank})
        mine = self.stamp()
        said = torch.frombuffer(bytearray(mine + self.last.shown), dtype=torch.uint8)
        for peer in near:
            group._send(said, peer, STAMPED_TAG)
        for peer in near:
            heard = torch.empty_like(said)
            try:
                group._recv(heard, peer, STAMPED_TAG)
            except (RankFailed, RankLost):
                raise
            except Exception as error:  # a message of another length
                raise self.misfit(group.rank, error) from error
            theirs = heard.numpy().tobytes()
            if theirs[:STAMP_BYTES] != mine:
                text = theirs[STAMP_BYTES:].rstrip(b"\0").decode(errors="replace")
                raise self.mismatch(group.rank, peer, mine, theirs[:STAMP_BYTES], text)

    def _on_board(self, rank: int, peer: int) -> UsageError | None:
        """Returns the error for the first recorded call that differs from a neighbor's."""
        for number, state, digest, _ in self._board.recent():
            theirs = self._board.call_of(peer, number)
            if theirs is not None and theirs[1] != state:
                mine = self._text_of(digest)
                return _differing(number, mine, self.name(rank), theirs[3], self.name(peer))
        return None

    def stamp(self) -> bytes:
        """Returns the header of a message of the latest call."""
        return self._board.stamp()

    def mismatch(
        self, rank: int, peer: int, mine: bytes, theirs: bytes, text: str = ""
    ) -> UsageError:
        """Returns the error for a message whose stamp differs from this rank's.

        Args:
            rank: this rank.
            peer: the sender.
            mine: the stamp of the call that this rank waits for.
            theirs: the stamp that has arrived.
            text: the sender's call, if it is known.
        """
        error = self._on_board(rank, peer)
        if error is not None:
            return error
        number, state, before, digest = _STAMP.unpack(mine)
        count, their_state, their_before, their_digest = _STAMP.unpack(theirs)
        here, there = digest, their_digest
        if count == number and state != their_state and before != their_before:
            number, here, there = number - 1, before, their_before
        if here == there:
            return UsageError(
                f"{DIFFERENT}: rank {self.name(rank)} and rank {self.name(peer)} are at call"
                f" {number} of their group, {self._text_of(digest)}, and one of the calls before"
                f" differs; the last ones of rank {self.name(rank)}: {self.last_calls(8)}"
            )
        theirs_is = (there == their_digest and text) or self._text_of(there)
        return _differing(number, self._text_of(here), self.name(rank), theirs_is, self.name(peer))

    def misfit(self, rank: int, why: object) -> UsageError:
        """Returns the error for a message that does not fit the latest call."""
        return UsageError(
            f"{DIFFERENT}: call {self.count} of the group on rank {self.name(rank)} is"
            f" {self.last.text}, and another rank has started a different call: {why}"
        )

    def last_calls(self, count: int) -> str:
        """Describes the latest calls, in order."""
        recent = self._board.recent()[-count:]
        return "; ".join(self._text_of(digest) for _, _, digest, _ in recent)

    def name(self, rank: int) -> int:
        """Returns the rank in the job of a rank of the group."""
        return self.job_ranks[rank] if self.job_ranks else rank

    def _text_of(self, digest: int) -> str:
        for entry in self._entries.values():
            if entry.digest == digest:
                return entry.text
        for _, _, other, text in self._board.recent():  # from before the table was cleared
            if other == digest:
                return text
        return "a call that this rank has never made"

    def details(self) -> list[list[Any]]:
        """Returns the calls that this rank remembers, for the other ranks."""
        return [
            [number, [digest, self._text_of(digest)]]
            for number, _, digest, _ in self._board.recent()
        ]


def different_calls(heard: Mapping[int, list[list[Any]]]) -> UsageError:
    """Returns the error for ranks whose ledgers differ; the same on all of them.

    Args:
        heard: the `details` of each rank of the group.
    """
    calls = {rank: dict(each) for rank, each in heard.items()}
    first, *others = sorted(calls)
    pairs = []
    for other in others:
        both = sorted({*calls[first], *calls[other]})
        known = max(min(calls[first], default=1), min(calls[other], default=1))
        for number in both:
            here, there = (calls[r].get(number, [0, "nothing"]) for r in (first, other))
            if number >= known and here[0] != there[0]:
                pairs.append((number, other, here[1], there[1]))
                break
    if not pairs:
        return UsageError(f"{DIFFERENT}; the first difference is older than their records")
    number, other, here, there = min(pairs)
    return _differing(number, here, first, there, other)


def _differing(number: int, here: str, rank: int, there: str, other: int) -> UsageError:
    """Returns the error for a call that differs between two ranks of the job."""
    if here[:_COMPARED] == there[:_COMPARED]:
        here, there = f"{here} (with blocks that are not shown)", f"{there} with others"
    return UsageError(
        f"{DIFFERENT}: call {number} of their group is {here} on rank {rank} and {there} on rank"
        f" {other}"
    )


def calling_module() -> str:
    """Returns the path of the innermost parallelized module that is being called; cheap.

    Returns:
        The path; "" outside of modules, and `IN_BACKWARD` in backward, which has no module.
    """
    if _graph_task() != -1:
        return IN_BACKWARD
    if CAUSE.module is not None:
        return CAUSE.module
    module = native.called_object(_MODULE_CALL, MODULE_PATH)
    return "" if module is None else str(module.__dict__[MODULE_PATH])


def _describe(what: What, module: str) -> str:
    name, *rest = what
    if rest and isinstance(rest[0], torch.dtype):  # then elements or a shape, and more
        dtype = str(rest[0]).removeprefix("torch.")
        if len(rest) > 1 and isinstance(rest[1], str):
            rest[:2] = [f"of {rest[1]} {dtype}"]
        else:
            rest[:2] = [f"of {rest[1]} elements of {dtype}" if len(rest) > 1 else f"of {dtype}"]
    shown = [each for each in rest if each not in ("", None) and not isinstance(each, bytes)]
    about = ", ".join(str(each).removeprefix("torch.") for each in shown)
    if module == IN_BACKWARD:
        where = " in backward"
    elif module:
        where = f" in module {module}{_kind_of_called()}"
    else:
        where = ""
    return f"{name} {about}".rstrip() + where


def _kind_of_called() -> str:
    """Describes the innermost parallelized module that is being called."""
    module = native.called_object(_MODULE_CALL, MODULE_PATH)
    if not isinstance(module, nn.Module):
        return ""
    said = "..." if list(module.children()) else module.extra_repr()
    return f": {type(module).__name__}({said})"


_note = Ledger.note


def _note_in_fork(self: Ledger, group: Group, what: What, *, waits: bool) -> None:
    """Replaces `Ledger.note` in a process that a rank has forked."""
    if self.process != os.getpid() and group.size > 1:
        raise UsageError(
            f"process {os.getpid()} is a fork of rank {self.name(group.rank)}, and no rank: it "
            f"can't take part in {_describe(what, '')}; make collective calls in the rank itself"
        )
    _note(self, group, what, waits=waits)


def _in_fork() -> None:
    # A fork shares the rank's connections: it would receive or answer the rank's messages.
    Ledger.note = _note_in_fork  # type: ignore[method-assign]


os.register_at_fork(after_in_child=_in_fork)
