"""Logs what the loaders of a run have read."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from pydist.data.loader import ELSEWHERE

if TYPE_CHECKING:
    from pydist.comm import Transport
    from pydist.data.loader import Loader
    from pydist.train.log import EventLog


class DataLog:
    """Log of what loaders have read, and of the samples that they have skipped.

    Args:
        log: receives the events.
        world: the ranks.
        ranks_a_sample: number of ranks through which a sample goes.
    """

    def __init__(self, log: EventLog, world: Transport, ranks_a_sample: int) -> None:
        self._log, self._world, self._ranks_a_sample = log, world, ranks_a_sample
        self._loaded: dict[str, Any] = {}
        """Bytes read and samples replaced by split, up to the last event."""
        self._told: dict[str, set[int]] = {}
        """Skipped samples that the log names, by split."""

    def __call__(self, loader: Loader, split: str, epoch: int, step: int) -> None:
        """Logs what a loader has read in an epoch, and what its store has saved. Collective."""
        total = np.array([loader.bytes_read or 0, loader.replaced])
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

    def _tell_skipped(self, loader: Loader, split: str) -> None:
        """Logs why samples were skipped, on any rank. Collective."""
        if loader.on_bad_sample == "stop":
            return
        everyones: dict[int, set[str]] = {}
        for message in self._world.all_gather_bytes(json.dumps(loader.skipped).encode()):
            for index, why in json.loads(message).items():
                everyones.setdefault(int(index), set()).add(why)
        for index in sorted(everyones.keys() - self._told.setdefault(split, set())):
            self._told[split].add(index)
            why = next(iter(sorted(everyones[index] - {ELSEWHERE})), ELSEWHERE)
            self._log.emit("notice", text=f"skipped {split} sample {index}: {why}")
