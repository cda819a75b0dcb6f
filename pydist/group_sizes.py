"""Counts the samples of each sample group in a global batch, and weights the groups' losses."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
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
    """Number of samples that each sample group has in one global batch.

    Each group knows its own number; one small all-gather over the data axis, in host memory,
    exchanges the others. It starts with `start`, or when a value is first read.

    Args:
        mesh: the mesh.
        own: samples of this rank's group.
        first_sample: index in the global batch of the group's first sample, if the caller knows
            it; by default the sum of the sizes of the groups before this one.
        after: samples in the earlier passes of the step, which come before all of these; `None` for
            what need not be a batch, whose place is not known.
        agreed: whether all groups process their batches together. Groups that evaluate at their
            own pace exchange nothing, and assume that the other groups have equal sizes.
        weighs: whether a group's loss is weighted by its samples; else all weights are equal.
        use: the purpose of the sizes, which the groups compare.
    """

    def __init__(
        self,
        mesh: Mesh,
        own: int,
        first_sample: int | None = None,
        *,
        after: int | None = None,
        agreed: bool = True,
        weighs: bool = True,
        use: str = "a batch",
    ) -> None:
        self._use = f"batch sizes of {use}"
        self._number = next(_numbers)
        self.in_features = False
        """Whether all results of the forward pass, not only its outputs, are marked with the batch:
        one group may run it alone, so only the graph can identify the batch."""
        self.of_weight = False
        """Whether the tensor is a sharded weight, or was computed from one, and no batch."""
        self._weight: float | None = None
        self._first = self.given_first = first_sample
        """Index of the first sample, if the caller has given it."""
        self.after = after
        """Samples in the earlier passes of the step, if these come after them."""
        self.part = mesh.session.part
        """Samples in the earlier passes of the step, from which other passes differ."""
        self._index = mesh.data_index
        self._group, self._timers = mesh.data, mesh.session.timers
        self._weighs = weighs
        exchanged = agreed and mesh.data_size > 1
        self._counts = None if exchanged else (own,) * mesh.data_size
        self.agreed = agreed
        """Whether the counts are known of all groups."""
        self.entered: object | None = None
        """The `pydist.batches.Batches` of the model that the batch has entered."""
        self._parts = mesh.data_size
        self.own = own
        """Samples of this rank's group."""
        self._started: tuple[Work, torch.Tensor] | None = None
        """The exchange in flight, and its buffer for the counts."""

    def start(self) -> None:
        """Starts the exchange. Collective over the data axis."""
        if self._counts is None and self._started is None:
            self._group.ledger.note(self._group, (self._use,), waits=False)
            counts = torch.empty(self._group.size, dtype=torch.int64)
            work = self._group.all_gather_async(torch.tensor([self.own]), counts)
            self._started = work, counts

    def finish(self) -> None:
        """Waits for the exchange, if it was started."""
        if self._started is not None:
            _ = self.counts

    @property
    def counts(self) -> tuple[int, ...]:
        """Samples of each group; the first read is collective over the data axis."""
        if self._counts is None:
            self.start()
            assert self._started is not None
            work, counts = self._started
            with self._timers.measure("statistics"):
                work.wait()
            self._counts, self._started = tuple(counts.tolist()), None
        return self._counts

    # Cached manually: `cached_property` holds one lock for all objects in Python 3.11, on which
    # ranks that are threads would wait for each other.

    @property
    def first_sample(self) -> int:
        """Index that the group's first sample has in the batch of all passes of the step."""
        return self.first_in_pass + (0 if self._is_in_step else self.after or 0)

    @property
    def first_in_pass(self) -> int:
        """Index of the group's first sample, as it was given, or in the batch of this pass."""
        if self._first is None:
            self._first = sum(self.counts[: self._index])
        return self._first

    @property
    def _is_in_step(self) -> bool:
        """Whether the given index is a place in the step, as of a `Loader` with passes.

        Else it is a place in a batch of its own. All groups find the same.
        """
        if not self.after or self.given_first is None:
            return False
        return self.given_first - sum(self.counts[: self._index]) >= self.after

    @property
    def shares(self) -> tuple[int, ...]:
        """Relative weights that the groups' losses have."""
        if self._weighs and any(self.counts):
            return self.counts
        return (1,) * self._parts

    @property
    def weight(self) -> float:
        """Weight that the group's mean loss has: its samples over the mean of all groups'."""
        if self._weight is None:
            shares = self.shares
            self._weight = shares[self._index] * len(shares) / sum(shares)
        return self._weight

    def weighs_as(self, other: GroupSizes) -> bool:
        """Returns whether every group has the same weight in both; equal on all ranks."""
        mine, others = self.shares, other.shares
        pairs = zip(mine, others, strict=True)
        return all(a * sum(others) == b * sum(mine) for a, b in pairs)


