"""How many samples each sample group has in a global batch, and what its loss weighs."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pydist import marks
from pydist.errors import NotSupported

if TYPE_CHECKING:
    from pydist.comm import Work
    from pydist.mesh import Mesh


_NESTED = 16
"""Backward passes that may run within each other."""
_MARK = "pydist batch"
_ROWS = "pydist rows"
_numbers = itertools.count()


class GroupSizes:
    """The number of samples of each sample group in one global batch.

    Each group knows its own number; the others' travel in one small all-gather over the data axis,
    which runs on host memory. It starts with `start`, or where a value is first read.

    Args:
        mesh: the mesh.
        own: samples of this rank's group.
        first_sample: index in the global batch of the group's first sample, where the caller knows
            it; by default the sum of the sizes of the groups before this one.
        agreed: whether all groups process their batches together. Groups that evaluate at their
            own pace exchange nothing, and each takes the others to have as many samples as itself.
        weighs: whether a group's loss weighs by its samples; else all groups weigh the same.
        use: what the sizes are needed for, to be compared between the groups.
    """

    def __init__(
        self,
        mesh: Mesh,
        own: int,
        first_sample: int | None = None,
        *,
        agreed: bool = True,
        weighs: bool = True,
        use: str = "a batch",
    ) -> None:
        self._use = f"batch sizes of {use}"
        self._number = next(_numbers)
        self.in_features = False
        """Whether all results of the forward pass are marked as the batch's, and not outputs only:
        one group may make it alone, so it must be told by the graph."""
        self._weight: float | None = None
        self._first = self.given_first = first_sample
        """Index of the first sample, where the caller has given it."""
        self._index = mesh.data_index
        self._group, self._timers = mesh.data, mesh.session.timers
        self._weighs = weighs
        exchanged = agreed and mesh.data_size > 1
        self._counts = None if exchanged else (own,) * mesh.data_size
        self.agreed = agreed
        """Whether the counts are those of all groups."""
        self.entered: object | None = None
        """What has taken the batch into a model (`pydist.batches.Batches`)."""
        self._parts = mesh.data_size
        self.own = own
        """Samples of this rank's group."""
        self._started: tuple[Work, torch.Tensor] | None = None
        """The exchange under way, and where it puts the counts."""

    def start(self) -> None:
        """Starts the exchange. Collective over the data axis."""
        if self._counts is None and self._started is None:
            self._group.ledger.note(self._group, (self._use,), waits=False)
            counts = torch.empty(self._group.size, dtype=torch.int64)
            work = self._group.all_gather_async(torch.tensor([self.own]), counts)
            self._started = work, counts

    def finish(self) -> None:
        """Waits for the exchange, if it has been started."""
        if self._started is not None:
            _ = self.counts

    @property
    def counts(self) -> tuple[int, ...]:
        """Samples of each group; collective over the data axis where it is read first."""
        if self._counts is None:
            self.start()
            assert self._started is not None
            work, counts = self._started
            with self._timers.measure("statistics"):
                work.wait()
            self._counts, self._started = tuple(counts.tolist()), None
        return self._counts

    # Kept by hand: `cached_property` holds one lock for all objects in Python 3.11, and ranks that
    # are threads would wait for each other within it.

    @property
    def first_sample(self) -> int:
        """Index in the global batch of the group's first sample."""
        if self._first is None:
            self._first = sum(self.counts[: self._index])
        return self._first

    @property
    def shares(self) -> tuple[int, ...]:
        """What the groups' losses weigh, relative to each other."""
        if self._weighs and any(self.counts):
            return self.counts
        return (1,) * self._parts

    @property
    def weight(self) -> float:
        """What the group's mean loss weighs: its samples over the mean of all groups' samples."""
        if self._weight is None:
            shares = self.shares
            self._weight = shares[self._index] * len(shares) / sum(shares)
        return self._weight

    def weighs_as(self, other: GroupSizes) -> bool:
        """Whether every group has the same weight in both; all ranks find the same."""
        mine, others = self.shares, other.shares
        pairs = zip(mine, others, strict=True)
        return all(a * sum(others) == b * sum(mine) for a, b in pairs)


def mark_batch(tensor: Tensor, sizes: GroupSizes) -> None:
    """Notes on a tensor's graph from which batch it was computed."""
    marks.mark(tensor, _MARK, sizes)


