"""Opens the data sets of a run, and makes their loaders, from its configuration."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from pydist.batch_layers import norms_by_input
from pydist.data import Augmented, Manifest, MpiIo, ShardDataset
from pydist.data.axes import without_flat
from pydist.data.batch_sizes import BatchSizes, PassRule
from pydist.data.loader import Loader
from pydist.data.store.options import StoreOptions
from pydist.errors import UsageError
from pydist.parsing import byte_count
from pydist.train.device import choose_device, memory_format

if TYPE_CHECKING:
    from torch import nn

    from pydist.train.config import Config
    from pydist.train.job import Job
    from pydist.train.tasks import Task


def open_datasets(config: Config, task: Task) -> tuple[ShardDataset, ShardDataset | None]:
    """Opens the training set, and the validation set if there is one."""
    wanted = config.data
    manifest = Manifest.load(wanted.path)
    # First: if normalization does not fit, usually the network does not fit either.
    _checked(config, task, manifest)

    def normalized(split: str) -> ShardDataset:
        return ShardDataset(
            wanted.path,
            split,
            normalize=wanted.normalize,
            window=wanted.window,
            manifest=manifest,
            ignore_label=config.train.ignore_label,
            driver=MpiIo() if wanted.mpi_io else None,
            untrusted=wanted.untrusted,
            allow_roots=wanted.allow_roots,
        )

    return normalized("train"), normalized("val") if "val" in manifest.splits else None


def shape_in_training(config: Config, task: Task, manifest: Manifest) -> tuple[int, int, int, int]:
    """Returns the shape (C, D, H, W) that a sample has in training: that of the crop, if any.

    Raises:
        UsageError: the network does not accept the samples or the crop, or one is smaller than it.
    """
    return Augmented(_checked(config, task, manifest), config.data.augment).sample_shape


def _checked(config: Config, task: Task, manifest: Manifest) -> ShardDataset:
    """Returns the training set, not normalized, after checking that the network accepts it."""
    data = ShardDataset(config.data.path, "train", normalize="none", manifest=manifest)
    task.check(data)
    crop, multiple = config.data.augment.crop, task.multiple
    if crop is not None:
        _, *extents = without_flat((1, *crop), manifest.dims)
        if multiple is None or any(n % multiple for n in extents):
            possible = "whole samples" if multiple is None else f"multiples of {multiple}"
            raise UsageError(f"data.augment.crop = {list(crop)}: the network accepts {possible}")
    return data


def store_options(
    config: Config, data: ShardDataset, validation: ShardDataset | None
) -> tuple[StoreOptions, StoreOptions]:
    """Divides the store's memory and disk between training and validation set, by their voxels.

    Returns:
        The options for each of them on one rank.
    """
    options = config.data.store_options
    # A single validation, at the end, gains nothing by a store.
    if options.store == "off" or validation is None or not config.train.validate_every:
        return options, StoreOptions()
    of_data, of_validation = (
        sum(math.prod(each.shape_of(index)) for index in range(len(each)))
        for each in (data, validation)
    )
    memory, disk = (
        _divided(size, of_data, of_validation)
        for size in (config.data.store_memory, config.data.store_disk)
    )
    return (
        replace(options, store_memory=memory[0], store_disk=disk[0]),
        replace(options, store_memory=memory[1], store_disk=disk[1]),
    )


def _divided(size: str | None, one: int, other: int) -> tuple[int, int] | tuple[None, None]:
    """Divides a size in proportion to two numbers; None is no limit."""
    if size is None:
        return None, None
    limit = byte_count(size)
    first = max(1, limit * one // (one + other))
    return first, max(1, limit - first)


def make_loader(
    config: Config,
    data: ShardDataset,
    job: Job,
    store: StoreOptions | None = None,
    validated: nn.Module | None = None,
) -> Loader:
    """Creates the loader of a data set, on the device of the network. Collective.

    Args:
        config: the configuration.
        data: the data set.
        job: the ranks.
        store: its store on this rank, see `store_options`; by default there is none.
        validated: the network, if it is the validation set; by default it is the training set.
    """
    device = choose_device(config.train.device, job.world)
    augment = config.data.augment
    training = validated is None
    augmented = training and augment.changes
    batch: int | BatchSizes
    if validated is None:
        batch = batch_sizes(config, len(data))
    else:
        batch = config.train.batch if _batches(data, validated) else job.mesh.data_size
    return Loader(
        Augmented(data, augment, config.train.seed) if augmented else data,
        job.mesh,
        batch,
        training=training,
        prefetch=config.data.prefetch,
        readers=config.data.readers,
        on_bad_sample=config.data.on_bad_sample,
        device=device,
        memory_format=memory_format(config.train, device),
        pad=False,  # the networks accept empty batches
        passes=pass_rule(config) if training else None,
        divide=job.stages is None,
        **vars(store or StoreOptions()),
    )


def _batches(data: ShardDataset, network: nn.Module) -> bool:
    """Returns whether a sample group may validate several samples at a time.

    Not if they have several shapes, which only a crop brings to one, nor if batch norm mixes them:
    then the result would depend on the groups.
    """
    if any(map(norms_by_input, network.modules())):
        return False
    return len({data.shape_of(index) for index in range(len(data))}) == 1


def check_one_sample(network: nn.Module, data: ShardDataset) -> None:
    """Checks before the first step that a network which norms by its input validates one sample.

    Args:
        network: the plain network; a copy of it is run on shapes.
        data: the validation set.

    Raises:
        UsageError: a batch norm without running statistics gets one value of each channel.
    """
    if not any(map(norms_by_input, network.modules())):
        return
    with torch.device("meta"), torch.no_grad():
        try:
            plain = copy.deepcopy(network).to("meta").eval()
            plain(torch.empty(1, *without_flat(data.shape_of(0), data.dims)))
        except Exception as error:  # a user's network may raise anything, also for want of values
            if "more than 1 value per channel" in str(error):
                raise UsageError(
                    "a batch norm with track_running_stats=False gets one value per channel of a "
                    "sample, and validation norms each sample by itself: give it running "
                    "statistics, or leave out the validation set"
                ) from error


def batch_sizes(config: Config, epoch: int) -> BatchSizes:
    """Returns the sizes of the global batch in a run.

    Args:
        config: the configuration.
        epoch: samples of the data set.

    Raises:
        UsageError: two milestones are at the same sample.
    """
    planned = config.train.batch_schedule
    changes = [(planned.samples(place, epoch), size) for place, size in planned.milestones]
    return BatchSizes(config.train.batch, changes)


def pass_rule(config: Config) -> PassRule:
    """Returns the rule for the passes of a step; in stages, for its micro-batches."""
    train = config.train
    planned = train.batch_schedule
    first = train.accumulate if config.mesh.stages is None else config.mesh.micro_batches
    return PassRule(train.batch, min(first, train.batch), planned.by, planned.largest_pass)
