"""Assigns samples to sample groups, and orders them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from pydist.errors import UsageError
from pydist.partition import divide

VERSION = 1


@dataclass(frozen=True)
class GroupBatch:
    """One sample group's part of one global batch."""

    epoch: int
    step: int
    """Position in the epoch."""
    indices: tuple[int, ...]
    """The samples. Empty only without padding; one sample of `count` 0 is padding."""
    count: int
    """Number of samples that count: all, or 0 for padding."""
    first_sample: int
    """Position in the global batch of the group's first sample."""
    global_size: int
    """Samples in the global batch, padding not counted."""


class MeshSampler:
    """Sampler that splits each global batch over the sample groups of a mesh.

    The order of an epoch, and so the content of each global batch, depends only on seed and epoch,
    not on the number of groups: a run may resume with another number of ranks. A group gets a
    contiguous block of the batch, the same on all its ranks. Where the number of groups does not
    divide the batch (the last one of an epoch may be short), the first groups get one sample more.
    With shares the blocks are in proportion to them.

    A batch with fewer samples than groups leaves some groups without. They get the batch's first
    sample as *padding*, with `count` 0, for networks that do not accept an empty batch: multiplied
    by `count`, it adds nothing to loss and gradients (global statistics of batch norm do see it).
    With ``pad=False`` such groups get no samples and every sample is seen exactly once.

    Iteration runs from the sampler's position to the end of the epoch.

    Args:
        num_samples: in the data set.
        data_size: number of sample groups.
        data_index: index of this group.
        batch_size: of the global batch, in samples.
        shuffle: a new order each epoch; else 0, 1, 2, ...
        seed: of the order.
        drop_last: leave out a last batch that is short.
        pad: give a group without samples padding.
        shares: a positive number per group; by default all are equal. They do not change the order.

    Raises:
        UsageError: the batch is smaller than the groups, nothing is left of the epoch, or there is
            not one share per group.
    """

    def __init__(
        self,
        num_samples: int,
        data_size: int,
        data_index: int,
        batch_size: int,
        *,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        pad: bool = True,
        shares: Sequence[float] | None = None,
    ) -> None:
        if not 0 <= data_index < data_size:
            raise UsageError(f"data_index={data_index} with {data_size} sample groups")
        self.shares = (1.0,) * data_size if shares is None else tuple(shares)
        if len(self.shares) != data_size:
            raise UsageError(f"shares={list(self.shares)} with {data_size} sample groups")
        if batch_size < 1 or num_samples < 1 or seed < 0:
            raise UsageError(
                f"num_samples={num_samples}, batch_size={batch_size}, seed={seed}: at least one "
                "sample, a batch of one, and a seed of 0 or more"
            )
        if drop_last and num_samples < batch_size:
            raise UsageError(
                f"{num_samples} samples fill no batch of {batch_size}, and drop_last leaves out "
                "what is short"
            )
        self.num_samples = num_samples
        self.data_size = data_size
        self.data_index = data_index
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.pad = pad
        self.epoch = 0
        """Epoch of the next batch."""
        if pad:
            self.require_one_each()
        self.step = 0
        """Position in it of the next batch."""

    def require_one_each(self) -> None:
        """Raises `UsageError` if a full batch has fewer samples than there are groups."""
        if self.batch_size < self.data_size:
            raise UsageError(
                f"batch_size={self.batch_size} (of all ranks together) is less than one sample for "
                f"each of the {self.data_size} sample groups; choose at least {self.data_size}"
            )

    def __len__(self) -> int:
        """Returns the number of global batches in an epoch."""
        whole = self.num_samples // self.batch_size
        return whole if self.drop_last else -(-self.num_samples // self.batch_size)

    def __iter__(self) -> Iterator[GroupBatch]:
        if self.step >= len(self):
            self.seek(self.epoch + 1)
        while self.step < len(self):
            batch = self.batch(self.epoch, self.step)
            self.step += 1
            yield batch
        self.seek(self.epoch + 1)

    def seek(self, epoch: int, step: int = 0) -> None:
        """Moves the position to a batch.

        Raises:
            UsageError: the epoch has no such batch.
        """
        if epoch < 0 or not 0 <= step <= len(self):
            raise UsageError(f"epoch {epoch}, step {step}: an epoch has {len(self)} batches")
        self.epoch, self.step = epoch, step

    def batch(self, epoch: int, step: int) -> GroupBatch:
        """Returns this group's part of the global batch `step` of `epoch`."""
        if not 0 <= step < len(self):
            raise UsageError(f"step {step}: an epoch has {len(self)} batches")
        start = step * self.batch_size
        size = min(self.batch_size, self.num_samples - start)
        # Groups without samples come last.
        points = tuple(min(group, size) for group in range(self.data_size + 1))
        if size >= self.data_size:
            points = divide(size, self.shares).points
        first = points[self.data_index]
        count = points[self.data_index + 1] - first
        order = self.order(epoch)
        chosen = order[start + first : start + first + count]
        if count == 0 and self.pad:
            # One padding sample each: positions stay distinct.
            chosen, first = order[start : start + 1], self.data_index
        indices = tuple(int(i) for i in chosen)
        return GroupBatch(epoch, step, indices, count, first, size)

    def order(self, epoch: int) -> npt.NDArray[np.int64]:
        """Returns the order of all samples in an epoch."""
        if not self.shuffle:
            return np.arange(self.num_samples)
        return _permutation(self.num_samples, self.seed, epoch)

    def state_dict(self) -> dict[str, Any]:
        """Returns the position and the settings that determine the order, as plain numbers."""
        done = self.step >= len(self)
        return {
            "version": VERSION,
            "epoch": self.epoch + 1 if done else self.epoch,
            "step": 0 if done else self.step,
            **self._order_depends_on(),
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
        self.seek(state["epoch"], state["step"])

    def _order_depends_on(self) -> dict[str, Any]:
        return {
            "num_samples": self.num_samples,
            "batch_size": self.batch_size,
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
