"""Gives a torch `DataLoader` a position, which checkpoints keep."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from pydist.train.state import random_state, set_random_state


class Resumable:
    """Torch `DataLoader` that continues within an epoch, for `pydist.checkpoint`.

    Iteration yields the batches from the position to the end of the epoch, and the next one begins
    with a new epoch. An epoch that continues begins with the random numbers with which it began at
    first, loads its first batches again and drops them: so shuffling, and what worker processes
    draw, are the same as without the interruption. This costs the time of loading them. For that
    each epoch draws the same random numbers first, also with persistent workers, for which a torch
    loader draws one more in its first epoch.

    Random transforms that run in the training process and keep a random state of their own, such as
    MONAI's, are to be seeded before each epoch (`set_random_state(seed=loader.epoch)`). Persistent
    workers keep theirs over epochs, and do not continue with the same numbers. On other ranks the
    position is the same if a batch of all sample groups together is.

    Args:
        loader: any loader; the order of its samples follows from the random numbers of Python,
            NumPy and torch, from generators of torch that the loader, its samplers or samplers
            within these have as attributes, or from `set_epoch` of a sampler, which each epoch
            calls.

    Attributes:
        epoch: the epoch of the next batch.
        batch: number of the next batch in it.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader
        self.epoch = self.batch = 0
        self._begin: dict[str, Any] | None = None

    def __len__(self) -> int:
        """Returns the batches of an epoch."""
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        now, done = self._random_state(), self.batch
        if done and self._begin is not None:
            self._set_random_state(self._begin)
        self._begin = self._random_state()
        for sampler in self._samplers():
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(self.epoch)
        if self.loader.persistent_workers and self.loader._iterator is not None:
            # The base seed of workers, which only new ones draw, before the order is drawn.
            torch.empty((), dtype=torch.int64).random_(generator=self.loader.generator)
        batches = iter(self.loader)
        for _ in range(done):
            next(batches, None)
        if done:
            set_random_state(now)
        for batch in batches:
            self.batch += 1
            yield batch
        self.epoch, self.batch = self.epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        """Returns the position, with the random numbers with which the epoch began.

        The generators' states now are those with which the next epoch begins.
        """
        generators = [g.get_state() for g in self._generators()]
        return {
            "epoch": self.epoch, "batch": self.batch, "begin": self._begin,
            "generators": generators,
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues at another loader's position."""
        self.epoch, self.batch, self._begin = state["epoch"], state["batch"], state["begin"]
        self._set_generators(state["generators"])

    def _samplers(self) -> list[Any]:
        """Returns the loader's samplers, and those that they have as attributes."""
        found = [self.loader.sampler, self.loader.batch_sampler]
        for each in found:  # grows meanwhile
            inner = [v for v in getattr(each, "__dict__", {}).values() if isinstance(v, Sampler)]
            found += [v for v in inner if not any(v is known for known in found)]
        return [each for each in found if each is not None]

    def _generators(self) -> list[torch.Generator]:
        attributes = [getattr(each, "__dict__", {}) for each in (self.loader, *self._samplers())]
        found = dict.fromkeys(
            value
            for each in attributes
            for value in each.values()
            if isinstance(value, torch.Generator)
        )
        return list(found)

    def _random_state(self) -> dict[str, Any]:
        return {**random_state(), "generators": [g.get_state() for g in self._generators()]}

    def _set_random_state(self, state: Mapping[str, Any]) -> None:
        set_random_state(state)
        self._set_generators(state["generators"])

    def _set_generators(self, states: Sequence[Tensor]) -> None:
        for generator, state in zip(self._generators(), states, strict=True):
            generator.set_state(state)
