"""The exchanger: a plan with a transport, the native copies, and the buffers it works in."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pydist._loader import native
from pydist.partition import Box, plan_exchange
from pydist.timers import Timers

if TYPE_CHECKING:
    from pydist.comm.handles import Channel
    from pydist.comm.transport import Transport

# Tags below this are left to point-to-point calls that name their tag themselves.
_FIRST_TAG = 1024
_TAGS = 30_000


@dataclass
class _Part:
    """What one message fills of one slot: a range of the buffer and boxes of the slot's tensor."""

    slot: int
    start: int
    stop: int
    regions: native.Regions


class _Workspace:
    """Send and receive buffers of one dtype, bound to the transport for one direction."""

    def __init__(
        self,
        transport: Transport,
        sends: Sequence[tuple[int, int]],
        recvs: Sequence[tuple[int, int]],
        dtype: torch.dtype,
        tag: int,
    ) -> None:
        self.send = torch.empty(sum(n for _, n in sends), dtype=dtype)
        self.recv = torch.empty(sum(n for _, n in recvs), dtype=dtype)
        self.channel: Channel = transport.channel(
            _slices(self.send, sends), _slices(self.recv, recvs), tag
        )


def _slices(buffer: Tensor, messages: Sequence[tuple[int, int]]) -> list[tuple[int, Tensor]]:
    pieces, start = [], 0
    for peer, elements in messages:
        pieces.append((peer, buffer[start : start + elements]))
        start += elements
    return pieces


class Pending:
    """An exchange that is on its way; `wait` completes it, once."""

    def __init__(self, exchanger: Exchanger, key: tuple[torch.dtype, bool], work: _Workspace):
        self._exchanger, self._key, self.work = exchanger, key, work
        self._posted = 0.0
        self._layer = ""

    def post(self) -> None:
        """Sends the send buffer off; does not wait."""
        self._layer = self._exchanger.timers.layer
        self._posted = perf_counter()
        self.work.channel.start()

    def wait(self) -> Tensor:
        """Waits for all messages; the receive buffer is valid until `release`."""
        self.work.channel.wait()
        if not self._exchanger.is_local:
            timers = self._exchanger.timers
            timers.record("halo in flight", self._layer, self._posted, perf_counter())
        return self.work.recv

    def release(self) -> None:
        """Gives the buffers back for the next exchange of this plan."""
        self._exchanger._idle.setdefault(self._key, []).append(self.work)


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
        self._sends = [(m.peer, m.elements) for m in plan.sends]
        self._recvs = [(m.peer, m.elements) for m in plan.recvs]
        here = tuple(-c for c in self.owned.lo)
        self._outgoing = [
            self._regions([t.source.shift(here) for t in m.transfers]) for m in plan.sends
        ]
        self._all_outgoing = self._regions(
            [t.source.shift(here) for m in plan.sends for t in m.transfers]
        )
        self._incoming = self._incoming_parts()
        self._copies = [
            (t.slot, t.target.shift(self._origin(t.slot)), t.source.shift(here))
            for t in plan.copies
        ]
        self._tag = _tag_of(owned, needed)
        self._made: dict[tuple[torch.dtype, bool], int] = {}
        self._idle: dict[tuple[torch.dtype, bool], list[_Workspace]] = {}

    @property
    def is_local(self) -> bool:
        """Whether this rank neither sends nor receives."""
        return not self._sends and not self._recvs

    def start(self, local: Tensor) -> Pending:
        """Packs what others need of `local` and sends it off; does not wait."""
        with self.timers.measure("pack"):
            pending = self._acquire(local.dtype, homeward=False)
            if self._sends:
                local = self._in_order(local)
                native.pack(local, self._all_outgoing, pending.work.send)
            pending.post()
        return pending

    def finish(self, pending: Pending, slots: Sequence[Tensor]) -> None:
        """Waits for an exchange and writes what came into this rank's slots."""
        recv = pending.wait()
        for part in self._incoming:
            slot = slots[part.slot].permute(self._order)
            native.unpack(recv[part.start : part.stop], part.regions, slot)
        pending.release()

    def gather(self, local: Tensor, slots: Sequence[Tensor]) -> None:
        """Fills the slots with the boxes asked for, from wherever they lie."""
        pending = self.start(local)
        for slot, target, source in self._copies:
            slots[slot][_index(target)] = local[_index(source)]
        self.finish(pending, slots)

    def add_back(self, slots: Sequence[Tensor], local: Tensor) -> None:
        """Adds every slot's values to the elements that they were gathered from."""
        slots = [in_memory(slot) for slot in slots]
        with self.timers.measure("pack"):
            pending = self._acquire(local.dtype, homeward=True)
            for part in self._incoming:
                buffer = pending.work.send[part.start : part.stop]
                native.pack(self._in_order(slots[part.slot]), part.regions, buffer)
            pending.post()
        for slot, target, source in self._copies:
            local[_index(source)] += slots[slot][_index(target)]
        recv, start = pending.wait(), 0
        # Message by message: two of them may add to one element, and the order is part of the
        # promise of bit-identical runs.
        for regions in self._outgoing:
            message = recv[start : start + regions.elements]
            native.unpack_add(message, regions, local.permute(self._order))
            start += regions.elements
        pending.release()

    def empty_slots(self, like: Tensor) -> list[Tensor]:
        """Tensors for this rank's slots, of the dtype and on the device of `like`.

        Their elements lie in the order in which they travel.
        """
        slots = []
        for box in self.slots:
            shape = box.shape
            slot = like.new_empty([shape[d] for d in self._order])
            slots.append(slot.permute([self._order.index(d) for d in range(len(shape))]))
        return slots

    def _regions(self, boxes: Sequence[Box]) -> native.Regions:
        """Boxes in the order of dims in which they travel."""
        order = self._order
        return native.Regions(
            [Box([b.lo[d] for d in order], [b.hi[d] for d in order]) for b in boxes]
        )

    def _in_order(self, tensor: Tensor) -> Tensor:
        return in_memory(tensor).permute(self._order)

    def _origin(self, slot: int) -> tuple[int, ...]:
        return tuple(-c for c in self.slots[slot].lo)

    def _incoming_parts(self) -> list[_Part]:
        parts, start = [], 0
        for message in self.plan.recvs:
            for slot, transfers in itertools.groupby(message.transfers, lambda t: t.slot):
                origin = self._origin(slot)
                regions = self._regions([t.target.shift(origin) for t in transfers])
                parts.append(_Part(slot, start, start + regions.elements, regions))
                start += regions.elements
        return parts

    def _acquire(self, dtype: torch.dtype, *, homeward: bool) -> Pending:
        key = (dtype, homeward)
        idle = self._idle.get(key)
        if idle:
            return Pending(self, key, idle.pop())
        number = self._made[key] = self._made.get(key, 0) + 1
        sends, recvs = self._sends, self._recvs
        if homeward:
            sends, recvs = recvs, sends
        tag = _FIRST_TAG + (self._tag + 7919 * number + 4001 * homeward) % _TAGS
        return Pending(self, key, _Workspace(self.transport, sends, recvs, dtype, tag))


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
