"""The exchanger, which executes a plan with a transport, native copies and reused buffers."""

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
from pydist.comm.interface.ledger import STAMP_BYTES, STAMPED_TAG
from pydist.errors import RankFailed, RankLost, UsageError
from pydist.partition import Box, plan_exchange
from pydist.timers import Timers

if TYPE_CHECKING:
    from pydist.comm.interface.handles import Channel
    from pydist.comm.interface.transport import Transport

# Tags below this, and below STAMPED_TAG, are reserved for point-to-point calls with explicit tags.
_FIRST_TAG = 1024
_TAGS = 30_000

_DESCRIBED = 160
"""Most characters of an error that describe the blocks of an exchange."""

_Kind: TypeAlias = tuple[torch.dtype, torch.device, bool]


class PendingExchange:
    """Exchange that is in flight, in buffers of one dtype; `wait` completes it, once.

    The buffers are bound to the transport, for one direction, and are reused after the exchanger
    has taken them back: work that does not depend on a tensor is done once, when they are made.
    Messages between hosts begin with the stamp of the ranks' ledger, which is compared on arrival.

    Attributes:
        kind: dtype, device, and whether it is the adjoint.
        packed: the buffer of all sent elements, if it has no stamps; filled before `post`.
        slot_parts: the contents of this rank's slots, received or, in the adjoint, sent: the
            slot, its part of the buffer, and its regions in the slot.
        shard_parts: the same for the shard, message by message.
    """

    def __init__(self, exchanger: Exchanger, kind: _Kind) -> None:
        """Makes the buffers of one exchange of a plan, or of its adjoint."""
        dtype, device, is_adjoint = kind
        sends, recvs = exchanger.plan.sends, exchanger.plan.recvs
        if is_adjoint:
            sends, recvs = recvs, sends
        transport = exchanger.transport
        is_stamped = device.type == "cpu" and transport.size > 1
        head = STAMP_BYTES // dtype.itemsize if is_stamped else 0
        sent = _messages([m.elements for m in sends], head, dtype, device)
        received = _messages([m.elements for m in recvs], head, dtype, device)
        tag = STAMPED_TAG if is_stamped else exchanger._next_tag(dtype, is_adjoint)
        self._channel: Channel = transport.channel(
            [(m.peer, piece) for m, piece in zip(sends, sent, strict=True)],
            [(m.peer, piece) for m, piece in zip(recvs, received, strict=True)],
            tag,
        )
        self._ledger, self._rank = transport.ledger, transport.rank
        self._stamps = [_stamp_of(piece) for piece in sent] if is_stamped else []
        self._heard = (
            [(m.peer, _stamp_of(piece)) for m, piece in zip(recvs, received, strict=True)]
            if is_stamped
            else []
        )
        self._stamp = b""
        sent, received = [m[head:] for m in sent], [m[head:] for m in received]
        self.packed = None if is_stamped or not sent else _joined(sent)
        incoming, outgoing = (sent, received) if is_adjoint else (received, sent)
        self.slot_parts = [
            (slot, piece, regions)
            for message, parts in zip(incoming, exchanger._incoming, strict=True)
            for (slot, regions), piece in zip(
                parts, _split(message, [r.elements for _, r in parts]), strict=True
            )
        ]
        self.shard_parts = list(zip(outgoing, exchanger._outgoing, strict=True))
        self.kind = kind
        self._timers, self._is_local = exchanger.timers, exchanger.is_local
        self._flight: Any = None
        """The recorder's handle of the exchange in flight."""
        self._stream: torch.cuda.Stream | None = None

    def move_to(self, stream: torch.cuda.Stream | None) -> None:
        """Lets the buffers be used on a stream, after the work on the one before.

        Args:
            stream: `None` for a CPU.
        """
        before, self._stream = self._stream, stream
        order_streams(before, stream)

    def post(self) -> None:
        """Starts sending the messages; does not wait."""
        if self._stamps or self._heard:
            self._stamp = self._ledger.stamp()
            for place in self._stamps:
                place[:] = self._stamp
        timers = self._timers
        if timers.recorder is not None and not self._is_local:
            self._flight = timers.recorder.launch(timers.layer)
        self._channel.start()

    def wait(self) -> None:
        """Waits for all messages; they are valid until the exchanger takes the buffers back.

        Raises:
            UsageError: another rank has started another exchange.
        """
        flight, self._flight = self._flight, None
        recorder = self._timers.recorder
        try:
            if flight is None or recorder is None:
                self._channel.wait()
            else:
                recorder.land(flight, self._channel)
        except (RankFailed, RankLost):
            raise
        except Exception as error:
            if not self._heard:
                raise
            # The library has detected a message of another length.
            raise self._ledger.misfit(self._rank, error) from error
        for peer, place in self._heard:
            if place != self._stamp:
                raise self._ledger.mismatch(self._rank, peer, self._stamp, bytes(place))


