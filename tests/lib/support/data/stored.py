"""A source of samples in memory that counts its reads, for tests of the sample store."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pydist import ShardedTensor
from pydist.data import BadSample, Batch
from pydist.partition import Box

SHAPES = ((2, 5, 3, 4), (2, 3, 6, 4), (2, 4, 4, 4))


class Stored:
    """Samples of int16, whose inputs are their values divided by 3, with values or labels.

    Args:
        count: number of samples.
        labeled: whether each voxel has a class.
        mixed: whether the samples have three different shapes.
        bad: samples whose reads fail.
        poor: samples with a value that is not finite.
    """

    num_targets = 2
    dtype = torch.float32
    stored_dtype = torch.int16

    def __init__(
        self,
        count: int,
        *,
        labeled: bool = False,
        mixed: bool = False,
        bad: Sequence[int] = (),
        poor: Sequence[int] = (),
    ) -> None:
        self.count, self.labeled = count, labeled
        self.bad, self.poor = set(bad), set(poor)
        self.shapes = SHAPES if mixed else SHAPES[:1]
        self.sample_shape = (2, *np.max([shape[1:] for shape in self.shapes], axis=0).tolist())
        self.identity = f"{count} stored samples"
        self.reads: Counter[int] = Counter()
        """Reads of blocks by sample."""
        self.bytes_read = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self.count

    def shape_of(self, index: int) -> tuple[int, int, int, int]:
        return self.shapes[index % len(self.shapes)]

    def values(self, index: int) -> Tensor:
        shape = self.shape_of(index)
        each = np.arange(np.prod(shape), dtype=np.int16).reshape(shape) + np.int16(257 * index)
        if index in self.poor:
            each[0, 0, 0, 0] = -1
        return torch.from_numpy(each)

    def read_stored(self, index: int, box: Box | None, out: Tensor) -> None:
        with self._lock:
            self.reads[index] += 1
            self.bytes_read += out.nbytes
        if index in self.bad:
            raise BadSample(f"stored: sample {index} is bad")
        assert box is not None
        out.copy_(self.values(index)[box.slices])

    def normalize(
        self, index: int, first_channel: int, stored: Tensor, out: Tensor, found: Tensor
    ) -> None:
        torch.div(stored, 3, out=out)
        found.fill_(int((stored < 0).any()))

    def read_block(self, index: int, box: Box | None = None, out: Tensor | None = None) -> Tensor:
        assert out is not None
        stored = torch.empty(out.shape, dtype=torch.int16)
        self.read_stored(index, box, stored)
        found = torch.zeros(1, dtype=torch.int32)
        self.normalize(index, 0, stored, out, found)
        if found:
            raise BadSample(f"stored: sample {index} has a bad value")
        return out

    def read_labels(self, index: int, box: Box | None = None, out: Tensor | None = None) -> Tensor:
        assert box is not None
        return (self.values(index)[0].long() % 7)[box.slices]

    def target(self, index: int) -> Tensor:
        return torch.tensor([index / 7, -index], dtype=torch.float32)


def local_of(values: Tensor | ShardedTensor) -> Tensor:
    """Returns this rank's part of inputs or targets; all of plain ones."""
    return values.to_local() if isinstance(values, ShardedTensor) else values


def seen(batch: Batch) -> tuple[Any, ...]:
    """Returns all of a batch as plain values, bit by bit."""
    inputs, targets = local_of(batch.inputs), local_of(batch.targets)
    return (
        tuple(inputs.shape), inputs.numpy().tobytes(), tuple(targets.shape),
        targets.numpy().tobytes(), batch.weight.tolist(), batch.indices, batch.count,
        batch.first_sample, batch.global_size, batch.loss_scale, batch.epoch, batch.step,
        batch.part, batch.parts, batch.is_last, batch.ends_epoch,
    )  # fmt: skip
