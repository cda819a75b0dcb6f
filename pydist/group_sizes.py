"""How many samples each sample group has in a global batch, and what its loss weighs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from pydist.errors import NotSupported

if TYPE_CHECKING:
    from pydist.mesh import Mesh


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
    """

    def __init__(
        self,
        mesh: Mesh,
        own: int,
        first_sample: int | None = None,
        *,
        agreed: bool = True,
        weighs: bool = True,
    ) -> None:
        self._weight: float | None = None
        self._first = self.given_first = first_sample
        """Index of the first sample, where the caller has given it."""
        self._index = mesh.data_index
        self._group, self._timers = mesh.data, mesh.timers
        self._weighs = weighs
        exchanged = agreed and mesh.data_size > 1
        self._counts = None if exchanged else (own,) * mesh.data_size
        self._parts = mesh.data_size
        self.own = own
        """Samples of this rank's group."""
        self._started = False

    def start(self) -> None:
        """Starts the exchange. Collective over the data axis."""
        if self._counts is None and not self._started:
            self._started = True
            self._row = torch.tensor([self.own])
            self._rows = torch.empty(self._group.size, dtype=torch.int64)
            self._work = self._group.all_gather_async(self._row, self._rows)

    def finish(self) -> None:
        """Waits for the exchange, if it has been started."""
        if self._started:
            _ = self.counts

    @property
    def counts(self) -> tuple[int, ...]:
        """Samples of each group; collective over the data axis where it is read first."""
        if self._counts is None:
            self.start()
            with self._timers.measure("statistics"):
                self._work.wait()
            self._counts = tuple(self._rows.tolist())
            del self._work, self._row, self._rows
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


class GroupWeights:
    """Which weights of the sample groups hold in the running backward pass.

    A group's script computes the mean loss of the group's own samples, and gradients are averaged
    over the groups. Weighted by `GroupSizes.weight`, they are the gradients of the mean over all
    samples. A backward pass has the weights of the batch whose output it comes from; before it has
    reached one (parameters of a criterion come earlier), those of the latest batch.
    """

    def __init__(self) -> None:
        self._latest: GroupSizes | None = None
        self._task = -1
        self._used: GroupSizes | None = None
        self.seen: list[GroupSizes] | None = None
        """Where batches are listed while somebody evaluates a closure, else `None`."""

    def begin(self, sizes: GroupSizes) -> None:
        """A batch enters a model that is to be trained."""
        if self._latest is not None:
            self._latest.finish()  # its buffers may be in use, if its forward pass raised
        self._latest = sizes
        if self.seen is not None:
            self.seen.append(sizes)

    @property
    def latest(self) -> GroupSizes | None:
        """The batch that entered a model last, until a backward pass has ended."""
        return self._latest

    def reached(self, sizes: GroupSizes) -> None:
        """The running backward pass has reached an output of this batch.

        Raises:
            NotSupported: it has used other weights already.
        """
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task, self._used = task, sizes
            return
        if self._used is sizes:
            return
        if self._used is None:
            others, agrees = (1,) * len(sizes.counts), len(set(sizes.shares)) == 1
        else:
            others, agrees = self._used.shares, self._used.weighs_as(sizes)
        if not agrees:
            raise NotSupported(
                f"one backward pass through batches that sample groups share as {list(others)} and "
                f"as {list(sizes.shares)}: call backward() for each batch before the next forward "
                'pass, or parallelize with group_weight="equal" and form global means with '
                "pydist.sum_over_groups"
            )

    def weight(self) -> float:
        """This rank's weight in the running backward pass."""
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._task, self._used = task, self._latest
        return 1.0 if self._used is None else self._used.weight

    def end(self) -> None:
        """A backward pass has ended: a graph that no batch has entered has no weights."""
        self._latest = self._used = None
        self._task = -1
