"""Reads this rank's blocks of a batch from a data set into host memory or onto a device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from pydist.data.dataset import BadSample
from pydist.data.device_input import Arrival, DeviceInput
from pydist.data.sampler import GroupBatch
from pydist.errors import UsageError
from pydist.grid import SPATIAL_AXES
from pydist.interop import ArrayLike, as_tensor
from pydist.layout import Layout, layout_for_sample
from pydist.mesh import Mesh
from pydist.partition import Box


class BlockSource(Protocol):
    """The samples that a `Loader` reads by blocks, such as a `ShardDataset`.

    A source may also have `dims`, `bytes_read`, `label_dtype`, `value_range` and `files_state`, as
    a `ShardDataset` has; each has a default where it is missing.
    """

    @property
    def sample_shape(self) -> tuple[int, int, int, int]:
        """Shape (C, D, H, W) that a sample has; the largest extents, where samples differ."""
        ...

    @property
    def num_targets(self) -> int:
        """Number of values that are predicted for each sample."""
        ...

    @property
    def labeled(self) -> bool:
        """Whether targets are the class of each voxel, instead of values of the sample."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Type that samples and targets have."""
        ...

    @property
    def identity(self) -> str:
        """Text that identifies the content; equal on two ranks if they read the same."""
        ...

    def __len__(self) -> int: ...

    def shape_of(self, index: int) -> tuple[int, int, int, int]:
        """Returns the shape (C, D, H, W) of one sample."""
        ...

    def read_block(
        self, index: int, box: Box | None = None, out: Tensor | None = None
    ) -> ArrayLike:
        """Reads a block as `ShardDataset.read_block`; may return any array instead of `out`."""
        ...

    def read_labels(
        self, index: int, box: Box | None = None, out: Tensor | None = None
    ) -> ArrayLike:
        """Reads labels as `ShardDataset.read_labels`, if `labeled`; may return any array."""
        ...

    def target(self, index: int) -> ArrayLike:
        """Returns the target as `ShardDataset.target`; not called if `labeled`."""
        ...


@runtime_checkable
class StoredSource(Protocol):
    """A `BlockSource` whose stored values are copied to a device and normalized there."""

    @property
    def stored_dtype(self) -> torch.dtype:
        """Type that stored values have, as `ShardDataset.stored_dtype`."""
        ...

    def read_stored(self, index: int, box: Box | None, out: Tensor) -> None:
        """Reads a block without normalization, as `ShardDataset.read_stored`."""
        ...

    def normalize(
        self, index: int, first_channel: int, stored: Tensor, out: Tensor, found: Tensor
    ) -> None:
        """Computes the input from stored values, as `ShardDataset.normalize`."""
        ...


@runtime_checkable
class EpochSource(Protocol):
    """A `BlockSource` whose samples change from epoch to epoch."""

    def in_epoch(self, epoch: int) -> BlockSource:
        """Returns the samples as they are in an epoch."""
        ...


def dims_of(source: BlockSource) -> int:
    """Returns the number of spatial dims of samples as networks get them; 3 if it does not say."""
    return int(getattr(source, "dims", 3))


class SourceOver:
    """Facts that a source takes from another one, `dataset`; subclasses read the samples."""

    def __init__(self, dataset: BlockSource) -> None:
        self.dataset = dataset

    @property
    def sample_shape(self) -> tuple[int, int, int, int]:
        """Shape (C, D, H, W) that a sample has; see `BlockSource.sample_shape`."""
        return self.dataset.sample_shape

    @property
    def dims(self) -> int:
        """Number of spatial dims that networks get; see `ShardDataset.dims`."""
        return dims_of(self.dataset)

    @property
    def num_targets(self) -> int:
        """Number of values that are predicted for each sample; see `BlockSource.num_targets`."""
        return self.dataset.num_targets

    @property
    def labeled(self) -> bool:
        """Whether the targets are the class of each voxel; see `BlockSource.labeled`."""
        return self.dataset.labeled

    @property
    def dtype(self) -> torch.dtype:
        """Type that samples and targets have; see `BlockSource.dtype`."""
        return self.dataset.dtype

    @property
    def identity(self) -> str:
        """Text that identifies the data set's content; see `BlockSource.identity`."""
        return self.dataset.identity

    def __len__(self) -> int:
        return len(self.dataset)

    def shape_of(self, index: int) -> tuple[int, int, int, int]:
        """Returns the shape (C, D, H, W) of sample `index`; see `BlockSource.shape_of`."""
        return self.dataset.shape_of(index)


