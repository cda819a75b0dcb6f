"""Dropout whose mask does not know the split: it is keyed by position."""

from __future__ import annotations

import hashlib
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pydist._loader import native
from pydist.errors import UsageError
from pydist.mesh import Mesh
from pydist.tensor import (
    HANDLERS,
    Origin,
    ShardedTensor,
    adopt_local,
    local_of,
    module_path,
    refusal,
    wrap,
)

# Forward passes whose dropout calls are remembered, for activation checkpointing's second run.
_REMEMBERED = 64


def dropout(
    func: Any,
    per_channel: bool,
    input: ShardedTensor,
    p: float = 0.5,
    training: bool = True,
    inplace: bool = False,
) -> ShardedTensor:
    """Zeroes elements (or channels) with probability p and scales the rest by 1 / (1 - p).

    The random numbers are a function of the seed, the training step, the module, and the element's
    place in the global batch: every split and every rerun draws the same mask.
    """
    if not 0 <= p <= 1:
        raise UsageError(f"dropout probability {p}: 0 to 1 is possible")
    local = local_of(input)
    if not training or p == 0:
        return input
    key = _key(input.mesh, input._origin, func, input)
    mask = _mask(input, local, key, p, per_channel)
    if inplace:
        return adopt_local(input, local.mul_(mask))
    return wrap(local * mask, input._layout, input)


def _mask(x: ShardedTensor, local: Tensor, key: int, p: float, per_channel: bool) -> Tensor:
    box, first = x._layout.box, x._origin.first_sample
    lo, shape = list(box.lo), list(x.shape)
    lo[0] += first
    shape[0] += first
    extents = list(local.shape)
    if per_channel:
        lo, shape, extents = lo[:2], shape[:2], extents[:2]
    uniform = torch.empty(extents, dtype=torch.float32)
    native.keyed_uniform(uniform, key, lo, shape)
    keep = (uniform >= p).to(local.dtype)
    if p < 1:
        keep.div_(1 - p)
    return keep.view(*extents, *(1 for _ in range(local.dim() - len(extents))))


def _key(mesh: Mesh, origin: Origin, func: Any, x: ShardedTensor) -> int:
    """The key of one dropout call: seed, step, module, and the how-manieth call in that module."""
    layer = module_path()
    calls = mesh.draws.setdefault(origin.forward, {})
    while len(mesh.draws) > _REMEMBERED:
        mesh.draws.pop(next(iter(mesh.draws)))
    if torch._C._current_graph_task_id() != -1:
        # Inside backward: activation checkpointing runs the call again, and wants the same mask.
        if calls.get(layer) != 1:
            why = "called more than once in this module under activation checkpointing"
            raise refusal(func, (x,), {}, why)
        number = 0
    else:
        number = calls.get(layer, 0)
        calls[layer] = number + 1
    text = f"{mesh.seed}/{origin.forward}/{layer}/{number}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def _register() -> None:
    for func, per_channel in (
        (F.dropout, False),
        (torch.dropout, False),
        (F.dropout1d, True),
        (F.dropout2d, True),
        (F.dropout3d, True),
    ):
        HANDLERS[func] = partial(dropout, func, per_channel)


_register()
