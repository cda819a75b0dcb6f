"""The directory of a store: which rank holds which sample's block.

Every rank that has the same part of the samples keeps the same directory, and changes it by the
batches of all their sample groups, which are functions of seed, epoch and position. So the ranks
agree on owners and messages without asking each other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

_NOBODY = -1


class Kept(NamedTuple):
    """A sample that a rank keeps after reading it."""

    sample: int
    owner: int
    on_disk: bool


class Budget(NamedTuple):
    """Bytes that a rank may hold."""

    memory: int
    disk: int = 0


@dataclass
class Moves:
    """Plan that says, for one rank, where each block of one batch comes from.

    Attributes:
        own: samples that this rank holds and needs.
        sends: pairs of receiver and sample, in the order of the messages.
        recvs: pairs of sender and sample, in the order of the messages.
        reads: samples that no rank holds, which this rank reads from files.
        kept: samples that some rank keeps from now on, of all ranks.
    """

    own: list[int] = field(default_factory=list)
    sends: list[tuple[int, int]] = field(default_factory=list)
    recvs: list[tuple[int, int]] = field(default_factory=list)
    reads: list[int] = field(default_factory=list)
    kept: list[Kept] = field(default_factory=list)


class Directory:
    """Table that names the rank that holds each block of one part of the samples.

    A block belongs to the first rank that reads it and has room for it, in memory or else on disk;
    it never moves. Where several ranks of a group have equal parts (along the channel axis), the
    one that holds least keeps it.

    Args:
        samples: number of samples.
        rank: this rank's index among the ranks that share the directory.
        groups: the sample group of each of them.
        budgets: what each of them may hold.
        size_of: returns the bytes of a sample's block, the same on all of them.
    """

    def __init__(
        self,
        samples: int,
        rank: int,
        groups: Sequence[int],
        budgets: Sequence[Budget],
        size_of: Callable[[int], int],
    ) -> None:
        self.rank = rank
        self.budgets = list(budgets)
        self.held = [[0, 0] for _ in groups]
        """Bytes that each rank holds in memory and on disk, or will hold when the reads that were
        planned are done."""
        self.owners = np.full(samples, _NOBODY, dtype=np.int32)
        """The rank that holds each sample's block; -1 for none."""
        self._size_of = size_of
        self._members = {
            group: [rank for rank, each in enumerate(groups) if each == group]
            for group in dict.fromkeys(groups)
        }

    @property
    def groups(self) -> list[int]:
        """The sample groups whose batches determine the directory, in order."""
        return list(self._members)

    def place(self, batches: Mapping[int, Sequence[int]]) -> Moves:
        """Decides where the blocks of a batch come from, and which ranks keep the new ones.

        Args:
            batches: the samples of each of `groups`.
        """
        moves = Moves()
        new: dict[int, int] = {}
        for group, members in self._members.items():
            for sample in batches[group]:
                owner = int(self.owners[sample])
                if owner == _NOBODY:
                    new.setdefault(sample, group)
                for member in members:
                    self._note(moves, sample, owner, member)
        for sample, group in new.items():
            self._keep(moves, sample, self._members[group])
        return moves

    def undo(self, moves: Moves) -> None:
        """Takes back the decisions of the latest `place` that was not undone."""
        for sample, owner, on_disk in moves.kept:
            self.owners[sample] = _NOBODY
            self.held[owner][on_disk] -= self._size_of(sample)

    def adopt(self, found: Sequence[Sequence[int]]) -> None:
        """Takes over the samples that each rank has on disk from an earlier run.

        Args:
            found: the samples of each rank. The first of several ranks keeps a sample.
        """
        for owner, samples in enumerate(found):
            for sample in samples:
                if self.owners[sample] == _NOBODY:
                    self.owners[sample] = owner
                    self.held[owner][1] += self._size_of(sample)

    def owned(self, owner: int) -> list[int]:
        """Returns the samples of a rank."""
        return [int(sample) for sample in np.flatnonzero(self.owners == owner)]

    def is_final(self) -> bool:
        """Returns whether this rank keeps no further sample, as all have owners, or do not fit."""
        free = np.flatnonzero(self.owners == _NOBODY)
        return all(self._place(self.rank, self._size_of(int(sample))) is None for sample in free)

    def _place(self, rank: int, size: int) -> bool | None:
        """Returns whether a block's place on a rank is on disk; None if it fits nowhere."""
        places = zip(self.held[rank], self.budgets[rank], (False, True), strict=True)
        return next((place for held, most, place in places if held + size <= most), None)

    def _note(self, moves: Moves, sample: int, owner: int, member: int) -> None:
        """Enters the way of one block to one rank, if it concerns this rank."""
        if owner == _NOBODY:
            if member == self.rank:
                moves.reads.append(sample)
        elif owner == member:
            if member == self.rank:
                moves.own.append(sample)
        elif owner == self.rank:
            moves.sends.append((member, sample))
        elif member == self.rank:
            moves.recvs.append((owner, sample))

    def _keep(self, moves: Moves, sample: int, members: Sequence[int]) -> None:
        """Chooses the rank that keeps a block, among those that read it."""
        size = self._size_of(sample)
        places = {member: self._place(member, size) for member in members}
        with_room = {member: place for member, place in places.items() if place is not None}
        if with_room:
            owner = min(with_room, key=lambda member: (sum(self.held[member]), member))
            self.owners[sample] = owner
            self.held[owner][with_room[owner]] += size
            moves.kept.append(Kept(sample, owner, with_room[owner]))
