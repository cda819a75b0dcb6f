"""The store of samples: blocks that ranks hold, and the messages that bring them to other ranks."""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pydist.comm.consensus import require_same
from pydist.data.blocks import BlockSource, read_sample
from pydist.data.dataset import BadSample
from pydist.data.store.delivery import Delivery
from pydist.data.store.directory import Budget, Directory, Moves
from pydist.data.store.disk import Disk
from pydist.data.store.entry import Entry
from pydist.data.store.figures import Figures
from pydist.data.store.form import BlockForm
from pydist.data.store.holdings import Holdings
from pydist.data.store.lasting import open_spill
from pydist.data.store.options import StoreOptions
from pydist.data.store.source import BatchSource
from pydist.grid import AXES, OTHER_AXES
from pydist.layout import layout_for_sample

if TYPE_CHECKING:
    from pydist.comm import Transport
    from pydist.comm.interface.handles import Channel
    from pydist.mesh import Mesh

_BUFFERS = 2
"""One is received into while the blocks of the other one are normalized."""


class MemoryStore:
    """Store that keeps blocks of samples, each on exactly one rank, in memory or on its disk.

    A rank keeps the blocks that it reads first, as far as its budget allows, and sends them to the
    ranks that need them in later epochs: those of other sample groups with the same part of the
    samples. They have a communicator of their own. All calls are made by one thread of a rank, on
    all ranks in the same order; only sources of deliveries are read by another thread.

    Args:
        dataset: reads files.
        mesh: determines blocks and owners.
        options: limits of memory and disk, which may differ between ranks.
        training: whether sample groups step together. In an evaluation they do not, and no
            messages are sent between groups: each has its own samples in every pass.
        on_device: whether the loader normalizes stored values on a device.

    Raises:
        UsageError: an option is impossible, or ranks would keep values of different types.
    """

    def __init__(
        self,
        dataset: BlockSource,
        mesh: Mesh,
        options: StoreOptions | None = None,
        *,
        training: bool = True,
        on_device: bool = False,
    ) -> None:
        options = options or StoreOptions("memory")
        options.check()
        self._dataset, self._mesh = dataset, mesh
        self.form = BlockForm(dataset, mesh, on_device)
        self._transport = _ranks_with_equal_blocks(mesh, training)
        require_same(mesh.world, {"what the store keeps": str(self.form)})
        budget = Budget(options.memory, options.disk)
        mine = torch.tensor([mesh.data_index, *budget], dtype=torch.int64, device="cpu")
        members = self._transport.all_gather(mine).view(-1, 3).tolist()
        self.directory = Directory(
            len(dataset),
            self._transport.rank,
            [group for group, *_ in members],
            [Budget(*each) for _, *each in members],
            lambda index: self.form.of(index).nbytes,
        )
        self.holdings = Holdings(self.form.of, budget.memory, self._disk(options, training))
        """The blocks that this rank holds."""
        # In an evaluation a group has the same samples in each epoch, and sees no others.
        self._reuses, self._is_final = options.store_reuse, not training
        if self._reuses:
            self._adopt()
        self.files = BatchSource(dataset, False, {}, (), (), self.holdings)
        """Reads samples from files that replace other ones, and counts them."""
        # Set at the ends of reads that fill entries, for those that may not have ended.
        self._reading: dict[int, threading.Event] = {}
        self._buffers: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
        for _ in range(_BUFFERS):
            self._buffers.put(torch.empty(0, dtype=torch.uint8, device="cpu"))
        self._number = 0
        self._figures = Figures()
        self._staged_bytes = 0

    @property
    def entries(self) -> dict[int, Entry]:
        """Blocks that are in this rank's memory, by sample."""
        return self.holdings.entries

    @property
    def held_bytes(self) -> int:
        """Bytes that the blocks in this rank's memory have."""
        return self.holdings.held_bytes

    @property
    def ahead(self) -> int:
        """Batches to be ordered before the one whose messages are started: 1 to read the disk."""
        return int(self.holdings.disk is not None)

    # -- one batch --------------------------------------------------------------------------

    def order(self, batches: Mapping[int, Sequence[int]], epoch: int = 0) -> Delivery:
        """Decides where the blocks of a batch come from, or of one pass of it.

        Starts to read the blocks from disk that are to be sent. The messages are started by
        `Delivery.start`; orders and starts have the same sequence on all ranks.

        Args:
            batches: the samples of each of `directory.groups`.
            epoch: of the batch; blocks are the same in each.
        """
        moves = self.directory.place(batches)
        received: dict[int, Entry] = {}
        kept = self._kept_here(moves)
        source = self._source(moves, received, kept)
        delivery = Delivery(moves, source, lambda each: self._begin(each, received), self._unstage)
        for _, sample in moves.sends:
            if sample not in self._reading:
                self._stage(delivery, sample)
        if kept:
            delivery.ended = threading.Event()
            self._reading.update(dict.fromkeys(kept, delivery.ended))
        return delivery

    def undo(self, delivery: Delivery) -> None:
        """Forgets a delivery whose batch is not used, the latest one first; its read has ended."""
        if delivery.has_started:
            delivery.arrive()
        delivery.withdraw()
        delivery.end()
        self.directory.undo(delivery.moves)
        for sample in self._kept_here(delivery.moves):
            self._reading.pop(sample, None)
            self.holdings.drop(sample)

    def settle(self, delivery: Delivery, ends_epoch: bool) -> None:
        """Counts a delivery whose batch is used, after its read.

        Args:
            delivery: the delivery.
            ends_epoch: whether the epoch is over, so that its blocks are saved for the next run.
        """
        for sample in self._kept_here(delivery.moves):
            self._reading.pop(sample, None)
        self._figures.add(delivery.source.figures)
        if ends_epoch and self._reuses:
            self._is_final = self._is_final or self.directory.is_final()
            self.holdings.save(with_memory=self._is_final)

    def preload(self, batches: Mapping[int, Sequence[int]]) -> None:
        """Reads those samples of a batch that no rank holds, each into that of its first consumer.

        A bad sample is left to its batch. No delivery may be under way.

        Args:
            batches: the samples of each of `directory.groups`.
        """
        moves = self.directory.place(batches)
        kept = self._kept_here(moves)
        source = self._source(moves, {}, kept)
        for sample in kept:
            self._fill(source, sample)
        self._figures.file_bytes += source.figures.file_bytes

    def close(self) -> None:
        """Releases memory, disk and communicator. Collective; after all deliveries arrived."""
        self.holdings.close(save=self._reuses)
        self._transport.close()

    def abandon(self) -> None:
        """Releases the disk and its threads after a failure; leaves the communicator alone."""
        self.holdings.close(save=False)

    def counted(self) -> Figures:
        """Returns this rank's counts since the last call."""
        found, self._figures = self._figures, Figures()
        found.add(self.files.figures)
        self.files.figures = Figures()
        found.held_bytes = found.most_held_bytes = self.held_bytes
        disk = self.holdings.disk
        if disk is not None:
            found.disk_bytes, disk.read_bytes = disk.read_bytes, 0
            found.lost_blocks, disk.lost = disk.lost, 0
            found.spilled_bytes = disk.spill.nbytes
            found.stored_bytes = disk.spill.stored_bytes
        return found

    # -- messages ---------------------------------------------------------------------------

    def _begin(
        self, delivery: Delivery, received: dict[int, Entry]
    ) -> tuple[Channel | None, Callable[[], None]]:
        """Returns the messages of a delivery, and the function that gives their buffer back.

        Waits for this rank's own reads, if they fill blocks that are to be sent, and for a buffer:
        the reads of all deliveries but the last two must have been started.
        """
        moves = delivery.moves
        for _, sample in moves.sends:
            ended = self._reading.pop(sample, None)
            if ended is not None:
                ended.wait()  # an error of that read is raised at its batch
            self._stage(delivery, sample)
        sends = [(peer, self._sent(delivery, sample).memory) for peer, sample in moves.sends]
        recvs, release, at = [], _nothing, 0
        if moves.recvs:
            buffer, release = self._buffer([sample for _, sample in moves.recvs])
            for peer, sample in moves.recvs:
                format = self.form.of(sample)
                received[sample] = Entry(format, buffer[at : at + format.nbytes])
                recvs.append((peer, received[sample].memory))
                at += format.nbytes
        self._number += 1  # a tag that all ranks know; neighbors may be one delivery apart
        delivery.source.figures.received_bytes = at
        if not sends and not recvs:
            return None, release
        return self._transport.channel(sends, recvs, self._number % 2), release

    def _sent(self, delivery: Delivery, sample: int) -> Entry:
        """Returns the entry of a sample that is to be sent, without approval if it was lost."""
        staged = delivery.staged.get(sample)
        if sample not in delivery.sent:
            entry = self.holdings.find(sample) if staged is None else staged.result()
            delivery.sent[sample] = entry or Entry(self.form.of(sample))
        entry = delivery.sent[sample]
        delivery.source.figures.disk_blocks += staged is not None and entry.is_good
        return entry

    def _stage(self, delivery: Delivery, sample: int) -> None:
        """Starts to read a sample from disk that is to be sent, unless it is in memory."""
        if self.holdings.disk is None:
            return
        staged = None if sample in delivery.staged else self.holdings.fetch(sample)
        if staged is not None:
            delivery.staged[sample] = staged
            self._staged_bytes += self.form.of(sample).nbytes
            self._figures.most_staged_bytes = max(
                self._figures.most_staged_bytes, self._staged_bytes
            )

    def _unstage(self, delivery: Delivery) -> None:
        self._staged_bytes -= sum(self.form.of(sample).nbytes for sample in delivery.staged)

    def _buffer(self, samples: Sequence[int]) -> tuple[Tensor, Callable[[], None]]:
        """Takes a buffer for the blocks of samples; returns it and the function to give it back."""
        needed = sum(self.form.of(sample).nbytes for sample in samples)
        buffer = self._buffers.get()
        if buffer.nbytes < needed:
            buffer = torch.empty(needed, dtype=torch.uint8, device="cpu")
        return buffer, lambda: self._buffers.put(buffer)

    # -- blocks of this rank ----------------------------------------------------------------

    def _source(self, moves: Moves, received: dict[int, Entry], keeps: set[int]) -> BatchSource:
        """Reserves the places of new samples; returns the source of a batch."""
        for kept in moves.kept:
            if kept.owner == self.directory.rank:
                self.holdings.keep(kept.sample, kept.on_disk)
        own = set(moves.own)
        return self.form.source_type(
            self._dataset, self.form.raw, received, own, keeps, self.holdings
        )

    def _fill(self, source: BatchSource, sample: int) -> None:
        """Reads the block of a sample that this rank is to hold; a bad one is left to its batch."""
        dataset = self._dataset
        layout = layout_for_sample(self._mesh, (1, *dataset.shape_of(sample)))
        inputs = torch.empty(layout.local_shape[1:], dtype=dataset.dtype)
        targets = torch.empty(
            self.form.of(sample).targets_shape,
            dtype=torch.int64 if dataset.labeled else dataset.dtype,
        )
        with contextlib.suppress(BadSample):
            read_sample(source, sample, layout, inputs, targets)

    def _kept_here(self, moves: Moves) -> set[int]:
        return {kept.sample for kept in moves.kept if kept.owner == self.directory.rank}

    def _disk(self, options: StoreOptions, training: bool) -> Disk | None:
        if options.disk == 0:
            return None

        def facts() -> dict[str, Any]:
            members, coords = self._transport, dict(self._mesh.coords)
            of_rank = {"ranks": [members.rank, members.size], "coords": coords}
            return {**self.form.facts(), **of_rank, "training": training}

        def warn(text: str) -> None:
            sys.stderr.write(f"pydist: rank {self._mesh.rank}, sample store: {text}\n")

        def size_of(sample: int) -> int:
            return self.form.of(sample).nbytes

        spill = open_spill(options, self.form.dtype.itemsize, facts, size_of, warn)
        return Disk(spill, self.form.of, options.disk, warn)

    def _adopt(self) -> None:
        """Takes over what earlier runs have left on the ranks' disks. Collective."""
        disk = self.holdings.disk
        assert disk is not None
        found = torch.zeros(len(self._dataset), dtype=torch.uint8, device="cpu")
        found[disk.spill.samples] = 1
        rows = self._transport.all_gather(found).view(-1, len(found))
        self.directory.adopt([row.nonzero().flatten().tolist() for row in rows])
        own = set(self.directory.owned(self.directory.rank))
        for sample in disk.spill.samples:
            if sample in own:
                self.holdings.adopt(sample)
            else:
                disk.forget(sample)


def _ranks_with_equal_blocks(mesh: Mesh, training: bool) -> Transport:
    """Creates the transport over the ranks with this rank's part of the samples. Collective."""
    differ = ("data", *OTHER_AXES) if training else tuple(OTHER_AXES)
    others = tuple(axis for axis in AXES if axis not in differ)
    return mesh.world.split(mesh.grid.index(mesh.coords, others), mesh.rank)


def _nothing() -> None:
    pass
