"""This rank's blocks of a batch, from a data set to host memory or to a device."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from pydist.data.dataset import BadSample
from pydist.data.device_input import Arrival, DeviceInput
from pydist.data.sampler import GroupBatch
from pydist.errors import UsageError
from pydist.interop import ArrayLike, as_tensor
from pydist.layout import Layout, layout_for_sample
from pydist.mesh import Mesh
from pydist.partition import Box


class BlockSource(Protocol):
    """What a `Loader` reads from; `ShardDataset` is one."""

    @property
    def sample_shape(self) -> tuple[int, int, int, int]:
        """(C, D, H, W) of one sample; the largest extents, where samples differ."""
        ...

    @property
    def num_targets(self) -> int:
        """Values to predict for each sample."""
        ...

    @property
    def labelled(self) -> bool:
        """Whether the class of each voxel is to be predicted, instead of values of the sample."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Of samples and targets."""
        ...

    @property
    def identity(self) -> str:
        """What the content depends on; equal on two ranks if they read the same."""
        ...

    def __len__(self) -> int: ...

    def shape_of(self, index: int) -> tuple[int, int, int, int]:
        """(C, D, H, W) of one sample."""
        ...

    def read_block(
        self, index: int, box: Box | None = None, out: Tensor | None = None
    ) -> ArrayLike:
        """See `ShardDataset.read_block`. May return any array instead of filling `out`."""
        ...

    def read_labels(
        self, index: int, box: Box | None = None, out: Tensor | None = None
    ) -> ArrayLike:
        """See `ShardDataset.read_labels`; only called if `labelled`. May return any array."""
        ...

    def target(self, index: int) -> ArrayLike:
        """See `ShardDataset.target`; only called if not `labelled`."""
        ...


@runtime_checkable
class StoredSource(Protocol):
    """A `BlockSource` whose stored values travel to a device and become the input there."""

    @property
    def stored_dtype(self) -> torch.dtype:
        """See `ShardDataset.stored_dtype`."""
        ...

    def read_stored(self, index: int, box: Box | None, out: Tensor) -> None:
        """See `ShardDataset.read_stored`."""
        ...

    def normalize(
        self, index: int, first_channel: int, stored: Tensor, out: Tensor, found: Tensor
    ) -> None:
        """See `ShardDataset.normalize`."""
        ...


class Read(NamedTuple):
    """What the background thread hands over."""

    plan: GroupBatch
    inputs: Tensor
    targets: Tensor
    bad: dict[int, BadSample]
    """By position in the group's batch."""
    arrival: Arrival | None
    """When it will be on the device, if that is where it goes."""
    lent: list[Tensor]
    """Memory of the source that is read until then; its owner may fill it again when it goes."""


def layout_of(dataset: BlockSource, mesh: Mesh, plan: GroupBatch) -> Layout:
    """Where the inputs of a batch lie.

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
    """The layout of [N, D, H, W] beside [N, C, D, H, W]."""
    without_channels = [0, 2, 3, 4]
    return Layout(
        layout.mesh,
        [layout.shape[d] for d in without_channels],
        [layout.splits[d] for d in without_channels],
    )


def read_group(
    dataset: BlockSource, mesh: Mesh, plan: GroupBatch, device_input: DeviceInput | None
) -> Read:
    """Reads this rank's blocks of a batch; runs in the background.

    Args:
        dataset: what to read from.
        mesh: says which blocks.
        plan: which samples.
        device_input: brings them to a device; None leaves them in host memory.
    """
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
    """Reads this rank's block of one sample, and what to predict of it, to where they lie."""
    on_host = inputs.device.type == "cpu"
    block = dataset.read_block(index, block_of(layout), inputs if on_host else None)
    _keep(block, inputs)
    _keep(_read_target(dataset, index, layout, targets if on_host else None), targets)
    if not on_host:  # what the source gave is read until then
        torch.cuda.current_stream(inputs.device).synchronize()


def block_of(layout: Layout) -> Box:
    """This rank's block of a sample, in its indices (C, D, H, W)."""
    lo, hi = layout.box.lo, layout.box.hi
    return Box(lo[1:], hi[1:])


def _read_target(dataset: BlockSource, index: int, layout: Layout, out: Tensor | None) -> ArrayLike:
    if dataset.labelled:
        lo, hi = layout.box.lo, layout.box.hi
        return dataset.read_labels(index, Box(lo[2:], hi[2:]), out)
    return dataset.target(index)


def _keep(array: ArrayLike, out: Tensor) -> list[Tensor]:
    """Puts what a source gave into `out`, unless it is there.

    Returns:
        The source's memory, where the copy is only queued; from pageable memory it is not.
    """
    if array is out:
        return []
    given = as_tensor(array)
    out.copy_(given, non_blocking=True)
    return [given] if given.is_cuda or (out.is_cuda and given.is_pinned()) else []


def _target_shape(dataset: BlockSource, layout: Layout) -> tuple[int, ...]:
    if dataset.labelled:
        return by_voxel(layout).local_shape
    return layout.shape[0], dataset.num_targets


def _target_dtype(dataset: BlockSource) -> torch.dtype:
    return torch.int64 if dataset.labelled else dataset.dtype


def _read_to_device(
    dataset: BlockSource, layout: Layout, plan: GroupBatch, through: DeviceInput
) -> Read:
    """Reads the blocks into pinned memory in turn, and queues what makes inputs of them."""
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
            lent += _keep(_read_target(dataset, index, layout, staged), staged)
            through.send(staged, targets[n])
        except BadSample as error:
            bad[n] = error
    return Read(plan, inputs, targets, bad, through.arrival(found), lent)


def _send_block(
    dataset: BlockSource, index: int, box: Box, through: DeviceInput, inputs: Tensor, found: Tensor
) -> list[Tensor]:
    """Queues the way of a block to the device; returns the source's memory that is read on it."""
    if isinstance(dataset, StoredSource):
        stored = through.staging(inputs.shape, dataset.stored_dtype)
        dataset.read_stored(index, box, stored)
        dataset.normalize(index, box.lo[0], through.send(stored), inputs, found)
        return []
    staged = through.staging(inputs.shape, inputs.dtype)
    block = dataset.read_block(index, box, staged)
    if block is staged:
        through.send(staged, inputs)
        return []
    return _keep(block, inputs)  # an array of the source's own, perhaps on the device already
