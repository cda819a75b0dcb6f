"""A store of samples that change from epoch to epoch: it keeps what the files have.

The ranks keep the blocks of the unchanged samples, each once. Every rank knows what is drawn for
each sample, and so the box that each block of the changed sample depends on; the parts of this box
come from the ranks that hold them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import cache, partial
from typing import TYPE_CHECKING, NamedTuple, cast

import torch

from pydist.data.augment.pieces import BoxSource, HeldPart, slices_of
from pydist.data.augment.source import Augmented
from pydist.data.store.delivery import Delivery
from pydist.data.store.directory import Budget, Directory, Moves
from pydist.data.store.entry import Entry, EntryFormat, copy
from pydist.data.store.memory import MemoryStore
from pydist.data.store.options import StoreOptions
from pydist.data.store.source import BatchSource
from pydist.errors import UsageError
from pydist.grid import AXES, SAMPLE_AXES, SPATIAL_AXES
from pydist.layout import Layout, layout_for_sample
from pydist.partition import Box

if TYPE_CHECKING:
    from pydist.comm.interface.handles import Channel
    from pydist.mesh import Mesh


class _Place(NamedTuple):
    """Place that a rank has on the mesh: sample group, index in it, and part of a sample."""

    group: int
    within: int
    part: int


@dataclass
class _Order:
    """What was decided for one batch."""

    placed: dict[int, Moves]
    """By part of the samples."""
    keeper: BatchSource
    """Reads the blocks that this rank is to hold."""
    sends: list[tuple[int, int, Box]] = field(default_factory=list)
    """Receiver, sample and box of each message."""
    recvs: list[tuple[int, int, Box]] = field(default_factory=list)
    """Sender, sample and box of each message."""
    filled: list[Future[None]] = field(default_factory=list)
    """Reads of the blocks that this rank is to hold."""
    memory: list[Entry] = field(default_factory=list)
    """What is being sent and received."""


class BoxStore(MemoryStore):
    """Store for samples that change from epoch to epoch.

    Ranks keep the blocks of the unchanged samples, as `MemoryStore` decides. The box that a block
    of a changed sample depends on is joined from the blocks of all parts of the sample, wherever
    they are held. In its first epoch a rank reads the blocks that it is to keep, and nothing else.

    Args:
        augmented: the changed samples.
        mesh: determines blocks and owners.
        options: limits of memory and disk, which may differ between ranks.
        training: see `MemoryStore`.

    Raises:
        UsageError: an option is impossible, or it is an evaluation.
    """

    def __init__(
        self, augmented: Augmented, mesh: Mesh, options: StoreOptions, *, training: bool = True
    ) -> None:
        if not training:
            raise UsageError(f'store = "{options.store}" with augmentation: possible in training')
        super().__init__(augmented.dataset, mesh, options)
        self.unchanged = augmented.dataset
        """The samples as files have them."""
        self._augmented = augmented
        self._everyone = mesh.world.split(0, mesh.rank)
        coords = [mesh.grid.coords(rank, AXES) for rank in range(mesh.size)]
        self._ranks = [
            _Place(
                each["data"],
                mesh.grid.index(each, SAMPLE_AXES),
                mesh.grid.index(each, SPATIAL_AXES),
            )
            for each in coords
        ]
        self._part = self._ranks[mesh.rank].part
        self._members = [
            [rank for rank, place in enumerate(self._ranks) if place.part == part]
            for part in range(mesh.grid.size(SPATIAL_AXES))
        ]
        self._layouts: dict[tuple[int, ...], Layout] = {}
        self._directories = self._all_directories(Budget(options.memory, options.disk))
        self._orders: dict[Delivery, _Order] = {}
        self._filling: dict[int, Future[None]] = {}
        self._filler = ThreadPoolExecutor(1, "pydist-store")
        self._reads_file = threading.Lock()
        self.files = self._box_source()

    @property
    def ahead(self) -> int:
        """Batches to be ordered before the one whose messages are started: 1 to read files."""
        return 1

    # -- one batch --------------------------------------------------------------------------

    def order(self, batches: Mapping[int, Sequence[int]], epoch: int = 0) -> Delivery:
        """Decides where the boxes of a batch come from; starts the reads of blocks to be kept."""
        placed = {part: each.place(batches) for part, each in enumerate(self._directories)}
        moves = placed[self._part]
        kept = self._kept_here(moves)
        order = _Order(placed, self._source(moves, {}, kept))
        for sample in kept:
            future = self._filler.submit(self._fill_alone, order.keeper, sample)
            self._filling[sample] = future
            order.filled.append(future)
        source = self._box_source()
        delivery = Delivery(
            moves, source, lambda each: self._begin_boxes(each, order), self._unstage
        )
        changed = self._augmented.in_epoch(epoch)
        for group in self.directory.groups:
            for sample in batches[group]:
                self._plan(order, source, changed, group, sample)
        for _, sample, _ in order.sends:
            if sample not in self._filling:
                self._stage(delivery, sample)
        self._orders[delivery] = order
        return delivery

    def undo(self, delivery: Delivery) -> None:
        """Forgets a delivery whose batch is not used, the latest one first; its read has ended."""
        order = self._orders.pop(delivery)
        wait(order.filled)
        super().undo(delivery)
        for sample in self._kept_here(delivery.moves):
            self._filling.pop(sample, None)
        for part, moves in order.placed.items():
            if part != self._part:
                self._directories[part].undo(moves)

    def settle(self, delivery: Delivery, ends_epoch: bool) -> None:
        """Counts a delivery whose batch is used, after its read; see `MemoryStore.settle`."""
        order = self._orders.pop(delivery)
        wait(order.filled)
        for sample in self._kept_here(delivery.moves):
            self._filling.pop(sample, None)
        self._figures.file_blocks += order.keeper.figures.file_blocks
        self._figures.file_bytes += order.keeper.figures.file_bytes
        super().settle(delivery, ends_epoch)

    def preload(self, batches: Mapping[int, Sequence[int]]) -> None:
        """Reads those samples of a batch that no rank holds; see `MemoryStore.preload`."""
        for part, directory in enumerate(self._directories):
            if part != self._part:
                directory.place(batches)
        super().preload(batches)

    def close(self) -> None:
        """Releases memory, disk and communicators. Collective; after all deliveries arrived."""
        self._filler.shutdown(wait=True, cancel_futures=True)
        super().close()
        self._everyone.close()

    def abandon(self) -> None:
        """Releases the disk and its threads after a failure; leaves the communicators alone."""
        self._filler.shutdown(wait=True, cancel_futures=True)
        super().abandon()

    # -- plans ------------------------------------------------------------------------------

    def _plan(
        self,
        order: _Order,
        source: BoxSource,
        changed: Augmented,
        group: int,
        sample: int,
    ) -> None:
        """Adds the pieces of one sample that this rank sends, receives or has itself."""
        me = self._mesh.rank
        blocks = self._layout(self.unchanged.shape_of(sample))
        results = self._layout(changed.shape_of(sample))
        holders = [self._holder(part, sample) for part in range(len(self._members))]
        for receiver, place in enumerate(self._ranks):
            if place.group != group or me not in (receiver, holders[self._part]):
                continue
            wanted = _spatial(results.boxes[place.within])
            if wanted.empty:
                continue
            needed = changed.source_box(sample, wanted)
            for part, holder in enumerate(holders):
                if holder is None or me not in (receiver, holder):
                    continue
                box = needed.intersect(self._block(blocks, part))
                if box.empty:
                    continue
                if receiver != me:
                    order.sends.append((receiver, sample, box))
                elif holder != me:
                    order.recvs.append((holder, sample, box))
                else:
                    whole = HeldPart(self._block(blocks, part), self._own(source, sample))
                    source.pieces.setdefault(sample, []).append(whole)

    def _own(self, source: BoxSource, sample: int) -> Callable[[], Entry | None]:
        """Returns the function that finds a block of this rank, once for values and targets."""
        filling = self._filling.get(sample)

        @cache
        def find() -> Entry | None:
            if filling is not None:
                filling.result()
            entry = self.holdings.in_memory(sample)
            if entry is None:
                entry = self.holdings.find(sample)
                source.figures.disk_blocks += entry is not None
            return entry

        return find

    def _holder(self, part: int, sample: int) -> int | None:
        """Returns the rank of the world that holds a part of a sample; None if none does."""
        owner = int(self._directories[part].owners[sample])
        return None if owner < 0 else self._members[part][owner]

    def _block(self, blocks: Layout, part: int) -> Box:
        return _spatial(blocks.boxes[self._ranks[self._members[part][0]].within])

    def _layout(self, shape: tuple[int, ...]) -> Layout:
        if shape not in self._layouts:
            self._layouts[shape] = layout_for_sample(self._mesh, (1, *shape))
        return self._layouts[shape]

    # -- messages ---------------------------------------------------------------------------

    def _begin_boxes(
        self, delivery: Delivery, order: _Order
    ) -> tuple[Channel | None, Callable[[], None]]:
        """Returns the messages of a delivery, after the blocks that they are cut from are there."""
        source = cast(BoxSource, delivery.source)
        sends, recvs = [], []
        for receiver, sample, box in order.sends:
            if sample in self._filling:
                wait([self._filling[sample]])  # an error of that read is raised at its batch
            self._stage(delivery, sample)
            blocks = self._layout(self.unchanged.shape_of(sample))
            block = self._block(blocks, self._part)
            piece = Entry(self._format(box))
            entry = self._sent(delivery, sample)
            if entry.is_good:
                inside = slices_of(box, block)
                copy(entry.block[inside], piece.block)
                labeled = self.unchanged.labeled
                copy(entry.targets[inside] if labeled else entry.targets, piece.targets)
                piece.approve()
            order.memory.append(piece)
            sends.append((receiver, piece.memory))
        for sender, sample, box in order.recvs:
            piece = Entry(self._format(box))
            order.memory.append(piece)
            recvs.append((sender, piece.memory))
            found = HeldPart(box, partial(_itself, piece))
            source.pieces.setdefault(sample, []).append(found)
        self._number += 1  # a tag that all ranks know; neighbors may be one delivery apart
        source.figures.received_bytes = sum(memory.nbytes for _, memory in recvs)
        if not sends and not recvs:
            return None, _nothing
        return self._everyone.channel(sends, recvs, self._number % 2), _nothing

    def _format(self, box: Box) -> EntryFormat:
        unchanged, sizes = self.unchanged, tuple(box.shape)
        block = (unchanged.sample_shape[0], *sizes)
        if unchanged.labeled:
            return EntryFormat(block, self.form.dtype, sizes, self.form.label_dtype)
        return EntryFormat(block, self.form.dtype, (unchanged.num_targets,), unchanged.dtype)

    def _box_source(self) -> BoxSource:
        return BoxSource(self._augmented, self.form, self.holdings, self._reads_file)

    # -- blocks of the ranks ----------------------------------------------------------------

    def _fill_alone(self, keeper: BatchSource, sample: int) -> None:
        """Reads a block that this rank is to hold; runs in a background thread."""
        with self._reads_file:
            self._fill(keeper, sample)

    def _all_directories(self, budget: Budget) -> list[Directory]:
        """Returns the directory of each part of the samples. Collective."""
        everyone, count = self._everyone, len(self.unchanged)
        mine = torch.tensor(budget, dtype=torch.int64, device="cpu")
        budgets = [Budget(*each) for each in everyone.all_gather(mine).view(-1, 2).tolist()]
        owners = torch.from_numpy(self.directory.owners)  # those of an earlier run
        adopted = everyone.all_gather(owners).view(-1, count)
        found = []
        for part, members in enumerate(self._members):
            if part == self._part:
                found.append(self.directory)
                continue
            directory = Directory(
                count,
                -1,
                [self._ranks[rank].group for rank in members],
                [budgets[rank] for rank in members],
                partial(self._size_of, part),
            )
            row = adopted[members[0]]
            held = [(row == owner).nonzero().flatten().tolist() for owner in range(len(members))]
            directory.adopt(held)
            found.append(directory)
        return found

    def _size_of(self, part: int, sample: int) -> int:
        blocks = self._layout(self.unchanged.shape_of(sample))
        return self._format(self._block(blocks, part)).nbytes


def _spatial(box: Box) -> Box:
    """Returns the box over (D, H, W) of one over [N, C, D, H, W]."""
    return Box(box.lo[2:], box.hi[2:])


def _itself(entry: Entry) -> Entry:
    return entry


def _nothing() -> None:
    pass