def in_epoch(source: BlockSource, epoch: int) -> BlockSource:
    """Returns the samples of a source as they are in an epoch."""
    return source.in_epoch(epoch) if isinstance(source, EpochSource) else source


def stored_source(source: BlockSource) -> StoredSource | None:
    """Returns a source if its stored values, normalized, are its inputs; else `None`.

    Those of a class that overrides `read_block` alone are not.
    """
    names = {"read_block", "read_stored", "normalize"}
    own = next((found for c in type(source).__mro__ if (found := names & vars(c).keys())), names)
    return source if isinstance(source, StoredSource) and own != {"read_block"} else None


class Read(NamedTuple):
    """Blocks that this rank has of a batch, as the background thread returns them."""

    plan: GroupBatch
    inputs: Tensor
    targets: Tensor
    bad: dict[int, BadSample]
    """Bad samples by position in the group's batch."""
    arrival: Arrival | None
    """The arrival on the device; None for batches in host memory."""
    lent: list[Tensor]
    """Memory of the source, referenced until the arrival: its owner may reuse it afterwards."""


def layout_of(dataset: BlockSource, mesh: Mesh, plan: GroupBatch) -> Layout:
    """Returns the layout of the inputs of a batch.

    Raises:
        UsageError: its samples have different shapes.
    """
    shapes = {dataset.shape_of(index) for index in plan.indices or (0,)}
    if len(shapes) > 1:
        raise UsageError(
            f"a batch of a sample group has samples of {' and '.join(map(str, sorted(shapes)))} "
            "voxels: take batches of one sample a group, or bring the data to one shape"
        )
    return layout_for_sample(mesh, (len(plan.indices), *shapes.pop()))


def by_voxel(layout: Layout) -> Layout:
    """Returns the layout of [N, D, H, W] that matches one of [N, C, D, H, W]."""
    return _of_dims(layout, [d for d in range(len(layout.shape)) if d != 1])


def without_flat_dims(layout: Layout, dims: int) -> Layout:
    """Returns the layout of samples as networks get them, such as images [N, C, H, W].

    Args:
        layout: of [N, C, D, H, W].
        dims: number of spatial dims that are kept.

    Raises:
        UsageError: a dim that is dropped is cut.
    """
    dropped = range(2, 5 - dims)
    if cut := [SPATIAL_AXES[d - 2] for d in dropped if d in layout.split_dims]:
        possible = " and ".join(SPATIAL_AXES[-dims:])
        raise UsageError(
            f"samples of {dims} dims are cut along {possible}; the mesh has several parts along "
            f"{' and '.join(cut)}"
        )
    return _of_dims(layout, [d for d in range(5) if d not in dropped])


def _of_dims(layout: Layout, dims: Sequence[int]) -> Layout:
    return Layout(layout.mesh, [layout.shape[d] for d in dims], [layout.splits[d] for d in dims])


def read_group(
    dataset: BlockSource, mesh: Mesh, plan: GroupBatch, device_input: DeviceInput | None
) -> Read:
    """Reads this rank's blocks of a batch; runs in the background thread.

    Args:
        dataset: the source of samples.
        mesh: determines this rank's blocks.
        plan: the samples.
        device_input: copies blocks to a device; None leaves them in host memory.
    """
    dataset = in_epoch(dataset, plan.epoch)
    layout = layout_of(dataset, mesh, plan)
    if device_input is not None:
        with device_input.queueing():
            return _read_to_device(dataset, layout, plan, device_input)
    inputs = torch.empty(layout.local_shape, dtype=dataset.dtype)
    targets = torch.zeros(_target_shape(dataset, layout), dtype=_target_dtype(dataset))
    bad: dict[int, BadSample] = {}
    for n, index in enumerate(plan.indices):
        try:
            read_sample(dataset, index, layout, inputs[n], targets[n])
        except BadSample as error:
            bad[n] = error
    return Read(plan, inputs, targets, bad, None, [])


