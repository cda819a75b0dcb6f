"""The batches that a loader has asked for: read in the background, in order."""

from __future__ import annotations

import queue
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from pydist.data.blocks import BlockSource, Read, read_group
from pydist.data.device_input import DeviceInput
from pydist.data.sampler import GroupBatch, MeshSampler
from pydist.data.store.delivery import Delivery
from pydist.data.store.memory import MemoryStore
from pydist.errors import UsageError
from pydist.mesh import Mesh
from pydist.watchdog import BLOCKED, phase

Position = tuple[int, int, int]
"""Epoch, step and pass."""


@dataclass
class _Slot:
    """A batch on its way; without a read while its blocks are on their way from other ranks."""

    plan: GroupBatch
    delivery: Delivery | None
    read: Future[Read] | None = None


class ReadAhead:
    """Batches that background threads read while the consumer computes.

    With a store, the messages of one more batch are in flight: the consumer's thread starts them,
    since not every transport may be called by several threads, and waits for them one batch later,
    before a background thread makes the batch of them. If the store has a disk, the blocks of a
    further batch are on their way from there.

    Args:
        dataset: the source of samples.
        mesh: determines this rank's blocks.
        sampler: the order of the batches.
        prefetch: batches that are read ahead.
        readers: threads that read, each a batch; one with a store, whose blocks are read in order.
        endless: whether to read ahead into the next epoch.
        device_input: makes what copies a thread's blocks to a device; None leaves them in host
            memory.
        store: the store of blocks, if there is one.
    """

    def __init__(
        self,
        dataset: BlockSource,
        mesh: Mesh,
        sampler: MeshSampler,
        prefetch: int,
        readers: int,
        endless: bool,
        device_input: Callable[[], DeviceInput] | None,
        store: MemoryStore | None,
    ) -> None:
        self.dataset, self.mesh, self.sampler = dataset, mesh, sampler
        self.prefetch = prefetch
        self.waited_s = 0.0
        """Seconds that the consumer has waited so far."""
        self._endless = endless
        self.device_inputs: queue.SimpleQueue[DeviceInput] | None = None
        """Those that no thread uses; None without a device."""
        if device_input is not None:
            self.device_inputs = queue.SimpleQueue()
            for _ in range(readers):
                self.device_inputs.put(device_input())
        self._store = store
        self._slots: deque[_Slot] = deque()
        self._is_closed = False
        self._pool = ThreadPoolExecutor(readers, "pydist-loader")
        weakref.finalize(self, self._pool.shutdown, wait=False, cancel_futures=True)

    def take(self, plan: GroupBatch) -> Read:
        """Waits for and returns the batch of `plan`; starts the reads of the following ones."""
        started = time.perf_counter()
        try:
            with self.mesh.session.timers.measure("data"), phase("a batch", BLOCKED):
                if self._slots and self._slots[0].plan != plan:
                    self.forget()
                self.fill((plan.epoch, plan.step, plan.part))
                slot = self._slots.popleft()
                assert slot.read is not None
                read = slot.read.result()
                if self._store is not None and slot.delivery is not None:
                    self._store.settle(slot.delivery, plan.ends_epoch and plan.is_last)
                following = self._following(plan)
                if following is not None:
                    self.fill(following)
                return read
        finally:
            self.waited_s += time.perf_counter() - started

    def fill(self, position: Position) -> None:
        """Starts reads until `prefetch` batches are on their way, from `position` if none is.

        Raises:
            UsageError: the loader is closed.
        """
        if self._is_closed:
            raise UsageError("this loader is closed: make another one")
        following = self._following(self._slots[-1].plan) if self._slots else position
        most = self.prefetch + (0 if self._store is None else 1 + self._store.ahead)
        while True:
            self._advance()
            if following is None or len(self._slots) >= most:
                return
            plan = self.sampler.batch(*following)
            self._slots.append(_Slot(plan, self._order(plan)))
            following = self._following(plan)

    def forget(self) -> None:
        """Drops the batches that were read ahead; with a store, after their messages."""
        store = self._store
        for slot in self._slots:
            if slot.read is not None:
                slot.read.cancel()
        while self._slots:
            slot = self._slots.pop()
            if store is not None and slot.delivery is not None:
                if slot.read is not None:
                    wait([slot.read])
                store.undo(slot.delivery)

    def close(self) -> None:
        """Ends the background threads, after the reads in flight, and leaves messages alone."""
        self._is_closed = True
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _advance(self) -> None:
        """Starts the messages of the next batches, and reads those whose blocks are here."""
        for number, slot in enumerate(list(self._slots)[: self.prefetch + 1]):
            if slot.delivery is not None:
                slot.delivery.start()
            if number < self.prefetch and slot.read is None:
                if slot.delivery is not None:
                    slot.delivery.arrive()
                slot.read = self._pool.submit(
                    _read, self.dataset, self.mesh, slot.plan, self.device_inputs, slot.delivery
                )

    def _order(self, plan: GroupBatch) -> Delivery | None:
        """Orders a batch of the store, if there is one, with those of the other groups."""
        if self._store is None:
            return None
        groups = self._store.directory.groups
        batches = self.sampler.samples_of(groups, plan.epoch, plan.step, plan.part)
        return self._store.order(batches, plan.epoch)

    def _following(self, plan: GroupBatch) -> Position | None:
        """Returns the position of the next batch; `None` after the epoch of an evaluation."""
        following = self.sampler.after(plan)
        return following if self._endless or following[0] == plan.epoch else None


def _read(
    dataset: BlockSource,
    mesh: Mesh,
    plan: GroupBatch,
    device_inputs: queue.SimpleQueue[DeviceInput] | None,
    delivery: Delivery | None,
) -> Read:
    """Makes a batch; runs in a background thread."""
    source = dataset if delivery is None else delivery.source
    device_input = None if device_inputs is None else device_inputs.get()
    try:
        return read_group(source, mesh, plan, device_input)
    finally:
        if device_inputs is not None and device_input is not None:
            device_inputs.put(device_input)
        if delivery is not None:
            delivery.end()
