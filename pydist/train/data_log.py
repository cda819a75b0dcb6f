"""Logs what the loaders of a run have read."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pydist.data.loader import ELSEWHERE

if TYPE_CHECKING:
    from pydist.comm import Transport
    from pydist.data.loader import Loader
    from pydist.train.log import EventLog


_MUCH_WAITING = 0.1
"""Part of an epoch that waiting for data takes if a notice tells of it."""
_LEAST_WAITING = 5.0
"""Seconds of waiting that are told: the first batch of a short epoch is always waited for."""


class DataLog:
    """Log of what loaders have read, waited for, and of the samples that they have skipped.

    Args:
        log: receives the events.
        world: the ranks.
        ranks_a_sample: number of ranks through which a sample goes.
    """

    def __init__(self, log: EventLog, world: Transport, ranks_a_sample: int) -> None:
        self._log, self._world, self._ranks_a_sample = log, world, ranks_a_sample
        self._loaded: dict[str, Any] = {}
        """Bytes read and samples replaced by split, up to the last event."""
        self._began = time.perf_counter()
        self._advises = True
        self._told: dict[str, set[int]] = {}
        """Skipped samples that the log names, by split."""

    def __call__(self, loader: Loader, split: str, epoch: int, step: int) -> None:
        """Logs what a loader has read in an epoch, and what its store has saved. Collective.

        Raises:
            DataError: all sample groups together have skipped too many samples.
        """
        seconds = loader.waited_s, time.perf_counter() - self._began
        milliseconds = (round(1000 * each) for each in seconds)
        total = np.array([loader.bytes_read or 0, loader.replaced, *milliseconds])
        since = torch.from_numpy(total - self._loaded.get(split, 0))
        self._loaded[split] = total
        self._world.all_reduce(since)
        self._log.emit(
            "data",
            step=step,
            epoch=epoch,
            split=split,
            file_bytes=int(since[0]),
            skipped=int(since[1]) // self._ranks_a_sample,
        )
        self._tell_skipped(loader, split)
        if split == "train":
            self._advise(loader, epoch, int(since[2]) / 1000, int(since[3]) / 1000)
        if loader.store is None:
            return
        found = loader.store.counted().over(self._world)
        self._log.emit(
            "store",
            step=step,
            epoch=epoch,
            split=split,
            hit_rate=found.hit_rate,
            disk_rate=found.disk_rate,
            file_bytes=found.file_bytes,
            disk_bytes=found.disk_bytes,
            received_bytes=found.received_bytes,
            lost_blocks=found.lost_blocks,
            held_bytes=found.held_bytes,
            most_held_bytes=found.most_held_bytes,
            spilled_bytes=found.spilled_bytes,
            compression=found.compression,
            most_staged_bytes=found.most_staged_bytes,
        )

    def _advise(self, loader: Loader, epoch: int, waited: float, seconds: float) -> None:
        """Tells once, with advice, that waiting for data took much of an epoch.

        Args:
            loader: of the training set.
            epoch: the epoch.
            waited: seconds in which ranks waited for data, their sum.
            seconds: of the epoch, their sum.
        """
        fills_store = loader.store is not None and epoch == 0
        least = self._world.size * _LEAST_WAITING
        if not self._advises or fills_store or waited < max(least, _MUCH_WAITING * seconds):
            return
        self._advises = False
        if loader.store is not None:
            advice = "data.store_memory and data.store_disk set how many samples the store keeps"
        else:
            advice = 'data.store = "memory" reads files in the first epoch alone'
            if loader.readers == 1:
                advice += "; data.readers = 4 may read NumPy and Zarr files faster"
        self._log.emit(
            "notice",
            text=f"waiting for data took {waited / seconds:.0%} of epoch {epoch + 1}: {advice}",
        )

    def _tell_skipped(self, loader: Loader, split: str) -> None:
        """Logs why samples were skipped, on any rank, and checks their number. Collective."""
        if loader.on_bad_sample == "stop":
            return
        everyones: dict[int, set[str]] = {}
        for skipped in self._world.all_gather_json(loader.skipped):
            for index, why in skipped.items():
                everyones.setdefault(int(index), set()).add(why)
        told = self._told.setdefault(split, set())
        reasons = {}
        for index, whys in sorted(everyones.items()):
            reasons[index] = next(iter(sorted(whys - {ELSEWHERE})), ELSEWHERE)
            if index not in told:
                told.add(index)
                self._log.emit("notice", text=f"skipped {split} sample {index}: {reasons[index]}")
        loader.require_few_bad(reasons)
