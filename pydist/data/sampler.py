"""Assigns samples to sample groups, and orders them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from pydist.data.batch_sizes import BatchSizes, PassRule
from pydist.errors import UsageError
from pydist.partition import divide

VERSION = 1
_EPOCHS = 4
"""Epochs whose steps are known at a time."""


@dataclass(frozen=True)
class GroupBatch:
    """Part that one sample group has of one global batch, or of one pass over it."""

    epoch: int
    step: int
    """Number of the step in the epoch."""
    indices: tuple[int, ...]
    """The samples. Empty only without padding; one sample of `count` 0 is padding."""
    count: int
    """Number of samples that count: all, or 0 for padding."""
    first_sample: int
    """Position in the global batch of the group's first sample."""
    global_size: int
    """Samples of all groups in this pass, padding not counted."""
    step_size: int
    """Samples in the global batch: those of all passes."""
    part: int = 0
    """Number of the pass in the step."""
    parts: int = 1
    """Passes of the step."""
    is_last: bool = True
    """Whether the step ends with this pass."""
    ends_epoch: bool = False
    """Whether the epoch ends with this step."""
    in_parts: bool = False
    """Whether the step computes losses of parts of its samples: in passes, or in stages."""


class _Pass(NamedTuple):
    """Pass that is made over a global batch.

    Attributes:
        samples: of all groups.
        begin: place in the global batch of the first one.
        points: split points of the groups in `samples`.
        step_size: samples in the global batch.
        parts: passes of the step.
    """

    samples: npt.NDArray[np.int64]
    begin: int
    points: Sequence[int]
    step_size: int
    parts: int


