"""Consistency checks between the ranks of a mesh while a program runs.

Ranks check that they started the same calls in the same order (`Ledger`), that plain operands are
equal on all ranks of a sample group, and parameters and the settings of partitioned optimizers on
all ranks (`Contents`). One number, the proof, covers all checks. It is part of the message that the
ranks exchange at the end of each backward anyway (`pydist.gradients.flags`), before an optimizer
can use mismatched gradients. The message goes between hosts, also for gradients on devices, and no
host waits for a device.

The sum of the proofs over all ranks is 0 if they agree. Each rank multiplies a hash that is
compared within a group by a weight. The weights are random, and the weights of a group sum to 0
modulo 2**64: equal hashes cancel, and others cancel only by chance. So one all-reduce of one
integer compares all groups, for any number of ranks. If the sum is not 0, all ranks of the mesh
exchange the details, and raise the same error.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from pydist.comm.interface.board import gather_texts
from pydist.comm.interface.ledger import DIFFERENT, different_calls
from pydist.errors import UsageError
from pydist.exchange.contents import (
    REPEATED_SHARES,
    REPEATS,
    WHOLE,
    Checksum,
    Contents,
    Operand,
    TrainedParameters,
    different_contents,
)
from pydist.exchange.history import different_histories, recent_calls
from pydist.grid import SAMPLE_AXES

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from pydist.mesh import Mesh

_MOST = 512
"""Checksums that are collected before a comparison without a backward."""


class _Claim(NamedTuple):
    """Something that must be equal on all ranks of a group, with its hash.

    Attributes:
        what: a key of `_ERRORS`.
        axes: of the group.
        value: the hash.
        details: returns the details that a rank adds if the ranks differ.
    """

    what: str
    axes: tuple[str, ...]
    value: int
    details: Callable[[], list[Any]]


_ERRORS: dict[str, Callable[[Mapping[int, list[Any]]], UsageError]] = {
    "calls": different_calls,
    "histories": different_histories,
    "operands": different_contents,
    "parameters": different_contents,
}
"""Functions that make the error for differing claims from the details of a group's ranks."""


