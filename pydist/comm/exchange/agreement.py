"""Agreement: what the ranks of a mesh compare with each other while a program runs.

That they started the same calls in the same order (`Ledger`), that the plain operands of a sample
group are equal on all of its ranks, and the parameters on all ranks (`Contents`). At the end of
each backward one small message holds the hashes of all this. It travels with the last gradients and
is read before the backward returns, so that no optimizer uses what belongs to other calls. It goes
between hosts, also where the gradients are on devices, and no host waits for a device.

Where the hashes differ, all ranks of the mesh see that, and tell each other the details: all raise
the same error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pydist.comm.exchange.contents import (
    REPEATED_SHARES,
    REPEATS,
    Contents,
    Parameters,
    different_contents,
)
from pydist.comm.interface.handles import Work
from pydist.comm.interface.ledger import different_calls, gather_texts

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from pydist.comm.interface.transport import Transport
    from pydist.errors import UsageError
    from pydist.mesh import Mesh

_MOST = 512
"""Checksums that wait for a comparison, where no backward comes."""


class Agreement:
    """What one rank compares with the others of its mesh.

    Attributes:
        operands: of the sample group.
        parameters: of the models that are parallelized on the mesh.
    """

    def __init__(self, mesh: Mesh) -> None:
        """Begin with nothing compared. Made by `agreement_of`."""
        self.operands, self.parameters = Contents(), Parameters()
        self._shared = Contents()
        self._first_of = {axes: mesh.first_ranks(axes) for axes in mesh.distinct_axes}
        self._everyone = [0] * mesh.size

    def prove_equal(self, tensor: Tensor, mesh: Mesh, use: str) -> None:
        """Sums a plain operand, and compares it over the sample group if it is new.

        Args:
            tensor: the operand.
            mesh: its mesh.
            use: what it is used for.

        Raises:
            UsageError: it, or one before it, differs between the ranks; on all of them.
        """
        first, parameter = None, self.parameters.operand(tensor)
        if parameter is None:
            first = self.operands.add(tensor, mesh.forwards, use)
        else:
            self.operands.count_use(parameter)  # compared in rotation, mostly elsewhere
        recurs = self.operands.repeats >= REPEATS - 1
        if first is not None or recurs or len(self.operands) >= _MOST:
            if recurs:
                parameters = self.parameters.recurring_in(self.operands.turn)
                self._add(self.operands, parameters, mesh, REPEATED_SHARES)
            group = mesh.sample
            # Without the module, which the ledger adds.
            what = "plain tensors" if first is None else first.text.partition(" in module ")[0]
            group.ledger.note(group, ("comparison of", what), waits=True)
            self._compare_operands(mesh)
            if recurs:
                self.operands.turn += REPEATED_SHARES

    def called(self, model: torch.nn.Module, mesh: Mesh, trains: bool) -> None:
        """Notes a forward on a sharded sample; without backward, compares over its group.

        Args:
            model: the model.
            mesh: its mesh.
            trains: whether a backward is to be expected, which compares.
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
        self.operands.turn += 1

    def _add(
        self, contents: Contents, parameters: Sequence[Tensor], mesh: Mesh, count: int = 1
    ) -> None:
        for operand, checksum, share in self.parameters.share(contents.turn, parameters, count):
            contents.add_checksum(operand, checksum, share, mesh.forwards)

    def _compare_operands(self, mesh: Mesh) -> None:
        """Compares what is new in `operands`. Collective over the sample group."""
        group = mesh.sample
        mine = torch.tensor(self.operands.take(), device="cpu")
        rows = torch.empty(group.size, 2, dtype=torch.int64, device="cpu")
        group._all_gather(mine, rows)
        if not bool((rows == mine).all()):
            raise different_contents(gather_texts(group, self.operands.details()))
        self.operands.confirm()

    def start(self, mesh: Mesh, parameters: Sequence[Tensor]) -> Work:
        """Starts to compare, at the end of a backward. Collective over the mesh.

        Args:
            mesh: the mesh.
            parameters: that all ranks hold equally, in one order.

        Returns:
            Its `wait` raises `UsageError` where ranks differ, on all of them.
        """
        if mesh.size == 1:
            return Work()
        columns: list[_Column] = []
        for axes, first_of in self._first_of.items():
            ledger = mesh.group(axes).ledger
            columns.append(
                _Column(first_of, (ledger.count, ledger.state), ledger.details, different_calls)
            )
        if not is_capturing():
            self._add(self._shared, parameters, mesh)
            group = self._first_of.get(mesh.sample_axes, list(range(mesh.size)))
            for contents, first_of in ((self.operands, group), (self._shared, self._everyone)):
                columns.append(
                    _Column(first_of, contents.take(), contents.details, different_contents)
                )
                contents.turn += 1
        return _Comparison(mesh.world, columns, (self.operands, self._shared))


class _Column:
    """A part of the message.

    Attributes:
        first_of: for each rank of the mesh the first rank of the group that compares.
        mine: what this rank says.
        details: what it adds where ranks differ.
        error: made of the details of a group.
    """

    def __init__(
        self,
        first_of: list[int],
        mine: tuple[int, int],
        details: Callable[[], bytes],
        error: Callable[[dict[int, bytes]], UsageError],
    ) -> None:
        self.first_of, self.mine, self.details, self.error = first_of, mine, details, error


class _Comparison(Work):
    """A message of all ranks under way."""

    def __init__(
        self, transport: Transport, columns: list[_Column], contents: tuple[Contents, ...]
    ) -> None:
        self._transport, self._columns, self._contents = transport, columns, contents
        mine = torch.tensor([each.mine for each in columns], device="cpu")
        self._rows = torch.empty(transport.size, *mine.shape, dtype=torch.int64, device="cpu")
        self._work: Work | None = transport.all_gather_async(mine, self._rows)

    def wait(self) -> None:
        """See `Work.wait`.

        Raises:
            UsageError: ranks differ; the same error on all of them.
        """
        if self._work is None:
            return
        work, self._work = self._work, None
        work.wait()
        same = bool((self._rows == self._rows[0]).all())  # mostly, if there is one sample group
        for number, column in enumerate(() if same else self._columns):
            rows = self._rows[:, number]
            differs = (rows != rows[column.first_of]).any(1)
            if not bool(differs.any()):
                continue
            first = column.first_of[int(differs.nonzero()[0])]
            heard = gather_texts(self._transport, column.details())
            raise column.error(
                {rank: heard[rank] for rank, each in enumerate(column.first_of) if each == first}
            )
        for contents in self._contents:
            contents.confirm()


def agreement_of(mesh: Mesh) -> Agreement:
    """The agreement of a mesh, made when it is first asked for."""
    if mesh.agreement is None:
        mesh.agreement = Agreement(mesh)
    return mesh.agreement


def is_capturing() -> bool:
    """Whether a CUDA graph is captured: there are no numbers then."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