def mark_batch(tensor: Tensor, sizes: GroupSizes) -> None:
    """Marks a tensor's graph with the batch from which it was computed."""
    marks.mark(tensor, _MARK, sizes)


def mark_rows(tensor: Tensor, sizes: GroupSizes) -> None:
    """Marks a tensor with the sizes of its sharded source, entered into a model or not."""
    marks.mark(tensor, _ROWS, sizes)


def _last_of(nodes: Iterable[Any], key: str) -> GroupSizes | None:
    """Returns the latest of the sizes with which a graph is marked."""
    found = (sizes for _, sizes in marks.below(nodes, key) if sizes is not None)
    return max(found, key=lambda sizes: sizes._number, default=None)


class _Entering(threading.local):
    """Batches that enter models while this thread evaluates a closure; thread-local, as ranks."""

    batches: list[tuple[GroupWeights, GroupSizes]] | None = None


_entering = _Entering()


@contextmanager
def batches_entering() -> Iterator[list[tuple[GroupWeights, GroupSizes]]]:
    """Yields a list of the batches that enter models in the `with` block, on any mesh."""
    before, _entering.batches = _entering.batches, []
    try:
        yield _entering.batches
    finally:
        _entering.batches = before


class GroupWeights:
    """Weights that the sample groups have in the running backward pass.

    A group's script computes the mean loss of the group's own samples, and gradients are averaged
    over the groups. Weighted by `GroupSizes.weight`, they are the gradients of the mean over all
    samples. A backward pass uses the weights of the batch whose output it reaches first or, until
    then (parameters of a criterion come earlier), of the batch that its graph is marked with.
    Without such a batch, it uses the weights of the sharded tensors from which the loss was
    computed, or of the latest batch of all groups. The mean of the weights is 1, so a gradient that
    is equal in all groups, such as that of a penalty on parameters, does not depend on them.
    """

    def __init__(self) -> None:
        self.weighs = True
        """Whether no model on the mesh uses equal weights."""
        self.latest: GroupSizes | None = None
        """The last batch that all groups have entered together."""
        self._used: dict[int, GroupSizes | None] = {}  # by the number of the backward pass

    def begin(self, sizes: GroupSizes, *, together: bool) -> None:
        """Records a batch that enters a model with gradients.

        Args:
            sizes: of the batch.
            together: whether all groups enter now; else one may evaluate alone.
        """
        if together:
            if self.latest is not None:
                self.latest.finish()  # its buffers may be in use, if its forward pass raised
            self.latest = sizes
        if _entering.batches is not None:
            _entering.batches.append((self, sizes))

    def reached(self, sizes: GroupSizes) -> None:
        """Records that the running backward pass has reached an output of this batch.

        Raises:
            NotSupported: the pass has already used other weights.
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
        """Returns this rank's weight in the running backward pass.

        Args:
            roots: the nodes where the pass starts.
            detached: the last batch, if its outputs have no graph.
        """
        task = torch._C._current_graph_task_id()
        known = task in self._used
        used = self._used[task] if known else self._used_or(self.batch_of(roots, detached))
        return 1.0 if used is None else used.weight

    def batch_of(
        self, roots: Iterable[Any], detached: GroupSizes | None = None
    ) -> GroupSizes | None:
        """Returns the batch from which these graph nodes come; else `detached` or the latest.

        A tensor that entered no model, as in a script that calls functions with parameters, has the
        weights of the sharded tensor from which it was computed.
        """
        roots = list(roots)
        entered = _last_of(roots, _MARK) or detached
        if entered is None and self.weighs:
            entered = _last_of(roots, _ROWS)
        return entered or self.latest

    def _used_or(self, sizes: GroupSizes | None) -> GroupSizes | None:
        """Returns the batch whose weights the running backward uses; sets `sizes` if unset."""
        task = torch._C._current_graph_task_id()
        if task not in self._used:
            if len(self._used) >= _NESTED:
                del self._used[min(self._used)]
            self._used[task] = sizes
        return self._used[task]


def weights_of(mesh: Mesh) -> GroupWeights:
    """Returns the weights of a mesh's sample groups in the running backward pass."""
    return mesh.session.service(GroupWeights, GroupWeights)
