"""Runs of calls that are given as text, on one device and on shards, with two derivatives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from pydist import Mesh
from pydist.errors import NotSupported
from pydist.exchange.adjoints import mean_ranks
from pydist.grid import SAMPLE_AXES
from support.equivalence import Points, error, layout_at, randint, randn, shard, whole_of

POINTS: dict[int, list[Points]] = {
    5: [[0, 2, 6], None, None],
    4: [[0, 3, 8], None],
    3: [[0, 5, 12]],
}
"""Split points of tensors by their number of dims, batch and channels included."""

TYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.float32}
"""Dtypes of the table's columns; bf16 is autocast of fp32."""

NARROW = "narrow"
"""Autocast of tensors that are bf16 already, as between the layers of a network."""

FAR = {"fp64": 1e-10, "fp32": 1e-4, "bf16": 6e-2, NARROW: 6e-2}
"""Largest allowed distance from one device. (Tighter bounds are in the tests of each call; here,
differences of kernels between machines must not change the table.)"""

NOT_THERE = (RuntimeError, NotImplementedError, TypeError, ValueError, AttributeError)


def _values() -> dict[str, Tensor]:
    x, y = randn(2, 4, 6, 4, 4), randn(2, 4, 6, 4, 4, seed=1)
    return {
        "x": x,
        "y": y,
        "u": 0.2 + 0.6 * x.sigmoid(),
        "v": 0.2 + 0.6 * y.sigmoid(),
        "x1": randn(2, 4, 12),
        "x2": randn(2, 4, 8, 6),
        "mask": y > 0.5,
        "labels": randint(4, 2, 6, 4, 4),
    }


VALUES = _values()


def assigned(x: Tensor, y: Tensor) -> Tensor:
    """Returns x after an assignment to a slice, which is not an expression."""
    x = x * 1
    x[:, :2] = y[:, 2:]
    return x


class Names(dict[str, Any]):
    """Namespace of a text that makes each tensor a leaf when the text first uses it."""

    def __init__(self, dtype: torch.dtype, mesh: Mesh | None, device: str) -> None:
        super().__init__()
        self.leaves: list[Tensor] = []
        self._dtype, self._mesh, self._device = dtype, mesh, device

    def __missing__(self, name: str) -> Any:
        if name == "p":
            return self._parameter
        if name not in VALUES:
            raise KeyError(name)
        whole = VALUES[name]
        whole = whole.to(self._device, self._dtype if whole.is_floating_point() else None)
        if self._mesh is None:
            leaf = whole.clone().requires_grad_(whole.is_floating_point())
        else:
            points = POINTS[5 if name == "labels" else whole.dim()]
            points = points if self._mesh.sample_size > 1 else []
            leaf = shard(whole, layout_at(self._mesh, whole.shape, points))
        if leaf.requires_grad:
            self.leaves.append(leaf)
        self[name] = leaf
        return leaf

    def _parameter(self, *shape: int) -> nn.Parameter:
        seed = 10 + len(self.leaves)
        values = (randn(*shape, seed=seed) / 2).to(self._device, self._dtype)
        made = nn.Parameter(values)
        self.leaves.append(made)
        return made


def run(
    text: str, kind: str, mesh: Mesh | None = None, device: str = "cpu"
) -> Iterator[list[Tensor]]:
    """Yields the results of a text, then the first, then the second derivatives.

    Each is computed on demand, so that the order of a refused derivative is known.
    """
    names = Names(TYPES.get(kind, torch.bfloat16), mesh, device)
    mixed = kind in ("bf16", NARROW)
    with torch.autocast(device, torch.bfloat16) if mixed else nullcontext():
        result = eval(text, {"torch": torch, "F": F, "assigned": assigned}, names)
    found = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
    yield [whole_of(t).detach().cpu() for t in found]
    loss = _loss(t for t in found if t.requires_grad)
    if not isinstance(loss, Tensor):
        return
    for _ in range(2):
        grads = torch.autograd.grad(
            loss, names.leaves, create_graph=True, allow_unused=True, materialize_grads=True
        )
        true = [
            _true(g, mesh, isinstance(leaf, nn.Parameter))
            for g, leaf in zip(grads, names.leaves, strict=True)
        ]
        yield [whole_of(g).detach().cpu() for g in true]
        loss = sum((g.double() ** 2).sum() for g in true)
        if not isinstance(loss, Tensor) or not loss.requires_grad:
            return


def _loss(found: Iterator[Tensor]) -> Tensor | int:
    """Returns a loss of second degree, so that linear calls have nonzero second derivatives."""
    return sum((t.double().square() * randn(*t.shape, seed=3).to(t.device)).sum() for t in found)


def _true(grad: Tensor, mesh: Mesh | None, is_parameter: bool) -> Tensor:
    return mean_ranks(grad, mesh, SAMPLE_AXES) if is_parameter and mesh is not None else grad


ORDERS = "FBD"


def on_one_device(text: str, kind: str, device: str = "cpu") -> list[list[Tensor]]:
    """Returns the results and as many derivatives as torch has."""
    found: list[list[Tensor]] = []
    steps = run(text, kind, device=device)
    try:
        for each in steps:
            found.append(each)
    except NOT_THERE:
        pass
    return found


def cell(
    text: str, kind: str, expected: Sequence[list[Tensor]], mesh: Mesh, device: str = "cpu"
) -> str:
    """Returns the table's entry for a call: the equal orders, and dots for orders torch lacks."""
    said = ""
    steps = run(text, kind, mesh, device)
    for order, whole in zip(ORDERS, expected, strict=False):
        try:
            found = next(steps)
        except NotSupported:
            return f"{said}, then refused" if said else "refused"
        except StopIteration:
            raise AssertionError(f"{text}, {kind}: {order} is missing") from None
        assert len(found) == len(whole), (text, kind, order)
        for mine, theirs in zip(found, whole, strict=True):
            assert mine.dtype == theirs.dtype, (text, kind, order, mine.dtype, theirs.dtype)
            far = error(mine, theirs)
            assert far <= FAR[kind], f"{text}, {kind}, {order}: {far}"
        said += order
    return said.ljust(3, "·") if said else "·"
