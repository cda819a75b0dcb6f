"""A single rank of a split run, without its neighbors or with streams that simulate them.

This shows on one device what one rank of many does. Shapes, kernels and bookkeeping are those of
the split run; values are not: neighbors send zeros, or return what they received.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from gpu import Stopwatch
from silenced_transport import clear_comparison, stamp
from torch import Tensor

from pydist.backend.autotuner import Autotuner, Subject
from pydist.comm import Channel, Transport, Work
from pydist.comm.interface.checks import check_elements
from pydist.profile import gathering


@contextmanager
def choosing_alone() -> Iterator[None]:
    """Makes kernel choices and profiles depend on this rank only, as the others do not exist.

    The times are not cached.
    """
    own = mock.patch.object(gathering, "_gather", lambda world, text: [text] * world.size)
    with mock.patch.object(Autotuner, "choose", _choose), own:
        yield


def _choose(
    _: Autotuner,
    group: Transport,
    subjects: Sequence[Sequence[Subject]],
    visit: Callable[[str, str], float],
    pick: Callable[[Mapping[str, Mapping[str, float]]], Sequence[Any]],
    is_possible: Callable[[Sequence[Any]], bool],
    learns: bool,
) -> tuple[Any, bool]:
    """Replaces `Autotuner.choose`, with this rank's times for all ranks of the group."""
    if not learns:
        return None, False
    times = {
        each.key: {name: visit(each.key, name) for name in each.candidates}
        for each in subjects[group.rank]
    }
    mine = {name: seconds for found in times.values() for name, seconds in found.items()}
    for others in subjects:
        for each in others:
            times.setdefault(each.key, {name: mine.get(name, 1.0) for name in each.candidates})
    return pick(times)[group.rank], True


class LoneRank(Transport):
    """Transport that runs one rank of a group alone, split along one axis of the mesh.

    Args:
        rank: this rank.
        size: size of the group.
    """

    name = "alone"

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def split(self, color: int, key: int) -> Transport:
        """Returns a group of one; a mesh split along one axis needs it besides the full group."""
        return LoneRank(0, 1)

    def _subgroup(self, members: Sequence[int]) -> Transport:
        raise NotImplementedError("groups come from `split`")

    def _check(self, call: str, tensor: Tensor, *, strided: bool = False) -> None:
        check_elements(call, tensor, strided=strided)

    def _channel(
        self, sends: Sequence[tuple[int, Tensor]], recvs: Sequence[tuple[int, Tensor]], tag: int
    ) -> Channel:
        for _, buffer in recvs:
            buffer.zero_()
        return _Nothing(self, [buffer for _, buffer in recvs])

    def _send(self, tensor: Tensor, dest: int, tag: int) -> None:
        """Does nothing: no other rank exists."""

    def _recv(self, tensor: Tensor, source: int, tag: int) -> None:
        tensor.zero_()

    def _barrier(self) -> None:
        """Does nothing: no other rank is late."""

    def _broadcast(self, tensor: Tensor, root: int) -> None:
        """Does nothing: the root's value is the same."""

    def _all_gather(self, tensor: Tensor, out: Tensor) -> None:
        out.copy_(tensor.expand_as(out))

    def _all_gather_async(self, tensor: Tensor, parts: Sequence[Tensor], out: Tensor) -> Work:
        if tensor.dtype != torch.int64:
            return super()._all_gather_async(tensor, parts, out)
        for part in parts:  # compared values are equal on all ranks
            part.copy_(tensor)
        return Work()

    def _all_to_all_async(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Work:
        for peer, each in enumerate(outputs):
            if peer != self.rank:
                each.zero_()
        return Work()

    def _all_reduce(self, tensor: Tensor, op: Any) -> None:
        """Adds zeros of all other ranks, which agree with this rank."""
        clear_comparison(tensor, op)

    def _all_reduce_async(self, tensor: Tensor, op: Any) -> Work:
        return Work()

    def abort(self, reason: str, exit_code: int) -> None:
        """Does nothing: no other rank exists."""


class Neighbors(LoneRank):
    """Transport with neighbors simulated by streams, which return sent messages over a link.

    Args:
        rank: this rank.
        size: size of the group.
        device: device of the tensors.
        bytes_per_s: bandwidth of the link in each direction.
        latency: seconds before the first byte of a message.
    """

    def __init__(
        self, rank: int, size: int, device: torch.device, bytes_per_s: float, latency: float = 5e-6
    ) -> None:
        super().__init__(rank, size)
        self.device, self.bytes_per_s, self.latency = device, bytes_per_s, latency
        self.watch = Stopwatch(device)
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def _channel(
        self, sends: Sequence[tuple[int, Tensor]], recvs: Sequence[tuple[int, Tensor]], tag: int
    ) -> Channel:
        return _Echo(self, [each for _, each in sends], [each for _, each in recvs])


class _Nothing(Channel):
    def __init__(self, owner: Transport, received: list[Tensor]) -> None:
        self._owner, self._received = owner, received

    def start(self) -> None:
        """Stamps the buffers; sends nothing."""
        stamp(self._owner.ledger, self._received)

    def wait(self) -> None:
        """Does nothing: no message arrives."""


class _Echo(Channel):
    def __init__(self, owner: Neighbors, sent: list[Tensor], received: list[Tensor]) -> None:
        self._owner, self._sent, self._received = owner, sent, received
        if owner.stream is not None:
            self.stream = owner.stream.cuda_stream
        # Both directions work at the same time, and each neighbor has its own link.
        most = max([each.nbytes for each in (*sent, *received)], default=0)
        self._seconds = owner.latency + most / owner.bytes_per_s
        for each in received:
            each.zero_()

    def start(self) -> None:
        """Sends the messages after the work on the current stream."""
        stream = self._owner.stream
        if stream is None:
            self._copy()
            stamp(self._owner.ledger, self._received)
            return
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._owner.watch.sleep(self._seconds)
            self._copy()

    def wait(self) -> None:
        """Makes the current stream wait for the messages."""
        if self._owner.stream is not None:
            torch.cuda.current_stream().wait_stream(self._owner.stream)

    def _copy(self) -> None:
        for sent, received in zip(self._sent, self._received, strict=False):
            count = min(sent.numel(), received.numel())
            received.view(-1)[:count].copy_(sent.view(-1)[:count])