def mark_rows(tensor: Tensor, sizes: GroupSizes) -> None:
    """Notes the sizes of the sharded tensor that it comes from, entered into a model or not."""
    marks.mark(tensor, _ROWS, sizes)


def _last_of(nodes: Iterable[Any], key: str) -> GroupSizes | None:
    """Of the sizes that a graph is marked with, those that were made last."""
    found = (sizes for _, sizes in marks.below(nodes, key) if sizes is not None)
    return max(found, key=lambda sizes: sizes._number, default=None)


class GroupWeights:
    """Which weights of the sample groups hold in the running backward pass.

    A group's script computes the mean loss of the group's own samples, and gradients are averaged
    over the groups. Weighted by `GroupSizes.weight`, they are the gradients of the mean over all
    samples. A backward pass has the weights of the batch whose output it comes from: the one that
    it reaches first or, until then (parameters of a criterion come earlier), that the graph has.
    Where there is none it has those of the sharded tensors that the loss was computed from, or of
    the latest batch of all groups. Weights have the mean 1, so
    a gradient that is equal in all groups, such as that of a penalty on parameters, is the same
    with any.
    """

    def __init__(self) -> None:
        self.weighs = True
        """Whether no model on the mesh has its groups weigh the same."""
        self.latest: GroupSizes | None = None
        """The last batch that all groups have entered together."""
        self._used: dict[int, GroupSizes | None] = {}  # by the number of the backward pass
        self.seen: list[GroupSizes] | None = None
        """Lists the batches that enter while a closure is evaluated, else `None`."""

    def begin(self, sizes: GroupSizes, *, together: bool) -> None:
        """A batch enters a model, and may be trained.

        Args:
            sizes: of the batch.
            together: whether all groups enter theirs now; else one may evaluate alone.
        """
        if together:
            if self.latest is not None:
                self.latest.finish()  # its buffers may be in use, if its forward pass raised
            self.latest = sizes
        if self.seen is not None:
            self.seen.append(sizes)

    def reached(self, sizes: GroupSizes) -> None:
        """The running backward pass has reached an output of this batch.

        Raises:
            NotSupported: it has used other weights already.
        """
        used = self._used_or(sizes)
        if used is sizes:
            return
        if used is None:
            others, agrees = (1,) * len(sizes.counts), len(set(sizes.shares)) == 1
        else:
            others, agrees = used.shares, used.weighs_as(sizes)
        if not agrees:
            raise NotSupported(
                f"one backward pass through batches that sample groups share as {list(others)} and "
                f"as {list(sizes.shares)}: call backward() for each batch before the next forward "
                'pass, or parallelize with group_weight="equal" and form global means with '
                "pydist.sum_over_groups"
            )

    def weight(self, roots: Iterable[Any], detached: GroupSizes | None) -> float:
        """This rank's weight in the running backward pass.

        Args:
            roots: the nodes where it starts.
            detached: the last batch, if its outputs have no graph that would lead to it.
        """
        task = torch._C._current_graph_task_id()
        known = task in self._used
        used = self._used[task] if known else self._used_or(self.batch_of(roots, detached))
        return 1.0 if used is None else used.weight

    def batch_of(
        self, roots: Iterable[Any], detached: GroupSizes | None = None
    ) -> GroupSizes | None:
        """The batch that these nodes of a graph come from; else `detached` or the latest.

        What entered no model, as where a script calls functions with parameters, has the weights of
        the tensor that was cut.
        """
        roots = list(roots)
        entered = _last_of(roots, _MARK) or detached
        if entered is None and self.weighs:
            entered = _last_of(roots, _ROWS)
        return entered or self.latest

    def _used_or(self, sizes: GroupSizes | None) -> GroupSizes | None:
        """The batch whose weights the running backward pass has; from now on `sizes`, if none."""
        task = torch._C._current_graph_task_id()
        if task not in self._used:
            if len(self._used) >= _NESTED:
                del self._used[min(self._used)]
            self._used[task] = sizes
        return self._used[task]


def weights_of(mesh: Mesh) -> GroupWeights:
    """What the losses of the sample groups of a mesh weigh in the running backward pass."""
    return mesh.session.service(GroupWeights, GroupWeights)
