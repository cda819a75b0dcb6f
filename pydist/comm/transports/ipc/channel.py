"""Exchanges halos by copies into the device memory of other ranks.

The native channel (`csrc/comm/ipc/channel.hpp`) enqueues the copies and the flags on a stream. In
this module the ranks exchange the target addresses, once per channel, over the host's transport.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from pydist._loader import native
from pydist.comm.interface.handles import Channel
from pydist.comm.interface.transport import Transport
from pydist.comm.transports.nccl.device import as_messages
from pydist.errors import RankLost


class IpcLinks:
    """State that the channels of a group of ranks share.

    Args:
        group: the ranks and their stream.
        offers: connects the same ranks, in host memory, and carries nothing else.
        device: the device of all tensors.
        seconds: the time limit for a peer to reach its first exchange with this rank.
    """

    def __init__(
        self, group: native.IpcGroup, offers: Transport, device: torch.device, seconds: float
    ) -> None:
        self.group, self.offers, self.device = group, offers, device
        self.lock = threading.RLock()  # autograd's threads and the caller take turns
        self._seconds = seconds
        self._first: _FirstRound | None = None  # may not be enqueued yet

    def queue(self) -> int:
        """Returns the handle of the caller's current stream."""
        return int(torch.cuda.current_stream(self.device).cuda_stream)

    def capturing(self) -> bool:
        """Returns whether the caller's current stream is capturing a graph."""
        return torch.cuda.is_current_stream_capturing()

    def keep(self, tensor: Tensor) -> None:
        """Tells the allocator that the group's stream uses the tensor's memory."""
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.ExternalStream(self.group.stream, device=self.device))

    def begin(self, first: _FirstRound) -> None:
        """Enqueues an exchange as soon as the offers of its peers have arrived."""
        self._first = first
        first.thread.start()
        if self.capturing():  # two threads may not add to one graph at a time
            self.settle()

    def settle(self) -> None:
        """Returns when the pending first round is enqueued, which must precede all else.

        Raises:
            RankLost: a peer has not reached it within the time limit.
        """
        first, self._first = self._first, None
        if first is None:
            return
        first.thread.join(self._seconds)
        if first.thread.is_alive():
            first.failure = RankLost(
                f"CUDA IPC: rank {self.offers.rank} of {self.offers.size}: rank {first.awaited} has"
                f" not reached an exchange with it within {self._seconds:g} s"
            )
        if first.failure is not None:
            raise first.failure

    def rest(self) -> None:
        """Returns when all exchanges are complete on the device.

        Raises:
            RankLost: another rank has not reached one of them within the time limit.
        """
        with self.lock:
            self.settle()
            self.group.rest(self._seconds)


class _FirstRound:
    """First round of a channel, which waits for the offers of its peers on a thread.

    A rank starts an exchange whether or not its peers have reached it, and may wait for another
    exchange first: so neither `start` nor a later `wait` can receive the offers.
    """

    def __init__(self, links: IpcLinks, channel: native.IpcChannel, tag: int) -> None:
        self._links, self._channel, self._tag = links, channel, tag
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.failure: BaseException | None = None
        self.awaited = -1
        """The peer whose offer is received next."""

    def _run(self) -> None:
        try:
            for peer in self._channel.peers:
                self.awaited = peer
                self._channel.accept(peer, self._hear(peer))
            self._channel.issue()
        except BaseException as error:
            self.failure = error

    def _hear(self, peer: int) -> bytes:
        offer = torch.empty(native.IpcChannel.OFFER_BYTES, dtype=torch.uint8, device="cpu")
        self._links.offers.recv(offer, peer, self._tag)
        return offer.numpy().tobytes()


class IpcChannel(Channel):
    """Channel whose native call enqueues an entire exchange on the group's stream.

    The host does not wait, except in the first round, in which peers exchange target addresses: it
    then waits for them, with a time limit, in `wait` or where the group's next exchange starts.
    """

    def __init__(
        self,
        links: IpcLinks,
        sends: Sequence[tuple[int, Tensor]],
        recvs: Sequence[tuple[int, Tensor]],
        tag: int,
    ) -> None:
        self._links, self._tag = links, tag
        self._buffers = [each for _, each in (*sends, *recvs)]
        for each in self._buffers:
            links.keep(each)
        self._native = native.IpcChannel(links.group, as_messages(sends), as_messages(recvs))
        for peer in self._native.peers:
            offer = torch.frombuffer(bytearray(self._native.offer(peer)), dtype=torch.uint8)
            links.offers.send(offer, peer, tag)
        self._first: _FirstRound | None = None
        self._is_known = not self._native.peers

    def start(self) -> None:
        """Enqueues the round's copies, at first once addresses are known; see `Channel.start`."""
        links = self._links
        with links.lock:
            links.settle()
            self._native.start(links.queue())
            if self._is_known:
                self._native.issue()
            else:
                self._is_known = True
                self._first = _FirstRound(links, self._native, self._tag)
                links.begin(self._first)

    def wait(self) -> None:
        """Makes the caller's current stream wait, not the host; see `Channel.wait`."""
        links = self._links
        with links.lock:
            if self._first is not None:
                links.settle()
                if self._first.failure is not None:  # seen before, where another exchange started
                    raise self._first.failure
                self._first = None
            self._native.wait(links.queue())
