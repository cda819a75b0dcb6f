"""The messages between two stages: their routes, and what they say of a tensor or of an end."""

from __future__ import annotations

import json
from typing import NamedTuple
from zlib import crc32

import torch

from pydist.errors import RankFailed
from pydist.layout import Split
from pydist.partition import Partition
from pydist.stages.ranks import MOST_STAGES

FORWARD, BACKWARD = 0, 1
"""Directions of messages: tensors and gradients."""


class Route(NamedTuple):
    """Route that a tensor takes between two stages of a micro-batch, and their meshes.

    Attributes:
        source: the stage that has the tensor.
        target: the stage that needs it.
        sender: the mesh of the source.
        receiver: the mesh of the target.
    """

    source: int
    target: int
    sender: int
    receiver: int

    @property
    def is_local(self) -> bool:
        """Whether both stages are on one mesh."""
        return self.sender == self.receiver

    def tag(self, direction: int) -> int:
        """Returns the tag of the route's messages, as several routes may join the same ranks."""
        return 2 * (MOST_STAGES * self.source + self.target) + direction


class PassMark(NamedTuple):
    """What the stages must have in common when a tensor goes from one to another.

    Attributes:
        number: of the forward pass.
        batch: checksum of the beginnings of the batch's plain tensors.
        calls: running checksum of the calls of the pass. One rank alone may make another call, as
            to print a mean: from then on a call's number in its module is another one there.
    """

    number: int
    batch: int
    calls: int

    def after(self, call: str) -> PassMark:
        """Returns the mark after a call."""
        return self._replace(calls=crc32(call.encode(), self.calls))

    def to_bytes(self) -> bytes:
        """Returns the mark as a message of `MARK_BYTES`."""
        return b"".join(each.to_bytes(8, "little") for each in self)

    @staticmethod
    def from_bytes(message: bytes) -> PassMark:
        """Returns the mark that a message describes."""
        numbers = (message[i : i + 8] for i in range(0, MARK_BYTES, 8))
        return PassMark(*(int.from_bytes(each, "little") for each in numbers))


MARK_BYTES = 24
STOP = b"stop "
"""What a message has in the place of a tensor's spec if its sender has stopped the batch."""
END = 1
"""Tag of the messages by which meshes say that they have made all passes of a batch, or stopped: no
route begins and ends at stage 0, whose gradients would have it."""
STOPPED = -1
"""Says the same in the place of whether a gradient exists."""


class StageStopped(RankFailed):
    """Another mesh has raised in a batch, and sends no more of it.

    Args:
        mesh: the mesh.
        reason: its error.
    """

    def __init__(self, mesh: int, reason: bytes) -> None:
        super().__init__(
            f"mesh {mesh} of the stages has stopped this batch, and the same passes raise nothing "
            f"here: {reason.decode()}"
        )


class TensorSpec(NamedTuple):
    """What a receiver must know of a tensor.

    Attributes:
        call: the call that uses it, for errors.
        shape: the global shape.
        dtype: the type of its elements.
        splits: of its layout on the sending stage; `None` if it is plain.
        needs_grad: whether its gradient is sent back.
        channels_last: whether it is sent, and received, in this format.
        dims: number of spatial dims of the network.
    """

    call: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    splits: tuple[Split | None, ...] | None
    needs_grad: bool
    channels_last: bool
    dims: int

    def to_bytes(self) -> bytes:
        """Returns the spec as a message."""
        splits = self.splits and [s and [s.axes, list(s.partition.points)] for s in self.splits]
        dtype = str(self.dtype).removeprefix("torch.")
        rest = self.needs_grad, self.channels_last, self.dims
        return json.dumps([self.call, self.shape, dtype, splits, *rest]).encode()

    @staticmethod
    def from_bytes(message: bytes) -> TensorSpec:
        """Returns the spec that a message describes."""
        call, shape, dtype, splits, *rest = json.loads(message)
        found = None
        if splits is not None:
            found = tuple(s and Split(tuple(s[0]), Partition(s[1])) for s in splits)
        return TensorSpec(call, tuple(shape), getattr(torch, dtype), found, *rest)
