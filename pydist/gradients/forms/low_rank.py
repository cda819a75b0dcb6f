"""Implements PowerSGD: gradients as products of two thin matrices, with feedback of the error.

A gradient M [n, m] of a group becomes P = M Q, whose mean over the groups is orthonormalized, and
Q = Mᵀ P, whose mean is kept for the next step. Each group has the gradient P Qᵀ, and adds what that
lacks of its own M to its gradient of the next step. P and Q have r (n + m) elements.

Source: Vogels, Karimireddy and Jaggi (2019), arXiv:1905.13727, algorithms 1 and 2.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pydist.comm.interface.reduction import divide_
from pydist.gradients.forms.stateful import StatefulForm, divided, joined

if TYPE_CHECKING:
    from pydist.comm.interface.handles import Work
    from pydist.gradients.forms.messages import Messages
    from pydist.gradients.leaf import Leaf


class LowRankForm(StatefulForm):
    """Form that averages low-rank gradients between sample groups (PowerSGD).

    State of a parameter: "error" [n, m], what the group has not sent; "factor" [m, r], Q of the
    last step, which all groups share.
    """

    name = "powersgd"
    shared = frozenset({"factor"})

    def __init__(
        self,
        within: Messages,
        between: Messages,
        leaves: Iterable[Leaf],
        seed: int,
        *,
        rank: int,
        start: int,
        least_saving: float,
    ) -> None:
        """Takes the settings of `pydist.gradients.PowerSGD`."""
        self._rank, self._start, self._least = rank, start, least_saving
        super().__init__(within, between, leaves, seed)

    def quantities(self, name: str) -> Mapping[str, torch.Size]:
        """Returns the shapes of a parameter's error and factor; see `StatefulForm.quantities`."""
        n, m = _matrix(self.shapes[name])
        return {"error": torch.Size((n, m)), "factor": torch.Size((m, min(self._rank, n, m)))}

    def _compresses(self, leaf: Leaf) -> bool:
        n, m = _matrix(leaf.kind.shape)
        saves = n * m > self._least * (n + m) * min(self._rank, n, m)
        return self.steps >= self._start and len(leaf.kind.shape) > 1 and saves

    def _exchange_both(
        self,
        part: Tensor,
        compressed: Sequence[tuple[Leaf, Tensor]],
        plain: Sequence[tuple[Leaf, Tensor]],
    ) -> Iterator[Work]:
        if not compressed:
            yield from self._average(part)
            return
        matrices = [self._with_error(leaf, piece) for leaf, piece in compressed]
        factors = [_orthonormal(self._factor(leaf, m)) for (leaf, _), m in zip(
            compressed, matrices, strict=True)]  # fmt: skip
        left = [m @ q for m, q in zip(matrices, factors, strict=True)]
        message = joined([*left, *(piece for _, piece in plain)], part)
        yield from self._average(message)
        found = divided(message, [*(p.shape for p in left), *(x.shape for _, x in plain)])
        for (_, piece), mean in zip(plain, found[len(left) :], strict=True):
            piece.copy_(mean)
        left = [_orthonormal(p) for p in found[: len(left)]]
        right = [m.T @ p for m, p in zip(matrices, left, strict=True)]
        message = joined(right, part)
        yield self._last(self.between.all_reduce(message))
        divide_(message, self.between.size)
        right = divided(message, [q.shape for q in right])
        for (leaf, piece), m, p, q in zip(compressed, matrices, left, right, strict=True):
            mean = p @ q.T
            piece.copy_(mean.view(piece.shape)).mul_(self.scale)
            self._changed[leaf.name] = {"error": m.sub_(mean), "factor": q.clone()}

    def _with_error(self, leaf: Leaf, piece: Tensor) -> Tensor:
        """Returns a gradient [n, m] without loss scale, and with what was not sent before."""
        matrix = piece.reshape(_matrix(leaf.kind.shape)).div(self.scale)
        kept = self.state.get(leaf.name)
        return matrix if kept is None else matrix.add_(kept["error"])

    def _factor(self, leaf: Leaf, matrix: Tensor) -> Tensor:
        kept = self.state.get(leaf.name)
        if kept is not None:
            return kept["factor"]
        m, r = self.quantities(leaf.name)["factor"]
        return self._drawn(leaf.name, (m, r), matrix)


def _matrix(shape: torch.Size) -> tuple[int, int]:
    """Returns rows and columns of a gradient as a matrix, whose rows are the output channels."""
    n = shape[0] if shape else 1
    return n, shape.numel() // n if n else 0


def _orthonormal(columns: Tensor) -> Tensor:
    """Returns an orthonormal basis that includes the columns' span; NaN if they are not finite."""
    basis: Tensor = torch.linalg.qr(columns)[0]
    return torch.where(torch.isfinite(columns).all(), basis, torch.nan)