class MeshSampler:
    """Sampler that splits each global batch over the sample groups of a mesh.

    The order of an epoch, and so the content of each global batch, depends only on seed and epoch,
    not on the number of groups: a run may resume with another number of ranks. A group gets a
    contiguous block of the batch, the same on all its ranks. Where the number of groups does not
    divide the batch (the last one of an epoch may be short), the first groups get one sample more.
    With shares the blocks are in proportion to them.

    The size of the batch may change in a run. A step may have several passes: then each contiguous
    part of the global batch is split over the groups by itself, so that also the content of a pass
    does not depend on the number of groups.

    A batch with fewer samples than groups leaves some groups without. They get the batch's first
    sample as *padding*, with `count` 0, for networks that do not accept an empty batch: multiplied
    by `count`, it adds nothing to loss and gradients (global statistics of batch norm do see it).
    With ``pad=False`` such groups get no samples and every sample is seen exactly once.

    Iteration runs from the sampler's position to the end of the epoch, by passes. The position is
    that of a step: it moves on with the last pass. At the end of an epoch it stays there until the
    loop ends, so that a loop which continues from a state that was saved meanwhile ends the epoch.

    Args:
        num_samples: in the data set.
        data_size: number of sample groups.
        data_index: index of this group.
        batch_size: of the global batch, in samples; or sizes that change in a run.
        shuffle: a new order each epoch; else 0, 1, 2, ...
        seed: of the order.
        drop_last: leave out a last batch that is short.
        pad: give a group without samples padding.
        shares: a positive number per group; by default all are equal. They do not change the order.
        passes: the rule for the passes of a step; by default there is one.
        divide: whether each pass is a batch of its own; else a step is one batch, which only
            carries the number of passes.

    Raises:
        UsageError: the batch is smaller than the groups, nothing is left of the epoch, or there is
            not one share per group.
    """

    def __init__(
        self,
        num_samples: int,
        data_size: int,
        data_index: int,
        batch_size: int | BatchSizes,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        pad: bool = True,
        shares: Sequence[float] | None = None,
        passes: PassRule | None = None,
        divide: bool = True,
    ) -> None:
        if not 0 <= data_index < data_size:
            raise UsageError(f"data_index={data_index} with {data_size} sample groups")
        self.shares = (1.0,) * data_size if shares is None else tuple(shares)
        if len(self.shares) != data_size:
            raise UsageError(f"shares={list(self.shares)} with {data_size} sample groups")
        sizes = batch_size if isinstance(batch_size, BatchSizes) else BatchSizes(batch_size)
        if sizes.smallest < 1 or num_samples < 1 or seed < 0:
            raise UsageError(
                f"num_samples={num_samples}, batch_size={sizes.smallest}, seed={seed}: at least "
                "one sample, a batch of one, and a seed of 0 or more"
            )
        largest = max(sizes.first, *(size for _, size in sizes.changes), 1)
        if drop_last and num_samples < largest:
            raise UsageError(
                f"{num_samples} samples fill no batch of {largest}, and drop_last leaves out "
                "what is short"
            )
        self.num_samples = num_samples
        self.data_size = data_size
        self.data_index = data_index
        self.sizes = sizes
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.pad = pad
        self.rule = passes or PassRule(sizes.first)
        self._divides = divide
        self._starts: tuple[int, dict[int, Sequence[int]]] = sizes.version, {}
        self.epoch = 0
        """Epoch of the position."""
        if pad:
            self.require_one_each()
        self.step = 0
        """Step of the position: its batch is the next one, unless the epoch has no more."""
        self._is_sought = False

    def require_one_each(self) -> None:
        """Raises `UsageError` if batches, or passes, have fewer samples than there are groups."""
        if self.sizes.smallest < self.data_size:
            raise UsageError(
                f"batch_size={self.sizes.smallest} (of all ranks together) is less than one sample "
                f"for each of the {self.data_size} sample groups; choose at least {self.data_size}"
            )
        batch, passes = self.sizes.first, self.rule.passes(self.sizes.first, self.sizes.first)
        if self._divides and batch // passes < self.data_size:
            raise UsageError(
                f"a batch of {batch} in {passes} passes: a pass has fewer samples than there are "
                f"sample groups, {self.data_size}; possible are up to {batch // self.data_size} "
                "passes (train.accumulate)"
            )

    def __len__(self) -> int:
        """Returns the number of global batches in the epoch of the position."""
        return self.steps(self.epoch)

    def steps(self, epoch: int) -> int:
        """Returns the number of global batches in an epoch."""
        size = self._size_in(epoch)
        if size is None:
            return len(self._starts_of(epoch)) - 1
        return self.num_samples // size if self.drop_last else -(-self.num_samples // size)

    def equal_epochs(self, first: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yields the epochs from `first` to before `stop`, those with equal steps together.

        Its length depends on the changes of the batch alone: a run may have billions of epochs.

        Yields:
            An epoch, and the number of epochs from it on that have the same steps.
        """
        changing = {place // self.num_samples for place, _ in self.sizes.changes}
        ends = {each for epoch in changing for each in (epoch, epoch + 1) if first < each < stop}
        for begin, end in pairwise([first, *sorted(ends), max(first, stop)]):
            if begin < end:
                yield begin, end - begin

    def steps_until(self, epochs: float) -> int:
        """Returns the number of global batches in so many epochs, or parts of one."""
        whole = int(epochs)
        found = sum(count * self.steps(epoch) for epoch, count in self.equal_epochs(0, whole))
        return found + round((epochs - whole) * self.steps(whole))

    def shortest(self, epochs: int) -> int:
        """Returns the least samples of a step in so many epochs."""
        found = []
        for epoch, _ in self.equal_epochs(0, epochs):
            size = self._size_in(epoch)
            if size is not None:
                found.append(self.num_samples % size or size)
            else:
                found += [b - a for a, b in pairwise(self._starts_of(epoch))]
        return min(found)

    def _size_in(self, epoch: int) -> int | None:
        """Returns the size of all full batches in an epoch; `None` if it changes there."""
        first = epoch * self.num_samples
        size = self.sizes.at(first)
        inside = (place for place, _ in self.sizes.changes)
        return None if any(first < p < first + self.num_samples for p in inside) else size

    def __iter__(self) -> Iterator[GroupBatch]:
        if self.step >= len(self) and not self._is_sought:  # an iterator is kept that ended it
            self.seek(self.epoch + 1)
        place = self.epoch, self.step
        try:
            while self.step < len(self):
                epoch, step, part = self.epoch, self.step, 0
                while True:
                    batch = self.batch(epoch, step, part)
                    if batch.is_last:
                        self.step, self._is_sought = self.step + 1, False
                        place = self.epoch, self.step
                    yield batch
                    if batch.is_last:
                        break
                    part += 1
        finally:  # also of a loop that breaks at the last batch
            if (self.epoch, self.step) == place and self.step >= len(self):
                self.seek(self.epoch + 1)

    @property
    def next(self) -> tuple[int, int]:
        """Epoch and step that come next; after an epoch's last batch those of the next epoch."""
        done = self.step >= len(self)
        return (self.epoch + 1, 0) if done else (self.epoch, self.step)

    @property
    def position(self) -> int:
        """Position that the next batch has in the run, in samples; see `BatchSizes`."""
        epoch, step = self.next
        return epoch * self.num_samples + self._starts_of(epoch)[step]

    def seek(self, epoch: int, step: int = 0) -> None:
        """Moves the position to a batch.

        Raises:
            UsageError: the epoch has no such batch.
        """
        if epoch < 0 or not 0 <= step <= self.steps(epoch):
            raise UsageError(f"epoch {epoch}, step {step}: an epoch has {len(self)} batches")
        self.epoch, self.step, self._is_sought = epoch, step, True

    def after(self, batch: GroupBatch) -> tuple[int, int, int]:
        """Returns epoch, step and pass after a batch; at the end of an epoch those of the next."""
        if not batch.is_last:
            return batch.epoch, batch.step, batch.part + 1
        return (batch.epoch + 1, 0, 0) if batch.ends_epoch else (batch.epoch, batch.step + 1, 0)

    def batch(self, epoch: int, step: int, part: int = 0) -> GroupBatch:
        """Returns this group's part of a pass over the global batch `step` of `epoch`."""
        found = self._pass(epoch, step, part)
        indices, count, first = self._of_group(found, self.data_index)
        return GroupBatch(
            epoch, step, indices, count, first, len(found.samples), found.step_size, part,
            found.parts, is_last=part + 1 == found.parts or not self._divides,
            ends_epoch=step + 1 == len(self._starts_of(epoch)) - 1,
            in_parts=found.parts > 1 or not self._divides,
        )  # fmt: skip

    def samples_of(
        self, groups: Iterable[int], epoch: int, step: int, part: int = 0
    ) -> dict[int, tuple[int, ...]]:
        """Returns the samples of several groups in a pass, by group."""
        found = self._pass(epoch, step, part)
        return {group: self._of_group(found, group)[0] for group in groups}

    def _pass(self, epoch: int, step: int, part: int) -> _Pass:
        """Returns a pass over a global batch, of all groups together."""
        starts = self._starts_of(epoch)
        steps = len(starts) - 1
        if not 0 <= step < steps:
            raise UsageError(f"step {step}: an epoch has {steps} batches")
        start, stop = starts[step], starts[step + 1]
        whole = stop - start
        full = self.sizes.at(epoch * self.num_samples + start)
        parts = self.rule.passes(full, whole if self._divides else full)
        if not 0 <= part < parts:
            raise UsageError(f"pass {part}: step {step} has {parts}")
        begin, end = 0, whole
        if self._divides:
            begin, end = (whole * i // parts for i in (part, part + 1))
        size = end - begin
        # Groups without samples come last.
        points = tuple(min(group, size) for group in range(self.data_size + 1))
        if size >= self.data_size:
            points = divide(size, self.shares).points
        samples = self.order(epoch)[start + begin : start + end]
        return _Pass(samples, begin, points, whole, parts)

    def _of_group(self, found: _Pass, group: int) -> tuple[tuple[int, ...], int, int]:
        """Returns a group's samples, how many of them count, and the place of the first one."""
        first, stop = found.points[group : group + 2]
        chosen, place = found.samples[first:stop], first
        if first == stop and self.pad:
            # One padding sample each: positions stay distinct.
            chosen, place = found.samples[:1], group
        return tuple(int(i) for i in chosen), stop - first, found.begin + place

    def _starts_of(self, epoch: int) -> Sequence[int]:
        """Returns the places where the steps of an epoch begin, and the end of the last one."""
        version, known = self._starts
        if version != self.sizes.version:
            self._starts = self.sizes.version, (known := {})
        if epoch not in known:
            while len(known) >= _EPOCHS:
                known.pop(next(iter(known)))
            places, first = [0], epoch * self.num_samples
            size = self._size_in(epoch)
            if size is not None:
                places = [step * size for step in range(self.steps(epoch))]
                places.append(min(len(places) * size, self.num_samples))
            while size is None and places[-1] < self.num_samples:
                end = places[-1] + self.sizes.at(first + places[-1])
                if end > self.num_samples and self.drop_last:
                    break
                places.append(min(end, self.num_samples))
            known[epoch] = places
        return known[epoch]

    def order(self, epoch: int) -> npt.NDArray[np.int64]:
        """Returns the order of all samples in an epoch."""
        if not self.shuffle:
            return np.arange(self.num_samples)
        return _permutation(self.num_samples, self.seed, epoch)

    def state_dict(self) -> dict[str, Any]:
        """Returns the position and the settings that determine the order, as plain numbers."""
        planned, called = ([*map(list, each)] for each in (self.sizes.planned, self.sizes.called))
        return {
            "version": VERSION,
            "epoch": self.epoch,
            "step": self.step,
            **self._order_depends_on(),
            **({"changes": planned} if planned else {}),
            **({"called": called} if called else {}),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Moves to the position of another sampler, whose number of groups may differ.

        Raises:
            UsageError: the other sampler had another order or other batches.
        """
        if state.get("version") != VERSION:
            raise UsageError(
                f"sampler state of version {state.get('version')!r}; {VERSION} is possible"
            )
        for name, mine in self._order_depends_on().items():
            if state.get(name) != mine:
                raise UsageError(
                    f"the saved sampler has {name}={state.get(name)!r}, this one {mine!r}: the "
                    "order of the samples would not go on"
                )
        theirs = [tuple(each) for each in state.get("changes", [])]
        if theirs != self.sizes.planned:
            raise UsageError(
                f"the saved sampler has batches that change at {theirs} (samples, batch), this one "
                f"at {self.sizes.planned}: the order of the samples would not go on"
            )
        self.sizes.load(state.get("called", []))
        self.seek(state["epoch"], state["step"])

    def _order_depends_on(self) -> dict[str, Any]:
        return {
            "num_samples": self.num_samples,
            "batch_size": self.sizes.first,
            "shuffle": self.shuffle,
            "seed": self.seed,
            "drop_last": self.drop_last,
        }


@lru_cache(maxsize=4)
def _permutation(size: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """Returns a random order; NumPy guarantees the bits of Philox, but not its `permutation`."""
    bits = np.random.Philox(np.random.SeedSequence([seed, epoch])).random_raw(size)
    order = np.argsort(bits, kind="stable")
    order.setflags(write=False)
    return order