def _messages(
    elements: Sequence[int], head: int, dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    """Allocates messages, each with space for a head, in one buffer."""
    counts = [head + n for n in elements]
    # They may be used in training after an evaluation that made them.
    with torch.inference_mode(False):
        return _split(torch.empty(sum(counts), dtype=dtype, device=device), counts)


def _stamp_of(message: Tensor) -> memoryview:
    return message.view(torch.uint8)[:STAMP_BYTES].numpy().data


def _joined(pieces: Sequence[Tensor]) -> Tensor:
    """Returns the buffer that consists of these adjacent pieces."""
    first = pieces[0]
    return first.as_strided((sum(len(each) for each in pieces),), (1,))


def _split(buffer: Tensor, counts: Sequence[int]) -> list[Tensor]:
    pieces, start = [], 0
    for elements in counts:
        pieces.append(buffer[start : start + elements])
        start += elements
    return pieces


class Exchanger:
    """Exchanger that moves boxes between the ranks of a group, and gradients back (its adjoint).

    Every rank owns one box and needs a list of boxes ("slots"). `gather` fills this rank's slots
    from their owners; `add_back`, its adjoint, sends the slots' values to the owners,
    which sum them. Elements that no rank owns (padding) are not changed. Both reuse free buffers of
    earlier exchanges, so nothing is allocated after the first step.

    Args:
        transport: the group's transport; rank r of it owns `owned[r]`.
        owned: the box of each rank; equal boxes are replicas, others are disjoint.
        needed: the boxes that each rank needs, in global indices.
        timers: the mesh's timers, for a halo exchange: posting is measured as "pack", and the time
            until all messages have arrived is recorded as "halo in flight".
        channels_last: whether elements are sent channels-last instead of in C order; the same on
            all ranks.
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
        self.timers = timers or Timers()  # not recorded anywhere
        self.plan = plan = plan_exchange(owned, needed, transport.rank)
        self.slots = list(needed[transport.rank])
        self.owned = owned[transport.rank]
        here = tuple(-c for c in self.owned.lo)
        sources = [[t.box.shift(here) for t in m.transfers] for m in plan.sends]
        self._outgoing = [self._regions(boxes) for boxes in sources]
        self._all_outgoing = self._regions([box for boxes in sources for box in boxes])
        self._incoming = self._incoming_parts()
        self._copies = [
            (t.slot, t.box.shift(self._origin(t.slot)).slices, t.box.shift(here).slices)
            for t in plan.copies
        ]
        self._fingerprint = _fingerprint_of(owned, needed, self._order)
        shape = tuple(max(box.hi[dim] for box in owned) for dim in dims)
        # For the ledger: the fingerprint distinguishes plans, and only the rest is shown.
        said = _described(owned, needed, shape)
        self._said = str(shape), said, self._fingerprint.to_bytes(4, "big")
        self._ways = ("exchange", "sum of an exchange's gradients")
        if timers is not None:
            self._ways = ("halo exchange", "halo exchange of gradients")
        self._made: dict[tuple[torch.dtype, bool], int] = {}
        self._idle: defaultdict[_Kind, list[PendingExchange]] = defaultdict(list)
        self.is_local = not plan.sends and not plan.recvs
        """Whether this rank neither sends nor receives."""

    def start(
        self, local: Tensor, change: Callable[[Tensor], None] | None = None
    ) -> PendingExchange:
        """Packs the parts of `local` that other ranks need and sends them; does not wait.

        Args:
            local: this rank's box.
            change: applied in place to the packed elements before they are sent.
        """
        self.announce(local)
        timers = self.timers
        begun = None if timers.recorder is None else timers.recorder.begin("pack", timers.layer)
        began = perf_counter()
        pending = self._pending(local, False)
        pieces = pending.shard_parts
        if pending.packed is not None:
            pieces = [(pending.packed, self._all_outgoing)]
        for piece, regions in pieces:
            _pack(local, regions, piece)
            if change is not None:
                change(piece)
        pending.post()
        timers.add("pack", began, perf_counter(), begun)
        return pending

    def finish(self, pending: PendingExchange, slots: Sequence[Tensor]) -> None:
        """Waits for an exchange and writes the received elements into this rank's slots."""
        pending.wait()
        for slot, piece, regions in pending.slot_parts:
            native.unpack(piece, regions, slots[slot])
        self.release(pending)

    def release(self, pending: PendingExchange) -> None:
        """Takes back the buffers of a completed exchange; `finish` calls this."""
        self._idle[pending.kind].append(pending)

    def gather(self, local: Tensor, slots: Sequence[Tensor]) -> None:
        """Fills the slots with the needed boxes, from this rank and from others."""
        pending = self.start(local)
        for slot, target, source in self._copies:
            slots[slot][target] = local[source]
        self.finish(pending, slots)

    def add_back(self, slots: Sequence[Tensor], local: Tensor) -> None:
        """Adds every slot's values to the elements that they were gathered from."""
        pending = self.start_adjoint(slots, local)
        for slot, target, source in self._copies:
            local[source] += slots[slot][target]
        self.finish_adjoint(pending, local)

    def start_adjoint(self, slots: Sequence[Tensor], like: Tensor) -> PendingExchange:
        """Sends the slots' values to their other owners; does not wait.

        A rank may have no slots, so `like` gives their dtype and device.
        """
        self.announce(like, is_adjoint=True)
        timers = self.timers
        begun = None if timers.recorder is None else timers.recorder.begin("pack", timers.layer)
        began = perf_counter()
        pending = self._pending(like, True)
        for slot, piece, regions in pending.slot_parts:
            _pack(slots[slot], regions, piece)
        pending.post()
        timers.add("pack", began, perf_counter(), begun)
        return pending

    def finish_adjoint(self, pending: PendingExchange, local: Tensor) -> None:
        """Waits for the values of this rank's shard and adds them."""
        pending.wait()
        # Message by message: two of them may add to one element, and bit-identical runs need a
        # fixed order.
        for piece, regions in pending.shard_parts:
            native.unpack_add(piece, regions, local)
        self.release(pending)

    def _pending(self, like: Tensor, is_adjoint: bool) -> PendingExchange:
        """Returns the buffers of a completed exchange, or new ones.

        They are free on a device as well: `PendingExchange.wait` has ordered later work of the
        stream after the messages, and the new exchange comes after that work, also where it is on
        another stream. Buffers for each stream would not do: ranks that use streams differently
        would take different buffers, whose messages have other tags.
        """
        kind = like.dtype, like.device, is_adjoint
        idle = self._idle[kind]
        pending = idle.pop() if idle else PendingExchange(self, kind)
        pending.move_to(stream_of(like))
        return pending

    def announce(self, local: Tensor, is_adjoint: bool = False) -> None:
        """Records an exchange in the ledger; a rank without messages does nothing else for it.

        Args:
            local: the tensor that is exchanged.
            is_adjoint: whether it is the adjoint.
        """
        transport = self.transport
        if transport.watcher is not None:
            transport.watcher(local if is_adjoint else self)
        if transport.size > 1:
            what = (self._ways[is_adjoint], local.dtype, *self._said)
            transport.ledger.note(transport, what, waits=True)

    def empty_slots(self, like: Tensor) -> list[Tensor]:
        """Allocates this rank's slots, of the dtype and on the device of `like`.

        Their memory layout is the order in which elements are sent.
        """
        return [like.new_empty_strided(*described) for described in self._slot_memory]

    def empty_shard(self, like: Tensor) -> Tensor:
        """Allocates a tensor for this rank's own box, like `empty_slots`."""
        return like.new_empty_strided(*self._memory_of(self.owned))

    @cached_property
    def _slot_memory(self) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Shape and strides that each slot has."""
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

    def _incoming_parts(self) -> list[list[tuple[int, native.Regions]]]:
        """Returns the parts that each message fills, in order: slots and their boxes."""
        messages = []
        for message in self.plan.recvs:
            parts: list[tuple[int, native.Regions]] = []
            messages.append(parts)
            for slot, transfers in itertools.groupby(message.transfers, lambda t: t.slot):
                origin = self._origin(slot)
                parts.append((slot, self._regions([t.box.shift(origin) for t in transfers])))
        return messages

    def _next_tag(self, dtype: torch.dtype, is_adjoint: bool) -> int:
        """Returns a tag that no other exchange of this plan in flight has."""
        number = self._made[dtype, is_adjoint] = self._made.get((dtype, is_adjoint), 0) + 1
        return _FIRST_TAG + (self._fingerprint + 7919 * number + 4001 * is_adjoint) % _TAGS


def _pack(tensor: Tensor, regions: native.Regions, buffer: Tensor) -> None:
    try:
        native.pack(tensor, regions, buffer)
    except UsageError:  # a tensor without values in memory: rare, and checking first takes longer
        native.pack(in_memory(tensor), regions, buffer)


def in_memory(tensor: Tensor) -> Tensor:
    """Returns the tensor with all its values in memory, as native code and transports need it.

    torch defers negation and conjugation, and keeps no memory for zeros that autograd knows.
    """
    if tensor._is_zerotensor():
        return tensor.clone(memory_format=torch.contiguous_format)
    return tensor.resolve_conj().resolve_neg()


def stream_of(tensor: Tensor) -> torch.cuda.Stream | None:
    """Returns the current stream of the tensor's device; `None` for a CPU."""
    return torch.cuda.current_stream(tensor.get_device()) if tensor.is_cuda else None


def order_streams(before: torch.cuda.Stream | None, after: torch.cuda.Stream | None) -> None:
    """Lets later work of one stream wait for all earlier work of another one.

    A graph that is captured can't wait for work outside of it, and need not: its capture has begun
    after that work. Work outside can't wait for a graph that is still captured.
    """
    if before is None or after is None or before == after:
        return
    if _is_captured(before) == _is_captured(after):
        after.wait_stream(before)


def _is_captured(stream: torch.cuda.Stream) -> bool:
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()


def _fingerprint_of(
    owned: Sequence[Box], needed: Sequence[Sequence[Box]], order: Sequence[int]
) -> int:
    """Returns a checksum of an exchange's boxes and order, the same on all ranks."""
    return zlib.crc32(repr((list(owned), [list(n) for n in needed], order)).encode())


def _described(owned: Sequence[Box], needed: Sequence[Sequence[Box]], shape: Sequence[int]) -> str:
    """Describes the blocks that ranks own and need, as slices; of the first ranks if many."""
    said = ""
    for rank, (own, boxes) in enumerate(zip(owned, needed, strict=True)):
        takes = " and ".join(_slices(box, shape) for box in boxes if all(box.shape)) or "nothing"
        block = f"block {rank} {_slices(own, shape)} takes {takes}"
        if said and len(said) + len(block) > _DESCRIBED:
            return f"{said}, ..."
        said += f", {block}" if said else block
    return said


def _slices(box: Box, shape: Sequence[int]) -> str:
    """Returns a box as Python indices, without full dims at the end."""
    parts = [
        ":" if (lo, hi) == (0, size) else f"{lo}:{hi}"
        for lo, hi, size in zip(box.lo, box.hi, shape, strict=True)
    ]
    while len(parts) > 1 and parts[-1] == ":":
        parts.pop()
    return f"[{', '.join(parts)}]"
