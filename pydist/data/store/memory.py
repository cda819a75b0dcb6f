"""The store in memory: blocks that ranks hold, and the messages that bring them to other ranks."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pydist.comm.consensus import require_same
from pydist.data.blocks import BlockSource, StoredSource, by_voxel
from pydist.data.store.directory import Directory, Moves
from pydist.data.store.entry import Entry, EntryFormat
from pydist.data.store.figures import Figures
from pydist.data.store.source import BatchSource, NarrowLabels, StoredBatchSource
from pydist.errors import UsageError
from pydist.grid import AXES, OTHER_AXES
from pydist.layout import layout_for_sample
from pydist.parsing import byte_count

if TYPE_CHECKING:
    from pydist.comm import Transport
    from pydist.comm.interface.handles import Channel
    from pydist.mesh import Mesh

KINDS = ("off", "memory")
"""Possible values of `Loader`'s `store`."""

_BUFFERS = 2
"""One is received into while the blocks of the other one are normalized."""
_LARGEST = 2**63 - 1

_under_way: set[Channel] = set()
"""Channels whose messages may still read or write the memory that they refer to."""


class Delivery:
    """Delivery that brings a rank the blocks of one batch: from memory, other ranks or files.

    Attributes:
        moves: where the blocks come from.
        source: reads them, after `arrive`.
    """

    def __init__(
        self,
        moves: Moves,
        source: BatchSource,
        channel: Channel | None,
        release: Callable[[], None],
    ) -> None:
        self.moves = moves
        self.source = source
        self.ended = threading.Event()
        """Set when nothing is read of the delivery anymore."""
        self._channel = channel
        self._release = release
        if channel is not None:
            _under_way.add(channel)
            channel.start()

    def arrive(self) -> None:
        """Waits until the messages of this batch were received and sent."""
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.wait()
            channel.close()
            _under_way.discard(channel)

    def end(self) -> None:
        """Gives the buffer of received blocks back to the store, after the last read."""
        release, self._release = self._release, _nothing
        release()
        self.ended.set()