class Consistency:
    """Checks that compare one rank with the other ranks of its mesh.

    Attributes:
        operands: plain operands of the sample group.
        parameters: parameters of the models that are parallelized on the mesh.
    """

    def __init__(self, mesh: Mesh) -> None:
        """Begins with nothing to compare. Created by `consistency_of`."""
        self._mixes = mesh.world.mixes
        self.operands, self.parameters = Contents(waits=self._mixes), TrainedParameters()
        self._shared: dict[tuple[str, ...], Contents] = {}
        self._claims: list[_Claim] = []
        self._weights: dict[tuple[str, ...], int] = {}
        self._sample_axes = mesh.grid.split(SAMPLE_AXES)
        self._split_axes = mesh.grid.split()

    def prove_equal(self, tensor: Tensor, mesh: Mesh, use: str) -> None:
        """Forms a checksum of a plain operand, and compares a new one over the sample group.

        Args:
            tensor: the operand.
            mesh: its mesh.
            use: its purpose.

        Raises:
            UsageError: this operand, or an earlier one, differs between the ranks; on all of them.
        """
        operands, first = self.operands, None
        uses = self.parameters.use_in(operands.turn, tensor)
        if uses == 0:
            return  # mostly used once in a turn, and compared in rotation
        if uses is not None:
            operands.repeats = uses
        else:
            first = operands.add(tensor, mesh.session.forwards, use)
        recurs = operands.repeats >= REPEATS - 1
        if first is None and not recurs and len(operands) < _MOST:
            return
        if recurs:
            self._add(operands, self.parameters.recurring, mesh, REPEATED_SHARES)
        group = mesh.sample
        # Without the module, which the ledger adds.
        what = "plain tensors" if first is None else first.text.partition(" in module ")[0]
        group.ledger.note(group, ("comparison of", what), waits=True)
        self._compare_operands(mesh)
        if recurs:
            self._end_turn(REPEATED_SHARES)

    def called(self, model: torch.nn.Module, mesh: Mesh, trains: bool) -> None:
        """Records a forward on a sharded sample; compares over its group if no backward follows.

        Args:
            model: the model.
            mesh: its mesh.
            trains: whether to expect a backward, which compares.
        """
        if mesh.sample_size == 1:
            return
        group = mesh.sample
        what = "forward in training" if trains else "forward without training"
        group.ledger.note(group, (what,), waits=True)
        if trains or is_capturing():
            return
        self._add(self.operands, self.parameters.of(model), mesh)
        self._compare_operands(mesh)
        self._end_turn()

    def _end_turn(self, shares: int = 1) -> None:
        self.operands.turn += shares
        self.parameters.recurring.clear()

    def _add(
        self, contents: Contents, parameters: Sequence[Tensor], mesh: Mesh, count: int = 1
    ) -> None:
        for operand, checksum, share in self.parameters.share(contents.turn, parameters, count):
            contents.add_checksum(operand, checksum, share, mesh.session.forwards)

    def _compare_operands(self, mesh: Mesh) -> None:
        """Compares the new checksums of `operands`. Collective over the sample group."""
        group = mesh.sample
        claims = [self._claim(self.operands, self._sample_axes), *_histories(mesh)]
        total = torch.tensor([self._share_of(claims, mesh)], device="cpu")
        group._all_reduce(total, "sum")
        if int(total):
            raise self._difference(mesh, claims, self._sample_axes)
        self.operands.confirm()

    def proof(self, mesh: Mesh) -> int:
        """Returns this rank's term of a sum that is 0 if all agree, at the end of a backward."""
        self._claims = [*_calls(mesh), *_histories(mesh), *self._checksums(mesh)]
        return self._share_of(self._claims, mesh)

    def conclude(self, mesh: Mesh, total: int) -> None:
        """Ends a comparison. Collective over the mesh.

        Args:
            mesh: the mesh.
            total: the sum of the results of `proof` over all ranks.

        Raises:
            UsageError: ranks differ; the same error on all of them.
        """
        if total:
            raise self._difference(mesh, self._claims, self._split_axes)
        for contents in (self.operands, *self._shared.values()):
            contents.confirm()

    def compare_histories(self, mesh: Mesh) -> None:
        """Compares the histories of the calls so far, where no backward does. Collective.

        Raises:
            UsageError: ranks differ; the same error on all of them.
        """
        if mesh.size > 1 and not is_capturing():
            claims = _histories(mesh)
            total = torch.tensor([self._share_of(claims, mesh)], device="cpu")
            mesh.world.all_reduce(total)
            if int(total):
                raise self._difference(mesh, claims, self._split_axes)

    def sum_parameters(
        self, mesh: Mesh, parameters: Mapping[tuple[str, ...], Sequence[Tensor]]
    ) -> None:
        """Forms checksums of this turn's share, which the end of the next backward compares.

        Args:
            mesh: the mesh.
            parameters: by the axes along which they are equal on all ranks, in the same order.
        """
        if mesh.size > 1 and not is_capturing():
            for axes, held in parameters.items():
                split = mesh.grid.split(axes)
                if not split:  # no other rank has them
                    continue
                contents = self._shared_along(split)
                self._add(contents, held, mesh)
                contents.turn += 1

    def sum_settings(self, mesh: Mesh, settings: Iterable[tuple[Operand, Tensor]]) -> None:
        """Forms checksums of a step's settings, which the end of the next backward compares.

        Args:
            mesh: the mesh; all its ranks step with these settings.
            settings: each with its values, on the host.
        """
        if mesh.size > 1 and not is_capturing():
            contents = self._shared_along(self._split_axes)
            if len(contents) > _MOST:  # steps without a backward that compares them
                return
            for setting, values in settings:
                contents.add_checksum(setting, Checksum(values), WHOLE, mesh.session.forwards)

    def _shared_along(self, axes: tuple[str, ...]) -> Contents:
        return self._shared.setdefault(axes, Contents(waits=self._mixes))

    def _checksums(self, mesh: Mesh) -> list[_Claim]:
        if mesh.size == 1 or is_capturing():
            return []
        operands = self._claim(self.operands, self._sample_axes)
        self._end_turn()
        return [operands, *(self._claim(each, axes) for axes, each in self._shared.items())]

    def _claim(self, contents: Contents, axes: tuple[str, ...]) -> _Claim:
        what = "operands" if contents is self.operands else "parameters"
        return _Claim(what, axes, contents.take(), contents.details)

    def _share_of(self, claims: Iterable[_Claim], mesh: Mesh) -> int:
        total = 0
        for each in claims:
            weight = self._weights.get(each.axes)
            if weight is None:
                weight = self._weights[each.axes] = _weight(mesh, each.axes)
            total += weight * each.value
        return _signed(total)

    def _difference(
        self, mesh: Mesh, claims: Sequence[_Claim], axes: tuple[str, ...]
    ) -> UsageError:
        """Returns the error for ranks that differ. Collective over the group along `axes`."""
        ranks = next(each for each in mesh.grid.groups(axes) if mesh.rank in each)
        mine = [[each.what, each.axes, each.value, each.details()] for each in claims]
        texts = gather_texts(mesh.group(axes), json.dumps(mine).encode()).values()
        heard: dict[tuple[str, tuple[str, ...]], dict[int, list[Any]]] = defaultdict(dict)
        for rank, text in zip(ranks, texts, strict=True):
            for what, of_axes, *value in json.loads(text):
                heard[what, tuple(of_axes)][rank] = value
        operands = heard.get(("operands", self._sample_axes))
        if operands is not None and len(operands) < len(ranks):
            return UsageError(f"{DIFFERENT}: some capture a CUDA graph, and others do not")
        for (what, of_axes), values in heard.items():
            for members in mesh.grid.groups(of_axes):
                said = {rank: values[rank] for rank in members if rank in values}
                if len({value for value, _ in said.values()}) > 1:
                    return _ERRORS[what]({rank: details for rank, (_, details) in said.items()})
        return UsageError(f"{DIFFERENT}, or the sum of what they compare is damaged")


