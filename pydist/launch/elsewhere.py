"""Tracks the state of ranks of other machines, for the report of a hang.

A watchdog sees only the ranks of its own machine. So a rank that has waited for half of the limit
writes to the job's store in which call it waits, and clears the entry when it continues. The report
of a hang states where each rank of another machine waits, or that it has not reported: other ranks
wait for that one. A job that makes progress sends nothing.
"""

from __future__ import annotations

import contextlib
import json
import queue
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from types import FrameType
from typing import TYPE_CHECKING

from pydist._loader import native

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

_KEY = "pydist/waits/{}"
_TIMEOUT = timedelta(seconds=2)
_MOST = 32
"""Most ranks of other machines that a report lists."""


@dataclass(frozen=True)
class Place:
    """Machine and process that run a rank.

    Attributes:
        host: name of its machine.
        pid: its process id.
        page: identity of the memory that it shares with the ranks of its machine.
    """

    host: str
    pid: int
    page: str


@dataclass(frozen=True)
class Waiting:
    """Call in which a rank waits, and its previous calls.

    Attributes:
        call: the call in words, "" if unknown.
        group: the ranks of the call's group in the job, empty for all of them.
        state: how many calls the group has started, and their hash.
        calls: the latest calls, as JSON of `Ledger.details`.
    """

    call: str = ""
    group: Sequence[int] = ()
    state: Sequence[int] = ()
    calls: str = ""


class Elsewhere:
    """Ranks of other machines, which exchange their state through the job's store."""

    def __init__(
        self, rank: int, places: Sequence[Place], store: Store, keeper: int | None = None
    ) -> None:
        """Starts the thread that accesses the store.

        Args:
            rank: this process's rank in the job.
            places: the places of all ranks, in order.
            store: the job's store; the thread makes its own connection.
            keeper: the rank whose process hosts the store, if a rank does.
        """
        self._keeper = keeper
        self._rank = rank
        own = places[rank].page
        self._others = {r: place for r, place in enumerate(places) if place.page != own}
        self._store = store
        self._connection: Store | None = None
        native.tell_elsewhere(self._unknown())
        # In a thread of its own: the process that hosts the store may be stopped.
        self._work: queue.SimpleQueue[tuple[str, Waiting | None]] = queue.SimpleQueue()
        threading.Thread(target=self._serve, name="pydist elsewhere", daemon=True).start()

    def tell(self, waiting: Waiting | None) -> None:
        """Tells other machines that this rank waits or, with None, that it continues."""
        self._work.put(("tell", waiting))

    def ask(self, waiting: Waiting) -> None:
        """Adds the state of the other machines' ranks to the report, if it arrives in time.

        Args:
            waiting: the call in which this rank waits.
        """
        native.tell_elsewhere(self._unknown())
        self._work.put(("ask", waiting))

    def _serve(self) -> None:
        while True:
            what, waiting = self._work.get()
            with contextlib.suppress(Exception):  # the store's process may be gone
                store = self._connected()
                if what == "tell":
                    said = "" if waiting is None else json.dumps(asdict(waiting))
                    store.set(_KEY.format(self._rank), said)
                elif waiting is not None:
                    heard = {rank: _heard(store, rank) for rank in self._others}
                    native.tell_elsewhere(describe(self._rank, waiting, self._others, heard))

    def _connected(self) -> Store:
        """Returns the thread's own connection, made on first use."""
        if self._connection is None:
            self._connection = self._store.clone()  # type: ignore[attr-defined]
            self._connection.set_timeout(_TIMEOUT)
        return self._connection

    def _unknown(self) -> str:
        unheard = "is on another machine, and the job's store does not answer"
        said = dict.fromkeys(self._others, unheard)
        if self._keeper in said:
            said = dict.fromkeys(said, f"{unheard}, which is in the process of rank {self._keeper}")
            said[self._keeper] = "does not answer: it is stopped, has ended, or is not connected"
        return _cut([f"{_name(rank, self._others[rank])} {text}" for rank, text in said.items()])


def _heard(store: Store, rank: int) -> Waiting | None:
    key = _KEY.format(rank)
    said = store.get(key) if store.check([key]) else b""
    return Waiting(**json.loads(said)) if said else None


def describe(
    rank: int,
    waiting: Waiting,
    others: Mapping[int, Place],
    heard: Mapping[int, Waiting | None],
) -> str:
    """Describes the ranks of other machines for a report, ranks that do not wait first.

    Args:
        rank: this rank.
        waiting: the call in which it waits.
        others: the ranks of other machines.
        heard: the state that each of them has reported.
    """
    silent: list[str] = []
    told: list[str] = []
    differ: list[str] = []
    for other, place in others.items():
        theirs = heard.get(other)
        if theirs is None:
            silent.append(
                f"{_name(other, place)} has not said that it waits: it computes, is stopped or has"
                " ended"
            )
            continue
        where = f" in {theirs.call}" if theirs.call else " for other ranks"
        told.append(f"{_name(other, place)} waits{where}")
        if not differ and theirs.group == waiting.group and theirs.state != waiting.state:
            differ += _different(rank, waiting, other, theirs)
    return _cut(silent + differ + told)


def _different(rank: int, waiting: Waiting, other: int, theirs: Waiting) -> list[str]:
    """Describes the first call that differs between two ranks; empty where one only lags."""
    if not (waiting.calls and theirs.calls):
        return []
    calls = {r: dict(json.loads(each.calls)) for r, each in ((rank, waiting), (other, theirs))}
    both = sorted(calls[rank].keys() & calls[other].keys())
    if all(calls[rank][number][0] == calls[other][number][0] for number in both):
        return []
    ledger = sys.modules["pydist.comm.interface.ledger"]  # where the calls come from
    details = {r: [[n, each[n]] for n in both] for r, each in calls.items()}
    return [str(ledger.different_calls(details))]


def _name(rank: int, place: Place) -> str:
    return f"rank {rank} (host {place.host}, process {place.pid})"


def _cut(lines: list[str]) -> str:
    more = len(lines) - _MOST
    return "\n".join(lines[:_MOST] + ([f"and {more} more ranks"] if more > 0 else []))


def waiting_at(stacks: Iterable[Iterable[FrameType]]) -> Waiting:
    """Returns the call that a thread of this process is in, by the ledger of its group.

    Args:
        stacks: the frames of each thread, the innermost first.
    """
    ledgers = sys.modules.get("pydist.comm.interface.ledger")  # a program may end before torch
    if ledgers is None:
        return Waiting()
    for frames in stacks:
        for frame in frames:
            owner = frame.f_locals.get("self")
            for each in (owner, *getattr(owner, "__dict__", {}).values()):
                ledger = getattr(each, "__dict__", {}).get("ledger", each)
                if isinstance(ledger, ledgers.Ledger) and ledger.count:
                    return Waiting(
                        f"call {ledger.count} of {_members(ledger.job_ranks)}: {ledger.last.text}",
                        list(ledger.job_ranks),
                        [ledger.count, ledger.state],
                        json.dumps(ledger.details()),
                    )
    return Waiting()


def _members(ranks: Sequence[int]) -> str:
    if not ranks:
        return "all ranks"
    shown = ", ".join(map(str, ranks[:8]))
    return f"ranks {shown}" + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
