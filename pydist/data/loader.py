"""Batches as sharded tensors, read in the background while the previous step computes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pydist.comm.consensus import require_same
from pydist.data.augment.source import Augmented
from pydist.data.augment.stored import BoxStore
from pydist.data.batch_sizes import BatchSizes, PassRule
from pydist.data.blocks import (
    BlockSource,
    EpochSource,
    Read,
    block_of,
    by_voxel,
    dims_of,
    in_epoch,
    layout_of,
    read_sample,
    without_flat_dims,
)
from pydist.data.dataset import BadSample
from pydist.data.device_input import DeviceInput
from pydist.data.read_ahead import ReadAhead
from pydist.data.sampler import GroupBatch, MeshSampler
from pydist.data.store.memory import MemoryStore
from pydist.data.store.options import StoreOptions, check_readers
from pydist.errors import DataError, UsageError
from pydist.layout import layout_for_sample
from pydist.mesh import Mesh
from pydist.tensor import ShardedTensor
from pydist.watchdog import phase

ELSEWHERE = "bad on another rank"
"""Why a sample is skipped whose block on this rank is good."""

SKIP_LIMIT = 0.01
"""Largest fraction of the samples that `on_bad_sample="skip"` may leave out."""

MOST_AHEAD = 1024
"""Largest number of batches read ahead: more is a mistake that would exhaust the memory."""


@dataclass(frozen=True)
class Batch:
    """Samples that one step, or one pass of a step, gives to one sample group.

    Attributes:
        inputs: [N, C, D, H, W] with the group's N samples, or [N, C, H, W] of images and [N, C, W]
            of lines; this rank holds its blocks of them.
        targets: [N, T], plain, equal on all ranks of the group; or, for classes of voxels,
            [N, D, H, W] int64, a `ShardedTensor` that is cut as `inputs` is, without the dims that
            they do not have.
        weight: [N]; 0 for a sample that replaces another one, else 1. In an evaluation,
            sum(weight * error) over groups, divided by sum(weight), counts every sample once.
        indices: the samples' indices in the data set.
        count: the number of samples that count in a training step: N, or 0 for padding.
        first_sample: position in the global batch of the first one.
        global_size: samples of all groups in this pass.
        loss_scale: factor for the group's mean loss: the samples of the pass over those of the
            step. It also excludes padding, where a pass has fewer samples than there are groups.
        epoch: of the batch.
        step: number of the step in the epoch.
        step_size: samples in the global batch, those of all passes.
        part: number of the pass in the step.
        parts: passes of the step.
        is_last: whether the step ends with this pass.
        ends_epoch: whether the epoch ends with this step.
        in_parts: whether the step computes losses of parts of its samples: of several passes, or of
            the micro-batches of stages, even if there is only one.
    """

    inputs: ShardedTensor
    targets: Tensor
    weight: Tensor
    indices: tuple[int, ...]
    count: int
    first_sample: int
    global_size: int
    loss_scale: float
    epoch: int
    step: int
    step_size: int
    part: int = 0
    parts: int = 1
    is_last: bool = True
    ends_epoch: bool = False
    in_parts: bool = False


class Loader:
    """Iterator that yields the batches of this rank's sample group.

    Each rank reads only its own blocks. A background thread, or several (`readers`), reads
    `prefetch` batches ahead, when training also from the next epoch. It is a thread and not a
    forked worker (a fork after MPI_Init is undefined), and it calls neither MPI nor torch's thread
    pool. Reads release the interpreter lock, so training continues meanwhile.

    An error in the background is raised from the iterator at the batch that it belongs to.

    Making a loader is collective over the mesh: the ranks compare its arguments.

    Args:
        dataset: the source of samples.
        mesh: determines the blocks and samples of this rank.
        batch_size: samples in a global batch, over all groups; or sizes that change in a run.
        training: use a new order each epoch, and pad groups so that they step together. Otherwise
            (evaluation) use the data set's order, each sample once; groups may get fewer batches.
        seed: of the order; by default the mesh's.
        drop_last: leave out a last batch that is short.
        prefetch: batches read ahead, 1 to `MOST_AHEAD`; each takes the memory of one local input.
        readers: threads that read, each a batch, 1 to 64: several are faster for NumPy and Zarr
            files on shared file systems (HDF5 has one lock). As many batches are read ahead, at
            least. The data set's methods are called in several threads.
        on_bad_sample: "stop" raises `BadSample`; "skip" replaces it by the next good sample, on
            all ranks of the group, with weight 0 (one small message per batch), and stops when
            the group has skipped more than 1 % of the data set's samples, or more than 1; see
            `require_few_bad`.
        device: the device of batches. Stored values are copied to a CUDA device through pinned
            buffers, on a stream of their own, and are normalized there.
        memory_format: of inputs on a CUDA device; `torch.channels_last_3d` costs nothing there.
        pad: when training, give a group without samples one as padding, which the statistics of
            batch norm see. Without it the group gets an empty batch [0, C, D, H, W], which is exact
            but which not every network accepts; its mean loss is NaN.
        passes: the rule for the passes of a step; each pass is a batch. By default there is one.
        divide: whether they are batches; else a step is one batch that carries their number.
        store: "memory" keeps each block in the memory of the rank that reads it first; from the
            second epoch on, ranks receive blocks from one another, and no file is read. Batches are
            the same. Sample groups then have to take equally many training batches, and `close` is
            collective.
        store_memory: bytes of blocks that this rank may keep, a number or text such as "4GB"; the
            rest is read from files in each epoch. By default there is no limit.
        store_disk: bytes of blocks that it may write to disk beyond that, before compression.
        store_folder: folder for them, on a disk of this machine.
        store_codec: "zstd", "lz4" or "blosc" compress each block on disk that gets smaller by it.
        store_reuse: whether the blocks on disk stay there, also those in memory as far as
            `store_disk` allows, so that the next run reads no file.
        store_preload: whether to read all samples of the epoch before its first batch.

    Raises:
        UsageError: a batch smaller than the number of groups, another value out of range, or other
            data or options on another rank.
    """

    def __init__(
        self,
        dataset: BlockSource,
        mesh: Mesh,
        batch_size: int | BatchSizes,
        *,
        training: bool = True,
        seed: int | None = None,
        drop_last: bool = False,
        prefetch: int = 2,
        readers: int = 1,
        on_bad_sample: str = "stop",
        device: torch.device | str = "cpu",
        memory_format: torch.memory_format = torch.contiguous_format,
        pad: bool = True,
        passes: PassRule | None = None,
        divide: bool = True,
        store: str = "off",
        store_memory: int | str | None = None,
        store_disk: int | str | None = None,
        store_folder: str | Path | None = None,
        store_codec: str = "raw",
        store_reuse: bool = False,
        store_preload: bool = False,
    ) -> None:
        if not 1 <= prefetch <= MOST_AHEAD or on_bad_sample not in ("stop", "skip"):
            raise UsageError(
                f"prefetch={prefetch}, on_bad_sample={on_bad_sample!r}: 1 to {MOST_AHEAD} batches, "
                "and stop or skip are possible"
            )
        check_readers(readers, store)
        options = StoreOptions(
            store, store_memory, store_disk, store_folder, store_codec, store_reuse, store_preload
        )
        options.check()
        unchanged = dataset.dataset if isinstance(dataset, Augmented) else dataset
        if store != "off" and isinstance(unchanged, EpochSource):
            raise UsageError(
                f'store = "{store}": it keeps blocks of samples, and those of '
                f'{type(unchanged).__name__} change from epoch to epoch; "off" is possible'
            )
        self.dataset = dataset
        self.dims = dims_of(dataset)
        """Number of spatial dims of inputs: 2 for images, [N, C, H, W]."""
        if self.dims < 3:  # raises if the mesh cuts dims that they do not have
            without_flat_dims(layout_for_sample(mesh, (1, *dataset.sample_shape)), self.dims)
        self.mesh = mesh
        self.sampler = MeshSampler(
            len(dataset),
            mesh.data_size,
            mesh.data_index,
            batch_size,
            shuffle=training,
            seed=mesh.seed if seed is None else seed,
            drop_last=drop_last,
            pad=training and pad,
            shares=mesh.shares.get("data"),
            passes=passes,
            divide=divide,
        )
        if training:
            self.sampler.require_one_each()
        facts = {
            "data set": dataset.identity,
            "on_bad_sample": on_bad_sample,
            "training": training,
            "pad": self.sampler.pad,
            "passes": self.sampler.rule,
            "divide": divide,
            "store": store,
            "store_reuse": store_reuse,
            "store_preload": store_preload,
            **self.sampler.state_dict(),
        }
        require_same(mesh.world, {f"the loader's {name}": fact for name, fact in facts.items()})
        self.on_bad_sample = on_bad_sample
        self.skipped: dict[int, str] = {}
        """Bad samples of this group that were left out, and why."""
        self.replaced = 0
        """How often a sample of a batch was replaced by another one so far."""
        self.device = torch.device(device)
        device_input: Callable[[], DeviceInput] | None = None
        if self.device.type != "cpu":
            device_input = partial(DeviceInput, self.device, memory_format)
        self.store: MemoryStore | None = None
        """The store of blocks, with counts of hits and bytes; None without one."""
        if store == "memory" and isinstance(dataset, Augmented):
            self.store = BoxStore(dataset, mesh, options, training=training)
        elif store == "memory":
            self.store = MemoryStore(
                dataset,
                mesh,
                options,
                training=training,
                on_device=device_input is not None,
            )
        self._training = training
        self._closed = False
        self._is_preloaded = not store_preload
        self.readers = readers
        """Number of threads that read."""
        ahead = max(prefetch, readers)
        self._ahead = ReadAhead(
            dataset, mesh, self.sampler, ahead, readers, training, device_input, self.store
        )

    @property
    def waited_s(self) -> float:
        """Seconds that the consumer has waited for data so far."""
        return self._ahead.waited_s

    @property
    def bytes_read(self) -> int | None:
        """Bytes that this process has read from files so far; None if the source counts none."""
        found: int | None = getattr(self.dataset, "bytes_read", None)
        return found

    def __len__(self) -> int:
        """Returns the number of global batches in the epoch of the position."""
        return len(self.sampler)

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.close()
        else:  # another rank may never send what is on its way
            self._closed = True
            self._ahead.close()
            if self.store is not None:
                self.store.abandon()

    def close(self) -> None:
        """Stops reading ahead, and waits for the read in flight. With a store, collective."""
        if not self._closed:
            self._closed = True
            self._ahead.forget()
            self._ahead.close()
            if self.store is not None:
                self.store.close()

    def state_dict(self) -> dict[str, Any]:
        """Returns the position; batches read ahead do not count as used.

        In the loop body for the last batch of an epoch it is the end of the epoch. A loop that
        continues there gets no batch, and does what it does after each epoch.
        """
        return self.sampler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues at another loader's position; see `MeshSampler.load_state_dict`."""
        self.sampler.load_state_dict(state)

    @property
    def epoch(self) -> int:
        """Epoch that the position is in."""
        return self.sampler.epoch

    def batches(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Returns the batches of an epoch, from `start` on."""
        self.sampler.seek(epoch, start)
        return iter(self)

    def __iter__(self) -> Iterator[Batch]:
        """Yields batches from the sampler's position to the end of the epoch."""
        self.preload()
        for plan in self.sampler:
            # Also one without samples: the store saves its blocks after the last one of an epoch.
            read = self._ahead.take(plan)
            if plan.indices or self._training:
                yield self._batch(self._replace_damaged(read))

    # -- reading ahead ----------------------------------------------------------------------

    def start(self) -> None:
        """Starts reading the next batches now, before they are requested."""
        self.preload()
        self._ahead.fill((*self.sampler.next, 0))

    def preload(self, progress: Callable[[int, int], None] | None = None) -> None:
        """Reads the samples of this epoch that no rank holds, if `store_preload` asks for that.

        The first iteration does so, unless it was done before. On all ranks.

        Args:
            progress: is called with the number of batches done, and of all in the epoch.
        """
        if self._is_preloaded or self.store is None:
            return
        self._is_preloaded = True
        self._ahead.forget()
        epoch = self.sampler.next[0]
        groups = self.store.directory.groups
        position = (epoch, 0, 0)
        while position[0] == epoch:
            with phase("reading samples ahead of the first step"):
                self.store.preload(self.sampler.samples_of(groups, *position))
            batch = self.sampler.batch(*position)
            position = self.sampler.after(batch)
            if progress is not None and batch.is_last:
                progress(batch.step + 1, len(self.sampler))

    def change_batch(self, size: int) -> None:
        """Changes the size of the global batch from the next one on; drops what is read ahead.

        On all ranks, between steps.
        """
        self.sampler.sizes.change(self.sampler.position, size)
        self._ahead.forget()

    # -- bad samples ------------------------------------------------------------------------

    def require_few_bad(self, skipped: Mapping[int, str]) -> None:
        """Raises `DataError` if more than `SKIP_LIMIT` of the samples, and more than 1, are bad.

        The loader itself checks those of its own group: groups need not be in step.

        Args:
            skipped: why each bad sample was skipped, such as `skipped` of all groups.
        """
        most = max(1, int(SKIP_LIMIT * len(self.dataset)))
        if len(skipped) > most:
            *_, last = skipped.values()
            raise DataError(
                f"{len(skipped)} of {len(self.dataset)} samples are bad, {most} may be skipped; "
                f"the last: {last}"
            )

    def _replace_damaged(self, read: Read) -> Read:
        """Raises for a bad sample, or replaces it by a good one on all ranks of the group."""
        if read.arrival is not None:
            read.arrival.hand_over(read.inputs, read.targets)
            for n in read.arrival.not_finite():
                read.bad.setdefault(n, self._diagnosed(read.plan, n))
        if self.on_bad_sample == "stop":
            for error in read.bad.values():
                raise error
            return read
        bad = self._agree([n in read.bad for n in range(len(read.plan.indices))])
        for n in (n for n, is_bad in enumerate(bad) if is_bad):
            self._skip(read.plan.indices[n], read.bad.get(n))
            self._replace(read, n)
            read.bad.setdefault(n, BadSample(ELSEWHERE))
        return read

    def _diagnosed(self, plan: GroupBatch, n: int) -> BadSample:
        """Returns the error of a sample in which the device found NaN or infinity."""
        layout = layout_of(self.dataset, self.mesh, plan)
        try:
            self.dataset.read_block(plan.indices[n], block_of(layout))
        except BadSample as error:
            return error
        return BadSample(f"sample {plan.indices[n]} became NaN or infinite on {self.device}")

    def _replace(self, read: Read, n: int) -> None:
        """Reads the next sample that is good on all ranks of the group into position `n`."""
        shape = self.dataset.shape_of(read.plan.indices[0])
        layout = layout_for_sample(self.mesh, (len(read.plan.indices), *shape))
        bad, count = read.plan.indices[n], len(self.dataset)
        for candidate in (*range(bad + 1, count), *range(bad)):
            if self.dataset.shape_of(candidate) != shape:
                continue
            error = None
            try:
                files = self.dataset if self.store is None else self.store.files
                files = in_epoch(files, read.plan.epoch)
                read_sample(files, candidate, layout, read.inputs[n], read.targets[n])
            except BadSample as caught:
                error = caught
            if not self._agree([error is not None])[0]:
                self.replaced += 1
                return
            self._skip(candidate, error)
        raise DataError(f"no good sample can replace a bad one: {self.skipped[bad]}")

    def _skip(self, index: int, error: BadSample | None) -> None:
        self.skipped[index] = str(error) if error else ELSEWHERE
        self.require_few_bad(self.skipped)

    def _agree(self, bad: list[bool]) -> list[bool]:
        """Returns which samples are bad on any rank of the group."""
        flags = torch.tensor(bad, dtype=torch.uint8)
        self.mesh.sample.all_reduce(flags, "max")
        return [bool(flag) for flag in flags.tolist()]

    def _batch(self, read: Read) -> Batch:
        plan = read.plan
        size = len(plan.indices)
        # Made on the device: a copy from the host would block the host until the device is done.
        weight = torch.full(
            (size,), float(plan.count > 0), dtype=self.dataset.dtype, device=self.device
        )
        for n in read.bad:
            weight[n] = 0
        layout = layout_of(self.dataset, self.mesh, plan)
        inputs, targets, flat = read.inputs, read.targets, 3 - self.dims
        if flat:
            layout = without_flat_dims(layout, self.dims)
            inputs = inputs.flatten(1, 1 + flat)
        if self.dataset.labeled:
            targets = targets.flatten(0, flat)
            targets = ShardedTensor.from_local(targets, by_voxel(layout), plan.first_sample)
        return Batch(
            inputs=ShardedTensor.from_local(inputs, layout, plan.first_sample),
            targets=targets,
            weight=weight,
            loss_scale=self._loss_scale(plan),
            **vars(plan),
        )

    def _loss_scale(self, plan: GroupBatch) -> float:
        scale = plan.global_size / plan.step_size
        if not self.sampler.pad:
            return scale
        # A group is weighted by its samples, and a padding sample counts as one there.
        counted = plan.count / max(1, len(plan.indices))
        return scale * counted * max(1.0, self.mesh.data_size / plan.global_size)
