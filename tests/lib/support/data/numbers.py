"""A source of samples whose values tell which voxel of which sample they are."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pydist.comm import run_local
from pydist.data import BadSample, Batch
from pydist.partition import Box


class Numbers:
    """Source of samples that all differ: a voxel of sample i holds i + its linear index / 1000."""

    sample_shape = (1, 4, 3, 5)
    num_targets = 2
    labeled = False
    dtype = torch.float64
    identity = "numbers"

    def __init__(
        self, size: int, delay: float = 0, bad: dict[int, Box | None] | None = None
    ) -> None:
        self.size, self.delay, self.bad = size, delay, bad or {}
        self.reads: list[int] = []

    def __len__(self) -> int:
        return self.size

    def shape_of(self, index: int) -> tuple[int, int, int, int]:
        return self.sample_shape

    def whole(self, index: int) -> Tensor:
        return index + torch.arange(60, dtype=torch.float64).reshape(self.sample_shape) / 1000

    def read_block(self, index: int, box: Box | None = None, out: Tensor | None = None) -> Tensor:
        time.sleep(self.delay)
        self.reads.append(index)
        assert box is not None
        assert out is not None
        if index in self.bad:
            where = self.bad[index]
            if where is None or not where.intersect(box).empty:
                raise BadSample(f"numbers: sample {index} is bad")
        out.copy_(self.whole(index)[tuple(slice(*b) for b in zip(box.lo, box.hi, strict=True))])
        return out

    def target(self, index: int) -> Tensor:
        return torch.tensor([index, -index], dtype=torch.float64)


def on_ranks(ranks: int, job: Callable[..., object], *args: object) -> list[Any]:
    return run_local(job, ranks, *args, timeout=60)


def seen(batch: Batch, dataset: Numbers) -> list[int]:
    """Returns the samples of a batch after checking its tensors against them."""
    full = batch.inputs.full_tensor()
    for n, index in enumerate(batch.indices):
        assert torch.equal(full[n], dataset.whole(index))
        assert torch.equal(batch.targets[n], dataset.target(index))
    assert batch.inputs.shape == (len(batch.indices), *dataset.sample_shape)
    assert batch.inputs._origin.sizes.first_sample == batch.first_sample
    return list(batch.indices)


# -- what is read -----------------------------------------------------------------------------
