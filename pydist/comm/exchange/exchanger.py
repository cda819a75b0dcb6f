"""The exchanger: a plan with a transport, the native copies, and the buffers it works in."""

from __future__ import annotations

import itertools
import zlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cached_property
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from pydist._loader import native
from pydist.errors import UsageError
from pydist.partition import Box, plan_exchange
from pydist.timers import Timers

if TYPE_CHECKING:
    from pydist.comm.interface.handles import Channel
    from pydist.comm.interface.transport import Transport

# Tags below this are left to point-to-point calls that name their tag themselves.
_FIRST_TAG = 1024
_TAGS = 30_000

_Kind: TypeAlias = tuple[torch.dtype, torch.device, bool]


class Pending:
    """An exchange that is on its way, in buffers of one dtype; `wait` completes it, once.

    The buffers are bound to the transport, for one direction, and serve the next exchange when the
    exchanger has them back: what does not depend on a tensor is done once, when they are made.

    Attributes:
        kind: dtype, device, and whether it goes homeward.
        send: what is sent; filled before `post`.
        recv: what is received.
        of_slots: what fills this rank's slots, or on the way home comes from them: the number of a
            slot, its part of the buffer, and where in the slot that lies.
        of_shard: the same for the whole shard, message by message.
    """

    def __init__(self, exchanger: Exchanger, kind: _Kind) -> None:
        """Buffers for another exchange of this plan under way; homeward for its adjoint."""
        dtype, device, homeward = kind
        sends, recvs = exchanger.plan.sends, exchanger.plan.recvs
        if homeward:
            sends, recvs = recvs, sends
        self.send = torch.empty(sum(m.elements for m in sends), dtype=dtype, device=device)
        self.recv = torch.empty(sum(m.elements for m in recvs), dtype=dtype, device=device)
        sent = _split(self.send, [m.elements for m in sends])
        received = _split(self.recv, [m.elements for m in recvs])
        self._channel: Channel = exchanger.transport.channel(
            [(m.peer, piece) for m, piece in zip(sends, sent, strict=True)],
            [(m.peer, piece) for m, piece in zip(recvs, received, strict=True)],
            exchanger._next_tag(dtype, homeward),
        )
        incoming, outgoing = (self.send, received) if homeward else (self.recv, sent)
        counts = [regions.elements for _, regions in exchanger._incoming]
        self.of_slots = [
            (slot, piece, regions)
            for (slot, regions), piece in zip(
                exchanger._incoming, _split(incoming, counts), strict=True
            )
        ]
        self.of_shard = list(zip(outgoing, exchanger._outgoing, strict=True))
        self.kind = kind
        self._timers, self._is_local = exchanger.timers, exchanger.is_local
        self._flight: Any = None
        """What a recorder knows of the exchange under way."""

    def post(self) -> None:
        """Sends the send buffer off; does not wait."""
        timers = self._timers
        if timers.recorder is not None and not self._is_local:
            self._flight = timers.recorder.launch(timers.layer)
        self._channel.start()

    def wait(self) -> None:
        """Waits for all messages; `recv` is valid until the exchanger has the buffers back."""
        flight, self._flight = self._flight, None
        recorder = self._timers.recorder
        if flight is None or recorder is None:
            self._channel.wait()
        else:
            recorder.land(flight, self._channel)


def _split(buffer: Tensor, counts: Sequence[int]) -> list[Tensor]:
    pieces, start = [], 0
    for elements in counts:
        pieces.append(buffer[start : start + elements])
        start += elements
    return pieces


