"""The memory of one stored block, which is also the message that carries it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from pydist.errors import DoesNotFit, out_of_memory

_ALIGNED = 64
"""Bytes: parts of an entry begin at multiples, as for vector instructions and any dtype."""


class EntryFormat:
    """Format that places a block, its targets and a mark in one piece of memory.

    Args:
        shape: [C, D, H, W] of the block.
        dtype: of the block's values.
        targets_shape: [D, H, W] of the block's labels, or [T] of the sample's values.
        targets_dtype: of the labels or values.
    """

    def __init__(
        self,
        shape: Sequence[int],
        dtype: torch.dtype,
        targets_shape: Sequence[int],
        targets_dtype: torch.dtype,
    ) -> None:
        self.shape, self.dtype = tuple(shape), dtype
        self.targets_shape, self.targets_dtype = tuple(targets_shape), targets_dtype
        self.block_bytes = math.prod(self.shape) * dtype.itemsize
        self.targets_bytes = math.prod(self.targets_shape) * targets_dtype.itemsize
        self.targets_at = _aligned(self.block_bytes)
        self.mark_at = self.targets_at + self.targets_bytes
        self.nbytes = _aligned(self.mark_at + 1)
        """Bytes of an entry."""


class Entry:
    """One block with its labels or target, and whether all of it could be read.

    Args:
        format: places of the parts.
        memory: uint8, of the format's bytes; by default new memory without content.

    Raises:
        DoesNotFit: there is no memory left.

    Attributes:
        memory: what is sent to another rank.
    """

    def __init__(self, format: EntryFormat, memory: Tensor | None = None) -> None:
        if memory is None:
            memory = _allocate(format.nbytes)
            memory[format.mark_at] = 0
        self.memory, self._format = memory, format

    # Views are made at their first use: an entry that is sent needs none, and each costs as much as
    # a system call.

    @cached_property
    def block(self) -> Tensor:
        """Block that views the memory as [C, D, H, W]."""
        form = self._format
        return self.memory[: form.block_bytes].view(form.dtype).view(form.shape)

    @cached_property
    def targets(self) -> Tensor:
        """Labels, [D, H, W], or values, [T], that view the memory."""
        form = self._format
        targets = self.memory[form.targets_at : form.targets_at + form.targets_bytes]
        return targets.view(form.targets_dtype).view(form.targets_shape)

    @property
    def is_good(self) -> bool:
        """Whether block and targets were read, and hold no bad value that the reader found."""
        return bool(self.memory[self._format.mark_at])

    def approve(self) -> None:
        """Makes `is_good` true."""
        self.memory[self._format.mark_at] = 1


def copy(source: Tensor, out: Tensor) -> None:
    """Copies values into host memory; without torch's threads, as background threads must."""
    if source.is_cuda or torch.bfloat16 in (source.dtype, out.dtype):  # NumPy has neither
        out.copy_(source)
    else:
        out.numpy()[...] = source.numpy()


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNED) * _ALIGNED


def _allocate(nbytes: int) -> Tensor:
    try:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        raise DoesNotFit(
            f"the sample store found no memory for a block of {nbytes:,} bytes; store_memory limits"
            " what it holds, and the rest is read from files"
        ) from error