class MemoryStore:
    """Store that holds blocks of samples in the memory of the ranks, each block on one rank.

    A rank keeps the blocks that it reads first, as far as its budget allows, and sends them to the
    ranks that need them in later epochs: those of other sample groups with the same part of the
    samples. They have a communicator of their own. All calls are made by one thread of a rank, on
    all ranks in the same order; only sources of deliveries are read by another thread.

    The stored values are kept where they are smaller than the normalized ones, so int16 counts stay
    counts; a device, which may round differently, always gets stored values. Labels have the
    smallest type that holds the classes.

    Args:
        dataset: reads files.
        mesh: determines blocks and owners.
        training: whether sample groups step together. In an evaluation they do not, and no
            messages are sent between groups: each has its own samples in every pass.
        budget: bytes of blocks that this rank may hold; by default there is no limit.
        on_device: whether the loader normalizes stored values on a device.

    Raises:
        UsageError: the budget is not a size, or ranks would keep values of different types.
    """

    def __init__(
        self,
        dataset: BlockSource,
        mesh: Mesh,
        *,
        training: bool = True,
        budget: int | str | None = None,
        on_device: bool = False,
    ) -> None:
        self._dataset, self._mesh = dataset, mesh
        self._formats: dict[tuple[int, ...], EntryFormat] = {}
        self._source_type, self._raw, self._dtype = _form(dataset, on_device)
        self._transport = _ranks_with_equal_blocks(mesh, training)
        facts = {"what the store keeps": f"{self._dtype}, labels {_label_dtype(dataset)}"}
        require_same(mesh.world, facts)
        limit = _LARGEST if budget is None else bytes_of(budget)
        mine = torch.tensor([mesh.data_index, limit], dtype=torch.int64, device="cpu")
        members = self._transport.all_gather(mine).view(-1, 2).tolist()
        self.directory = Directory(
            len(dataset),
            self._transport.rank,
            [group for group, _ in members],
            [each for _, each in members],
            lambda index: self._format_of(index).nbytes,
        )
        self.entries: dict[int, Entry] = {}
        """The blocks that this rank holds, by sample."""
        self.files = BatchSource(dataset, False, {}, _none)
        """Reads samples from files that replace other ones, and counts them."""
        # Set at the ends of reads that fill entries, for those that may not have ended.
        self._reading: dict[int, threading.Event] = {}
        self._buffers: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
        for _ in range(_BUFFERS):
            self._buffers.put(torch.empty(0, dtype=torch.uint8, device="cpu"))
        self._number = 0
        self._figures = Figures()

    @property
    def held_bytes(self) -> int:
        """Bytes of the blocks that this rank holds."""
        return sum(entry.memory.nbytes for entry in list(self.entries.values()))

    # -- one batch --------------------------------------------------------------------------

    def order(self, batches: Mapping[int, Sequence[int]]) -> Delivery:
        """Starts the messages of a batch, or of one pass of it; does not wait for other ranks.

        Waits for this rank's own reads, if they fill blocks that are to be sent, and for a buffer:
        the reads of all deliveries but the last two must have been started.

        Args:
            batches: the samples of each of `directory.groups`.
        """
        moves = self.directory.place(batches)
        entries = {sample: self._entry(sample) for sample in moves.own}
        sends = [(peer, self._entry(sample).memory) for peer, sample in moves.sends]
        recvs, release = [], _nothing
        if moves.recvs:
            buffer, release = self._buffer([sample for _, sample in moves.recvs])
            at = 0
            for peer, sample in moves.recvs:
                format = self._format_of(sample)
                entries[sample] = Entry(format, buffer[at : at + format.nbytes])
                recvs.append((peer, entries[sample].memory))
                at += format.nbytes
        channel = None
        self._number += 1  # a tag that all ranks know; neighbors may be one delivery apart
        if sends or recvs:
            channel = self._transport.channel(sends, recvs, self._number % 2)
        keeps = self._kept_here(moves)
        source = self._source_type(
            self._dataset,
            self._raw,
            entries,
            lambda sample: self._new_entry(sample) if sample in keeps else None,
        )
        source.figures.received_bytes = sum(memory.nbytes for _, memory in recvs)
        delivery = Delivery(moves, source, channel, release)
        self._reading.update(dict.fromkeys(keeps, delivery.ended))
        return delivery

    def undo(self, delivery: Delivery) -> None:
        """Forgets a delivery whose batch is not used, the latest one first; its read has ended."""
        delivery.arrive()
        delivery.end()
        self.directory.undo(delivery.moves)
        for sample in self._kept_here(delivery.moves):
            self._reading.pop(sample, None)
            self.entries.pop(sample, None)

    def settle(self, delivery: Delivery) -> None:
        """Counts a delivery whose batch is used, after its read."""
        for sample in self._kept_here(delivery.moves):
            self._reading.pop(sample, None)
        self._figures.add(delivery.source.figures)

    def close(self) -> None:
        """Releases the memory and the communicator. Collective; after all deliveries arrived."""
        self.entries.clear()
        self._transport.close()

    def counted(self) -> Figures:
        """Returns this rank's counts since the last call."""
        found, self._figures = self._figures, Figures()
        found.add(self.files.figures)
        self.files.figures = Figures()
        found.held_bytes = found.most_held_bytes = self.held_bytes
        return found

    # -- memory -----------------------------------------------------------------------------

    def _entry(self, sample: int) -> Entry:
        """Returns the entry of a sample that this rank holds, after its read has ended."""
        ended = self._reading.pop(sample, None)
        if ended is not None:
            ended.wait()  # an error of that read is raised at its batch
        return self._new_entry(sample)  # which exists, unless the read failed before

    def _new_entry(self, sample: int) -> Entry:
        found = self.entries.get(sample)
        if found is None:
            found = self.entries[sample] = Entry(self._format_of(sample))
        return found

    def _kept_here(self, moves: Moves) -> set[int]:
        return {sample for sample, owner in moves.kept if owner == self.directory.rank}

    def _buffer(self, samples: Sequence[int]) -> tuple[Tensor, Callable[[], None]]:
        """Takes a buffer for the blocks of samples; returns it and the function to give it back."""
        needed = sum(self._format_of(sample).nbytes for sample in samples)
        buffer = self._buffers.get()
        if buffer.nbytes < needed:
            buffer = torch.empty(needed, dtype=torch.uint8, device="cpu")
        return buffer, lambda: self._buffers.put(buffer)

    def _format_of(self, sample: int) -> EntryFormat:
        shape = self._dataset.shape_of(sample)
        if shape not in self._formats:
            self._formats[shape] = self._format(shape)
        return self._formats[shape]

    def _format(self, shape: tuple[int, int, int, int]) -> EntryFormat:
        dataset = self._dataset
        layout = layout_for_sample(self._mesh, (1, *shape))
        block = layout.local_shape[1:]
        if not dataset.labelled:
            return EntryFormat(block, self._dtype, (dataset.num_targets,), dataset.dtype)
        labels = by_voxel(layout).local_shape[1:]
        return EntryFormat(block, self._dtype, labels, _label_dtype(dataset))


def bytes_of(budget: int | str) -> int:
    """Returns a budget in bytes.

    Raises:
        UsageError: it is neither a positive number nor a size such as "4GB".
    """
    try:
        if isinstance(budget, str):
            return byte_count(budget)
        if isinstance(budget, int) and not isinstance(budget, bool) and 0 < budget <= _LARGEST:
            return budget
    except ValueError as error:
        raise UsageError(f"store_memory={budget!r}: {error}") from None
    raise UsageError(f"store_memory={budget!r}: a number of bytes >= 1, or text such as '4GB'")


def _form(dataset: BlockSource, on_device: bool) -> tuple[type[BatchSource], bool, torch.dtype]:
    """Returns the source's class, whether stored values are kept, and the type of what is kept."""
    if not isinstance(dataset, StoredSource):
        return BatchSource, False, dataset.dtype
    if on_device:
        return StoredBatchSource, True, dataset.stored_dtype
    if dataset.stored_dtype.itemsize < dataset.dtype.itemsize:
        return BatchSource, True, dataset.stored_dtype
    return BatchSource, False, dataset.dtype


def _label_dtype(dataset: BlockSource) -> torch.dtype:
    return dataset.label_dtype if isinstance(dataset, NarrowLabels) else torch.int64


def _ranks_with_equal_blocks(mesh: Mesh, training: bool) -> Transport:
    """Creates the transport over the ranks with this rank's part of the samples. Collective."""
    differ = ("data", *OTHER_AXES) if training else tuple(OTHER_AXES)
    others = tuple(axis for axis in AXES if axis not in differ)
    return mesh.world.split(mesh.grid.index(mesh.coords, others), mesh.rank)


def _none(_: int) -> None:
    return None


def _nothing() -> None:
    pass