def _calls(mesh: Mesh) -> list[_Claim]:
    return [
        _Claim("calls", axes, group.ledger.state, group.ledger.details)
        for axes, group in mesh.groups.items()
    ]


def _histories(mesh: Mesh) -> list[_Claim]:
    return [
        _Claim("histories", axes, group.ledger.history, recent_calls)
        for axes, group in mesh.groups.items()
        if "data" not in axes  # sample groups may have their own augmentations
    ]


def _weight(mesh: Mesh, axes: tuple[str, ...]) -> int:
    """Returns the weight of this rank's hashes within its group along `axes`."""
    group = next(ranks for ranks in mesh.grid.groups(axes) if mesh.rank in ranks)
    successor = group[(group.index(mesh.rank) + 1) % len(group)]
    mine, other = (
        int.from_bytes(blake2b(f"{axes} {rank}".encode(), digest_size=8).digest(), "little")
        for rank in (mesh.rank, successor)
    )
    return mine - other


def _signed(number: int) -> int:
    """Returns a number modulo 2**64 as a signed 64-bit integer."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def consistency_of(mesh: Mesh) -> Consistency:
    """Returns the consistency checks of a mesh, and creates them on first use."""
    found = mesh.session.find(Consistency)
    return found or mesh.session.service(Consistency, lambda: Consistency(mesh))


def is_capturing() -> bool:
    """Returns whether a CUDA graph is being captured, when tensors have no values."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
