"""Checksums of tensors that must be equal on all ranks of a group: plain operands, and parameters.

A plain operand of a sharded call is equal on all ranks of the sample group, a parameter, and a
setting of a partitioned optimizer, on all ranks. On first use the complete tensor is compared.
Later uses add a checksum to a list, which the ranks compare where they communicate anyway
(`pydist.exchange.consistency`): of small tensors in full, of larger ones another share each time,
so that `SHARES` comparisons cover a tensor. A tensor that is used repeatedly without a comparison,
as in a loop without a model, is compared every `REPEATS` uses with two shares each time: 50 uses
cover it, also on a device. (Tensors of the same kind in the same module are not distinguished. For
some counts of large ones per step, from 5 on, covering them takes longer.)
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pydist._loader import native
from pydist.comm.interface.ledger import DIFFERENT, calling_module
from pydist.errors import UsageError
from pydist.exchange.link import Link
from pydist.exchange.own_slice import is_sharded_weight, own_slice

SHARES = 47
"""A prime, so that a tensor used only in every second or third comparison is fully covered too."""
REPEATS = 11
"""Uses of one operand after which it is compared, where nothing else compares it."""
REPEATED_SHARES = 2 * REPEATS - 1
"""Number of shares in `REPEATS` uses."""
WHOLE_BYTES = 4096
"""Size up to which each checksum is of the full tensor, in bytes."""
WHOLE = -1
"""Share number that means the full tensor."""
_LEAST_BYTES = 1 << 16
"""Least size of a share of the parameters, in bytes."""
_MOST_KNOWN = 4096


class Operand:
    """A tensor whose checksums the ranks compare repeatedly.

    Attributes:
        text: description of the tensor, for errors.
        digest: hash of `text`, for comparing.
        equal_in: the last training forward in which it was equal on all ranks, by the number of
            the compared share; `WHOLE` for the full tensor.
        turn: the turn in which it was used last.
        uses: number of earlier uses in that turn.
    """

    __slots__ = ("digest", "equal_in", "text", "turn", "uses")

    def __init__(self, text: str) -> None:
        self.text = text
        digest = blake2b(text.encode(), digest_size=8).digest()
        self.digest = int.from_bytes(digest, "little", signed=True)
        self.equal_in: dict[int, int] = {}
        self.turn, self.uses = -1, 0

    def use_in(self, turn: int) -> int:
        """Counts a use, and returns the number of earlier uses in the same turn."""
        self.uses = self.uses + 1 if turn == self.turn else 0
        self.turn = turn
        return self.uses


class Checksum:
    """A checksum of bytes, which from a device are first copied to the host asynchronously."""

    __slots__ = ("_copy", "_crc", "_event")

    def __init__(self, tensor: Tensor, lo: int = 0, hi: int | None = None) -> None:
        """Starts the checksum of a tensor, or of its bytes from `lo` to `hi`."""
        self._crc, self._event = 0, None
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor.detach().resolve_conj())
        if not tensor.is_cuda:
            if tensor.is_contiguous():
                self._crc = native.crc32c(tensor, 0, lo, hi)
            else:
                self._crc = native.crc32c(_bytes_of(tensor.detach(), lo, hi))
            return
        tensor = _bytes_of(tensor.detach(), lo, hi)
        self._copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        self._copy.copy_(tensor, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record(torch.cuda.current_stream(tensor.device))

    @property
    def is_late(self) -> bool:
        """Whether the copy from a device may be in flight, so that the value is read later."""
        return self._event is not None

    def value(self) -> int:
        """Returns the checksum; waits for the device."""
        if self._event is not None:
            self._event.synchronize()
            self._crc, self._event = native.crc32c(self._copy), None
            del self._copy
        return self._crc


class _Sum(NamedTuple):
    """Checksum that was formed of an operand, with its share, training forward and turn."""

    operand: Operand
    checksum: Checksum
    share: int
    forward: int
    turn: int


class Contents:
    """The checksums that one rank has formed since the last comparison.

    Args:
        waits: whether the host waits for checksums from a device, as some ranks compute on CPUs.

    Attributes:
        turn: counter of comparisons, which determines the share of the next checksums.
        repeats: number of earlier uses, in the same turn, of the operand used last.
    """

    def __init__(self, *, waits: bool = False) -> None:
        self.turn = self.repeats = 0
        self._waits = waits
        self._known: dict[tuple[object, ...], Operand] = {}
        self._fresh: list[_Sum] = []
        self._compared: list[_Sum] = []

    def __len__(self) -> int:
        return len(self._fresh)

    def add(self, tensor: Tensor, forward: int, use: str) -> Operand | None:
        """Adds checksums of a plain operand.

        Args:
            tensor: the operand, with its values in memory.
            forward: number of the training forward.
            use: its purpose.

        Returns:
            The operand if it is the first of its kind, to be compared before it is used; or `None`.
        """
        is_parameter = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
        kind = "a frozen parameter" if is_parameter else "a plain tensor"
        key = (calling_module(), kind, use, tensor.shape, tensor.dtype)
        operand = self._known.get(key)
        is_new = operand is None
        if operand is None:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            module = f" in module {key[0]}" if key[0] else ""
            dtype = str(tensor.dtype).removeprefix("torch.")
            shape = f" of shape {tuple(tensor.shape)} ({dtype})"
            operand = self._known[key] = Operand(f"{kind}{shape}{module}")
        self.repeats = before = operand.use_in(self.turn)
        if is_new or tensor.nbytes <= WHOLE_BYTES:
            whole = Checksum(tensor.cpu() if is_new else tensor)
            self.add_checksum(operand, whole, WHOLE, forward)
            return operand if is_new else None
        last = self.turn + 2 * before
        for number in range(last - (before > 0), last + 1):
            share, size = number % SHARES, tensor.nbytes
            part = Checksum(tensor, size * share // SHARES, size * (share + 1) // SHARES)
            self.add_checksum(operand, part, share, forward)
        return None

    def add_checksum(self, operand: Operand, checksum: Checksum, share: int, forward: int) -> None:
        """Adds a checksum that the caller has formed."""
        self._fresh.append(_Sum(operand, checksum, share, forward, self.turn))

    def take(self) -> int:
        """Takes the checksums to compare now, and returns their hash.

        Checksums of this turn from a device are left for the next turn, so that the host does not
        wait, if all ranks have devices.
        """
        if not self._fresh:
            self._compared = []
            return 0
        is_late = [
            each.checksum.is_late and each.turn == self.turn and not self._waits
            for each in self._fresh
        ]
        both = list(zip(self._fresh, is_late, strict=True))
        self._fresh = [each for each, late in both if late]
        self._compared = [each for each, late in both if not late]
        return hash(tuple((each.operand.digest, each.checksum.value()) for each in self._compared))

    def confirm(self) -> None:
        """Records that the taken checksums are equal on all ranks."""
        for each in self._compared:
            each.operand.equal_in[each.share] = each.forward
        self._compared = []

    def details(self) -> list[list[Any]]:
        """Returns the taken checksums with their descriptions, for the other ranks."""
        return [
            [
                each.operand.text,
                each.checksum.value(),
                each.forward,
                each.share,
                each.operand.equal_in.get(each.share, each.operand.equal_in.get(WHOLE, -1)),
            ]
            for each in self._compared
        ]


class TrainedParameters:
    """Trained parameters that parallelized models have; each turn checks another share of them.

    They are not treated as plain operands: a checksum at every use would take too long.

    Attributes:
        recurring: those that were used more than once in this turn, in the order of second uses.
    """

    def __init__(self) -> None:
        # By id, for look-ups only: the order of ids that freed parameters leave to new ones differs
        # between ranks.
        self._known: dict[int, tuple[Link, Operand]] = {}
        self.recurring: list[Tensor] = []
        self._of: weakref.WeakKeyDictionary[nn.Module, list[Link]] = weakref.WeakKeyDictionary()

    def hold(self, model: nn.Module, forward: int) -> None:
        """Registers a model's parameters, which replace its earlier ones.

        Args:
            model: the model; parameters that it did not have before are equal on all ranks.
            forward: number of the training forward.
        """
        self._known = {key: known for key, known in self._known.items() if known[0]() is not None}
        self._of[model] = []
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad or is_sharded_weight(parameter):
                continue
            reference = Link(parameter)
            self._of[model].append(reference)
            if self._operand_of(parameter) is None:
                operand = Operand(f"parameter {name!r} of shape {tuple(parameter.shape)}")
                operand.equal_in[WHOLE] = forward
                self._known[id(parameter)] = reference, operand

    def _operand_of(self, tensor: Tensor) -> Operand | None:
        known = self._known.get(id(tensor))
        return known[1] if known is not None and known[0].leads_to(tensor) else None

    def use_in(self, turn: int, tensor: Tensor) -> int | None:
        """Counts a use of a tensor.

        Returns:
            The number of earlier uses in the same turn; `None` if it is no trained parameter.
        """
        operand = self._operand_of(tensor) if tensor.requires_grad else None
        if operand is None:
            return None
        uses = operand.use_in(turn)
        if uses == 1:
            self.recurring.append(tensor)
        return uses

    def of(self, model: nn.Module) -> list[Tensor]:
        """Returns the parameters of a model that is being called."""
        # A replaced parameter may stay alive on one rank only.
        present = {id(parameter) for parameter in model.parameters()}
        found = [reference() for reference in self._of.get(model, ())]
        return [tensor for tensor in found if tensor is not None and id(tensor) in present]

    def places(self) -> dict[int, int]:
        """Returns the positions of all models' current parameters, by the ids of the parameters."""
        parameters = (own_slice(p) for model in list(self._of) for p in model.parameters())
        return {id(parameter): place for place, parameter in enumerate(parameters)}

    def share(
        self, turn: int, tensors: Sequence[Tensor], count: int = 1
    ) -> Iterable[tuple[Operand, Checksum, int]]:
        """Yields checksums of a turn's share, in bytes of all these tensors, with its number.

        Args:
            turn: number of the first share.
            tensors: the tensors.
            count: number of consecutive shares.
        """
        ends = list(accumulate(tensor.nbytes for tensor in tensors))
        total = ends[-1] if ends else 0
        if not total:
            return
        shares = max(1, min(SHARES, total // _LEAST_BYTES))
        for number in range(turn, turn + min(count, shares)):
            lo, hi = (total * (number % shares + i) // shares for i in (0, 1))
            for i in range(bisect_right(ends, lo), len(tensors)):
                tensor, start = tensors[i], ends[i - 1] if i else 0
                if start >= hi:
                    break
                if start < ends[i]:
                    part = Checksum(tensor, max(lo, start) - start, min(hi, ends[i]) - start)
                    yield self._compared(tensor), part, number % shares

    def _compared(self, tensor: Tensor) -> Operand:
        operand = self._operand_of(tensor)
        if operand is None:
            operand = Operand(f"parameter of shape {tuple(tensor.shape)}")
            self._known[id(tensor)] = Link(tensor), operand
        return operand


def _bytes_of(tensor: Tensor, lo: int, hi: int | None) -> Tensor:
    """Returns the elements in these bytes; full slices of the longest dim if it is strided."""
    if hi is None:
        return tensor.contiguous()
    if tensor.is_contiguous():
        size = tensor.element_size()
        return tensor.view(-1)[lo // size : -(-hi // size)]
    dim = max(range(tensor.dim()), key=lambda d: tensor.shape[d])
    extent = tensor.shape[dim]
    first, last = lo * extent // tensor.nbytes, -(-hi * extent // tensor.nbytes)
    return tensor.narrow(dim, first, last - first).contiguous()


def different_contents(rows: Mapping[int, list[list[Any]]]) -> UsageError:
    """Returns the error for ranks that hold different tensors; the same on all of them.

    Args:
        rows: the `details` of each rank of the group.
    """
    first, *others = sorted(rows)
    for index in range(max(len(each) for each in rows.values())):
        for other in others:
            here, there = (
                rows[r][index] if index < len(rows[r]) else ["nothing", 0, 0, WHOLE, -1]
                for r in (first, other)
            )
            if here[0] != there[0]:
                return UsageError(
                    f"{DIFFERENT}: rank {first} uses {here[0]}, and rank {other} uses {there[0]} in"
                    " its place"
                )
            if here[1] != there[1]:
                return _differs(first, other, here)
    return UsageError("the ranks hold different tensors, and have forgotten which")


def _differs(first: int, other: int, row: list[object]) -> UsageError:
    text, _, forward, share, equal_in = row
    since = f"in training forward {forward}, the first that compares it"
    if isinstance(equal_in, int) and equal_in >= 0:
        part = "" if share == WHOLE else "this part of it "
        since = f"{part}equal in training forward {equal_in}, different in {forward} at the latest"
        if equal_in == forward:  # without training, forwards are not counted
            since = f"{part}equal when it was last compared"
    advice = "give each rank its part with ShardedTensor.from_local, or the same samples and seeds"
    if str(text).startswith(("parameter", "a frozen parameter")):
        advice = (
            "load or change the model on every rank, not on one, and decide about steps and"
            " learning rates by a loss of all ranks (pydist.sum_over_groups), not each rank's own"
        )
        equal = "it must be equal on all ranks"
    elif str(text).startswith("setting"):
        advice = "a schedule that follows a loss needs that of all ranks (pydist.sum_over_groups)"
        equal = "it must be equal on all ranks"
    else:
        equal = "it must be equal on all ranks of a sample group"
        advice += " to all, and torch.zeros where torch.empty leaves values of each rank's own"
    return UsageError(
        f"{text} differs between the ranks {first} and {other} ({since}): {equal}; {advice}"
    )