def read_sample(
    dataset: BlockSource, index: int, layout: Layout, inputs: Tensor, targets: Tensor
) -> None:
    """Reads this rank's block of one sample and its target into `inputs` and `targets`."""
    on_host = inputs.device.type == "cpu"
    block = dataset.read_block(index, block_of(layout), inputs if on_host else None)
    take_into(block, inputs)
    take_into(_read_target(dataset, index, layout, targets if on_host else None), targets)
    if not on_host:  # queued copies read the source's memory
        torch.cuda.current_stream(inputs.device).synchronize()


def block_of(layout: Layout) -> Box:
    """Returns this rank's block of a sample, in the sample's indices (C, D, H, W)."""
    lo, hi = layout.box.lo, layout.box.hi
    return Box(lo[1:], hi[1:])


def _read_target(dataset: BlockSource, index: int, layout: Layout, out: Tensor | None) -> ArrayLike:
    if dataset.labeled:
        lo, hi = layout.box.lo, layout.box.hi
        return dataset.read_labels(index, Box(lo[2:], hi[2:]), out)
    return dataset.target(index)


def take_into(array: ArrayLike, out: Tensor) -> list[Tensor]:
    """Copies a source's array into `out`, unless the array is `out`.

    Returns:
        The source's memory, if the copy is only queued; a copy from pageable memory is complete.

    Raises:
        UsageError: it has another shape.
    """
    if array is out:
        return []
    given = as_tensor(array)
    if [n for n in given.shape if n != 1] != [n for n in out.shape if n != 1]:
        raise UsageError(
            f"the data set returned an array of shape {tuple(given.shape)} for a block or target "
            f"of {tuple(out.shape)}"
        )
    out.copy_(given.reshape(out.shape), non_blocking=True)
    return [given] if given.is_cuda or (out.is_cuda and given.is_pinned()) else []


def _target_shape(dataset: BlockSource, layout: Layout) -> tuple[int, ...]:
    if dataset.labeled:
        return by_voxel(layout).local_shape
    return layout.shape[0], dataset.num_targets


def _target_dtype(dataset: BlockSource) -> torch.dtype:
    return torch.int64 if dataset.labeled else dataset.dtype


def _read_to_device(
    dataset: BlockSource, layout: Layout, plan: GroupBatch, through: DeviceInput
) -> Read:
    """Reads blocks one by one into pinned memory, and queues their copy and normalization."""
    on_device: dict[str, Any] = {"device": through.device}
    inputs = torch.empty(
        layout.local_shape, dtype=dataset.dtype, memory_format=through.memory_format, **on_device
    )
    shape, dtype = _target_shape(dataset, layout), _target_dtype(dataset)
    targets = torch.zeros(shape, dtype=dtype, **on_device)
    found = torch.zeros(len(plan.indices), dtype=torch.int32, **on_device)
    bad: dict[int, BadSample] = {}
    lent: list[Tensor] = []
    for n, index in enumerate(plan.indices):
        try:
            box = block_of(layout)
            lent += _send_block(dataset, index, box, through, inputs[n], found[n : n + 1])
            staged = through.staging(shape[1:], dtype)
            lent += take_into(_read_target(dataset, index, layout, staged), staged)
            through.send(staged, targets[n])
        except BadSample as error:
            bad[n] = error
    return Read(plan, inputs, targets, bad, through.arrival(found), lent)


def _send_block(
    dataset: BlockSource, index: int, box: Box, through: DeviceInput, inputs: Tensor, found: Tensor
) -> list[Tensor]:
    """Queues the copy of a block to the device; returns the source's memory that it reads."""
    if (source := stored_source(dataset)) is not None:
        stored = through.staging(inputs.shape, source.stored_dtype)
        source.read_stored(index, box, stored)
        source.normalize(index, box.lo[0], through.send(stored), inputs, found)
        return []
    staged = through.staging(inputs.shape, inputs.dtype)
    block = dataset.read_block(index, box, staged)
    if block is staged:
        through.send(staged, inputs)
        return []
    return take_into(block, inputs)  # the source's own array, which may be on the device already
