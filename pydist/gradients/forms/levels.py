"""Implements forms in two levels: within groups of ranks, and between these groups.

Each bucket is reduce-scattered within the groups, the ranks that have received equal intervals
reduce them between the groups, and the results are gathered within the groups:

    within    rank 0 [ab]  rank 1 [ab]      rank 2 [ab]  rank 3 [ab]
    sums      rank 0 [a ]  rank 1 [ b]      rank 2 [a ]  rank 3 [ b]
    between   0 and 2: a, 1 and 3: b
    gathered  [ab] on all

With n ranks in a group, a rank sends an n-th of the bucket between groups. Forms differ in the
groups, the intervals, and what they send between groups.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pydist.comm.interface.reduction import divide_
from pydist.gradients.forms.form import Form
from pydist.gradients.forms.messages import Final, Messages, Sequel, even_counts

if TYPE_CHECKING:
    from pydist.comm.interface.handles import Work
    from pydist.comm.interface.transport import Transport
    from pydist.gradients.leaf import Leaf


class Levels(Form):
    """Base of forms that reduce in two levels.

    Attributes:
        within: the groups of the first level: the sample group, a host, or a row of a grid.
        between: connects the ranks with one index in all these groups.
    """

    def __init__(self, within: Messages, between: Messages) -> None:
        self.within, self.between = within, between
        self.transports = [*self.within.transports, *self.between.transports]
        self._on_hosts = within.transport.device is None
        self._started: deque[Sequel] = deque()  # not to the last message

    @property
    def runs_ahead(self) -> bool:
        """Whether messages after the first one of a bucket may start while backward runs."""
        return self._on_hosts

    def start(self, row: Tensor, leaves: Sequence[Leaf]) -> Work:
        """Starts the messages of a row, which follow each other; see `Form.start`."""
        work = Sequel(self._reduce(row, leaves))
        if self.runs_ahead and row.device.type == "cpu":
            self._started.append(work)
        return work

    def progress(self) -> None:
        """Starts messages that follow complete ones, row by row; see `Form.progress`."""
        while self._started and self._started[0].advance():
            self._started.popleft()

    def conclude(self, kept: Callable[[Leaf], bool]) -> None:
        """Forgets the rows of the pass; see `Form.conclude`."""
        del kept
        self.abandon()

    def abandon(self) -> None:
        """Forgets the rows of the pass; see `Form.abandon`."""
        self._started.clear()

    def sent(self) -> Mapping[str, int]:
        """Returns the bytes sent within and between the groups; see `Form.sent`."""
        return {"within": self.within.sent, "between": self.between.sent}

    def _reduce(self, row: Tensor, leaves: Sequence[Leaf]) -> Iterator[Work]:
        within = self.within
        if within.size == 1:
            yield from self._await(row, None)
            if row.numel():  # as on ranks of larger groups, whose interval may be empty
                self.between.begin()
                yield from self._exchange(row, leaves)
            return
        counts = self._counts(row, leaves)
        part = torch.empty(counts[within.rank], dtype=row.dtype, device=row.device)
        within.begin()
        yield from self._await(part, within.reduce_scatter(row, part, counts, self._divisor()))
        if part.numel():
            self.between.begin()
            yield from self._exchange(part, self._own(leaves))
        yield Final(within.all_gather(part, row, counts))

    def _await(self, part: Tensor, work: Work | None) -> Iterator[Work]:
        """Yields what a bucket waits for before it is sent between groups.

        Args:
            part: this rank's interval of the group's gradient.
            work: the message that brings it; None if the group is this rank alone.
        """
        del part
        if work is not None:
            yield work

    def _last(self, work: Work) -> Work:
        """Marks the last message between groups, which is the last one if a rank is a group."""
        return Final(work) if self.within.size == 1 else work

    def _divisor(self) -> int:
        """Returns the number by which sums within a group are divided: here they become means."""
        return self.within.size

    def _counts(self, row: Tensor, leaves: Sequence[Leaf]) -> list[int]:
        """Returns the elements of the row that each rank of a group reduces between the groups."""
        del leaves
        return even_counts(row.numel(), self.within.size)

    def _own(self, leaves: Sequence[Leaf]) -> Sequence[Leaf]:
        """Returns the parameters of this rank's interval, where intervals are of whole ones."""
        return leaves

    @abstractmethod
    def _exchange(self, part: Tensor, leaves: Sequence[Leaf]) -> Iterator[Work]:
        """Makes a group's interval the mean over the groups, in place."""


def messages_of(group: Transport) -> Messages:
    """Returns the collectives of a group. Collective.

    On devices there is no second group: NCCL needs one order of messages in all groups. Else all
    ranks split, also if they are alone: gloo expects that processes make equally many groups.
    """
    return Messages(group, None if group.device is not None else group.split(0, group.rank))


class NarrowForm(Levels):
    """Gradients that are rounded to fp16 or bf16 between sample groups.

    Each rank rounds its group's mean once; the sum is formed in fp32, in the order of ranks,
    divided and rounded once more. So a sum overflows only if the mean does. Values of more than
    65504 become infinite in fp16.
    """

    def __init__(self, name: str, dtype: torch.dtype, within: Messages, between: Messages) -> None:
        super().__init__(within, between)
        self.name, self._dtype = name, dtype

    def _exchange(self, part: Tensor, leaves: Sequence[Leaf]) -> Iterator[Work]:
        del leaves
        between = self.between
        narrow = part.to(self._dtype, copy=True)
        counts = even_counts(narrow.numel(), between.size)
        mean = torch.empty(counts[between.rank], dtype=self._dtype, device=part.device)
        yield between.reduce_scatter(narrow, mean, counts, between.size)
        yield self._last(between.all_gather(mean, narrow, counts))
        part.copy_(narrow)


class TorusForm(Levels):
    """Form that reduces on a 2-D torus of ranks.

    A bucket is reduce-scattered along rows, all-reduced along columns and all-gathered along rows.

    Of N ranks in rows of X a rank sends 2 (X - 1) / X of a bucket along its row and at most 2 / X
    of it along its column, in 2 (X - 1) + 2 (N / X - 1) instead of 2 (N - 1) steps of rings.

    Source: Mikami et al. (2018), arXiv:1811.05233.
    """

    name = "torus"

    def _divisor(self) -> int:
        return 1

    def _exchange(self, part: Tensor, leaves: Sequence[Leaf]) -> Iterator[Work]:
        del leaves
        yield self._last(self.between.all_reduce(part))
        divide_(part, self.within.size * self.between.size)


class HierarchicalForm(Levels):
    """Form that sums on each host, all-reduces between the hosts' first ranks, and broadcasts.

    Hosts may have different numbers of ranks. The first rank of each sends whole buckets.

    Source: Jia et al. (2018), arXiv:1807.11205.
    """

    name = "hierarchical"

    def __init__(self, within: Messages, between: Messages, ranks: int) -> None:
        """Connects the ranks.

        Args:
            within: the ranks on this host.
            between: the first ranks of all hosts; on other ranks another group, which stays idle.
            ranks: number of ranks on all hosts.
        """
        super().__init__(within, between)
        self._ranks = ranks

    def _divisor(self) -> int:
        return 1

    def _counts(self, row: Tensor, leaves: Sequence[Leaf]) -> list[int]:
        del leaves
        return [row.numel(), *[0] * (self.within.size - 1)]

    def _exchange(self, part: Tensor, leaves: Sequence[Leaf]) -> Iterator[Work]:
        del leaves
        yield self._last(self.between.all_reduce(part))
        divide_(part, self._ranks)
