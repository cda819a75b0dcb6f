"""The directory of a store: which rank holds which sample's block.

Every rank that has the same part of the samples keeps the same directory, and changes it by the
batches of all their sample groups, which are functions of seed, epoch and position. So the ranks
agree on owners and messages without asking each other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

_NOBODY = -1


@dataclass
class Moves:
    """Plan that says, for one rank, where each block of one batch comes from.

    Attributes:
        own: samples that this rank holds and needs.
        sends: pairs of receiver and sample, in the order of the messages.
        recvs: pairs of sender and sample, in the order of the messages.
        reads: samples that no rank holds, which this rank reads from files.
        kept: pairs of sample and the rank that keeps it from now on, on all ranks.
    """

    own: list[int] = field(default_factory=list)
    sends: list[tuple[int, int]] = field(default_factory=list)
    recvs: list[tuple[int, int]] = field(default_factory=list)
    reads: list[int] = field(default_factory=list)
    kept: list[tuple[int, int]] = field(default_factory=list)


class Directory:
    """Table that names the rank that holds each block of one part of the samples.

    A block belongs to the first rank that reads it and has room for it; it never moves. Where
    several ranks of a group have equal parts (along the channel axis), the one that holds least
    keeps it.

    Args:
        samples: number of samples.
        rank: this rank's index among the ranks that share the directory.
        groups: the sample group of each of them.
        budgets: bytes that each of them may hold.
        size_of: returns the bytes of a sample's block, the same on all of them.
    """

    def __init__(
        self,
        samples: int,
        rank: int,
        groups: Sequence[int],
        budgets: Sequence[int],
        size_of: Callable[[int], int],
    ) -> None:
        self.rank = rank
        self.budgets = list(budgets)
        self.held = [0] * len(groups)
        """Bytes that each rank holds, or will hold when the reads that were planned are done."""
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
        for sample, owner in moves.kept:
            self.owners[sample] = _NOBODY
            self.held[owner] -= self._size_of(sample)

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
        owner = min(members, key=lambda member: (self.held[member], member))
        if self.held[owner] + size > self.budgets[owner]:
            with_room = [each for each in members if self.held[each] + size <= self.budgets[each]]
            if not with_room:
                return
            owner = with_room[0]
        self.owners[sample] = owner
        self.held[owner] += size
        moves.kept.append((sample, owner))