class Exchanger:
    """Moves boxes between the ranks of a group, and adds them back on the way home.

    Every rank owns one box and asks for a list of boxes ("slots"). `gather` fills this rank's
    slots from their owners; `add_back`, its adjoint, sends the slots' values home, where they are
    summed. What no rank owns (padding) is left alone. Both take the buffers of the last exchange
    when they are free, so that nothing is allocated once a step has run.

    Args:
        transport: the group's transport; rank r of it owns `owned[r]`.
        owned: the box of each rank; equal boxes are replicas, others are disjoint.
        needed: the boxes that each rank asks for, in global indices.
        timers: the mesh's, if what is exchanged is a halo: posting is measured as "pack", and the
            time until all of it has arrived recorded as "halo in flight".
        channels_last: elements travel with the channels varying fastest, as they lie in tensors of
            that format, instead of in C order; the same on all ranks.
    """

    def __init__(
        self,
        transport: Transport,
        owned: Sequence[Box],
        needed: Sequence[Sequence[Box]],
        timers: Timers | None = None,
        channels_last: bool = False,
    ) -> None:
        self.transport = transport
        dims = range(len(owned[0].lo))
        self._order = (0, *dims[2:], 1) if channels_last else tuple(dims)
        self.timers = timers or Timers()  # those of nobody
        self.plan = plan = plan_exchange(owned, needed, transport.rank)
        self.slots = list(needed[transport.rank])
        self.owned = owned[transport.rank]
        here = tuple(-c for c in self.owned.lo)
        sources = [[t.source.shift(here) for t in m.transfers] for m in plan.sends]
        self._outgoing = [self._regions(boxes) for boxes in sources]
        self._all_outgoing = self._regions([box for boxes in sources for box in boxes])
        self._incoming = self._incoming_parts()
        self._copies = [
            (t.slot, t.target.shift(self._origin(t.slot)), t.source.shift(here))
            for t in plan.copies
        ]
        self._tag = _tag_of(owned, needed)
        self._made: dict[tuple[torch.dtype, bool], int] = {}
        self._idle: defaultdict[_Kind, list[Pending]] = defaultdict(list)
        self._sends = bool(plan.sends)
        self.is_local = not plan.sends and not plan.recvs
        """Whether this rank neither sends nor receives."""

    def start(self, local: Tensor, change: Callable[[Tensor], None] | None = None) -> Pending:
        """Packs what others need of `local` and sends it off; does not wait.

        Args:
            local: this rank's box.
            change: applied in place to the packed elements before they are sent.
        """
        self._announce()
        timers = self.timers
        begun = None if timers.recorder is None else timers.recorder.begin("pack", timers.layer)
        began = perf_counter()
        pending = self._pending((local.dtype, local.device, False))
        if self._sends:
            _pack(local, self._all_outgoing, pending.send)
            if change is not None:
                change(pending.send)
        pending.post()
        timers.add("pack", began, perf_counter(), begun)
        return pending

    def finish(self, pending: Pending, slots: Sequence[Tensor]) -> None:
        """Waits for an exchange and writes what came into this rank's slots."""
        pending.wait()
        for slot, piece, regions in pending.of_slots:
            native.unpack(piece, regions, slots[slot])
        self.release(pending)

    def release(self, pending: Pending) -> None:
        """Takes back the buffers of an exchange that is complete; `finish` does it."""
        self._idle[pending.kind].append(pending)

    def gather(self, local: Tensor, slots: Sequence[Tensor]) -> None:
        """Fills the slots with the boxes asked for, from wherever they lie."""
        pending = self.start(local)
        for slot, target, source in self._copies:
            slots[slot][_index(target)] = local[_index(source)]
        self.finish(pending, slots)

    def add_back(self, slots: Sequence[Tensor], local: Tensor) -> None:
        """Adds every slot's values to the elements that they were gathered from."""
        pending = self.start_back(slots, local)
        for slot, target, source in self._copies:
            local[_index(source)] += slots[slot][_index(target)]
        self.finish_back(pending, local)

    def start_back(self, slots: Sequence[Tensor], like: Tensor) -> Pending:
        """Sends the slots' values home, but for what this rank has from itself; does not wait.

        A rank may have no slots: `like` has their dtype and device.
        """
        self._announce()
        timers = self.timers
        begun = None if timers.recorder is None else timers.recorder.begin("pack", timers.layer)
        began = perf_counter()
        pending = self._pending((like.dtype, like.device, True))
        for slot, piece, regions in pending.of_slots:
            _pack(slots[slot], regions, piece)
        pending.post()
        timers.add("pack", began, perf_counter(), begun)
        return pending

    def finish_back(self, pending: Pending, local: Tensor) -> None:
        """Waits for what comes home and adds it."""
        pending.wait()
        # Message by message: two of them may add to one element, and the order is part of the
        # promise of bit-identical runs.
        for piece, regions in pending.of_shard:
            native.unpack_add(piece, regions, local)
        self.release(pending)

    def _pending(self, kind: _Kind) -> Pending:
        """Buffers of an exchange that is complete, or new ones.

        On a device they are free as well: `Pending.wait` ordered what came then behind the
        messages, and what comes now is behind that.
        """
        idle = self._idle[kind]
        return idle.pop() if idle else Pending(self, kind)

    def _announce(self) -> None:
        """What comes before every exchange."""
        transport = self.transport
        if transport.unfinished is not None:  # in order, as those of equal boxes have equal tags
            transport.unfinished()
        if transport.watcher is not None:
            transport.watcher(self)

    def empty_slots(self, like: Tensor) -> list[Tensor]:
        """Tensors for this rank's slots, of the dtype and on the device of `like`.

        Their elements lie in the order in which they travel.
        """
        return [like.new_empty_strided(*described) for described in self._slot_memory]

    def empty_shard(self, like: Tensor) -> Tensor:
        """The same for what this rank owns."""
        return like.new_empty_strided(*self._memory_of(self.owned))

    @cached_property
    def _slot_memory(self) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Shape and strides of each slot."""
        return [self._memory_of(box) for box in self.slots]

    def _memory_of(self, box: Box) -> tuple[tuple[int, ...], tuple[int, ...]]:
        strides, step = [0] * len(box.shape), 1
        for dim in reversed(self._order):
            strides[dim] = step
            step *= max(1, box.shape[dim])
        return tuple(box.shape), tuple(strides)

    def _regions(self, boxes: Sequence[Box]) -> native.Regions:
        return native.Regions(boxes, self._order)

    def _origin(self, slot: int) -> tuple[int, ...]:
        return tuple(-c for c in self.slots[slot].lo)

    def _incoming_parts(self) -> list[tuple[int, native.Regions]]:
        """What the messages fill, one behind the other: a slot, and boxes of it."""
        parts = []
        for message in self.plan.recvs:
            for slot, transfers in itertools.groupby(message.transfers, lambda t: t.slot):
                origin = self._origin(slot)
                parts.append((slot, self._regions([t.target.shift(origin) for t in transfers])))
        return parts

    def _next_tag(self, dtype: torch.dtype, homeward: bool) -> int:
        """A tag that no other exchange of this plan has that may be under way."""
        number = self._made[dtype, homeward] = self._made.get((dtype, homeward), 0) + 1
        return _FIRST_TAG + (self._tag + 7919 * number + 4001 * homeward) % _TAGS


def _pack(tensor: Tensor, regions: native.Regions, buffer: Tensor) -> None:
    try:
        native.pack(tensor, regions, buffer)
    except UsageError:  # rarely, a tensor has no values in memory; looking for that takes longer
        native.pack(in_memory(tensor), regions, buffer)


def in_memory(tensor: Tensor) -> Tensor:
    """The tensor with all its values in memory, where native code and transports find them.

    torch puts off negation and conjugation, and keeps no memory for zeros that autograd knows of.
    """
    if tensor._is_zerotensor():
        return torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return tensor.resolve_conj().resolve_neg()


def _index(box: Box) -> tuple[slice, ...]:
    return tuple(slice(lo, hi) for lo, hi in zip(box.lo, box.hi, strict=True))


def _tag_of(owned: Sequence[Box], needed: Sequence[Sequence[Box]]) -> int:
    """A tag from the content of the exchange, so that all ranks choose the same one."""
    return zlib.crc32(repr((list(owned), [list(n) for n in needed])).encode()) % _TAGS
