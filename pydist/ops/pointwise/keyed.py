"""Draws random numbers that depend on seed, training step, module and position only."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pydist._loader import native
from pydist.errors import NotSupported
from pydist.tensor import ShardedTensor, local_of, module_path, refusal

if TYPE_CHECKING:
    from pydist.mesh import Mesh

# Number of forward passes whose draws are kept, for activation checkpointing's second run.
_REMEMBERED = 64

# Maximum number of draws in a captured step.
_REPLAYED = 4096


class Draw:
    """Random numbers that one call draws: a function of the position in the global batch.

    Args:
        func: torch's call, for errors.
        x: the tensor of the call, which gives the mesh, the forward pass and the global batch.
        shape: the global shape of the numbers, whose dim 0 are the samples, or rows of them.
    """

    def __init__(self, func: Callable[..., Any], x: ShardedTensor, shape: Sequence[int]) -> None:
        self._shape, self._first = list(shape), 0
        sizes = x._origin.sizes
        has_place = bool(self._shape) and sizes.after is not None
        if self._shape and not sizes.of_weight:  # all groups have the same weight
            rows, rest = divmod(self._shape[0], sizes.own) if sizes.own else (1, 0)
            has_place &= not rest
            # A sample may have several rows by now.
            first = sizes.first_sample if has_place else sizes.first_in_pass
            self._first = first * (1 if rest else rows)
            self._shape[0] += self._first
        self._device = x.device
        # Without a place after the samples of earlier passes, a pass has numbers of its own.
        self._key = _next_key(func, x, 0 if has_place else sizes.part)

    def uniform(self, lo: Sequence[int], extents: Sequence[int]) -> Tensor:
        """Returns the uniform fp32 numbers in [0, 1) of a box; equal at every call.

        Args:
            lo: its first position, in the shape of the numbers.
            extents: its shape.
        """
        uniform = torch.empty(list(extents), dtype=torch.float32, device=self._device)
        if self._shape:
            at = [lo[0] + self._first, *lo[1:]]
            native.keyed_uniform(uniform, self._key, at, self._shape)
        else:
            native.keyed_uniform(uniform.view(1), self._key, [0], [1])
        return uniform


def keyed_uniform(func: Callable[..., Any], x: ShardedTensor, dims: int | None = None) -> Tensor:
    """Draws uniform fp32 numbers in [0, 1) for the positions of this rank's shard of `x`.

    Every split and every rerun draws the same number for an element of the global batch. Each call
    draws new numbers.

    Args:
        func: torch's call, for errors.
        x: the tensor; its device is the result's.
        dims: draw one number per position in the first `dims` dims; `None` for all dims.
    """
    extents = list(local_of(x).shape)
    count = len(extents) if dims is None else dims
    draw = Draw(func, x, x.layout.shape[:count])
    lo = x.layout.box.lo[:count] if count else []
    return _expandable(draw.uniform(lo, extents[:count]), extents)


def _expandable(numbers: Tensor, extents: Sequence[int]) -> Tensor:
    return numbers.view((*numbers.shape, *(1 for _ in range(len(extents) - numbers.dim()))))


def _next_key(func: Callable[..., Any], x: ShardedTensor, part: int) -> int | Tensor:
    """Returns the key of one draw: of the seed, step, module, and number of the module's draw.

    During the capture of a CUDA graph, returns the memory of the key of each replay.

    Args:
        func: torch's call, for errors.
        x: the tensor of the call.
        part: of the pass in the step; 0 for numbers that all passes of a step share.
    """
    mesh, forward, sizes = x.mesh, x._origin.forward, x._origin.sizes
    layer = module_path()
    if sizes.of_weight:  # older than the step; its draws count apart from those of one group alone
        forward, layer = mesh.session.forwards, f"{layer} on weights"
    draws = draws_of(mesh)
    calls = draws.begin(forward, sizes.part)
    if torch._C._current_graph_task_id() != -1:
        # In backward activation checkpointing reruns the call, and needs the same numbers.
        if sizes.of_weight:
            why = "of a sharded weight, under activation checkpointing"
            raise refusal(func, (x,), {}, why)
        if not layer:
            why = "under activation checkpointing in no module's method: give it one (nn.Dropout)"
            raise refusal(func, (x,), {}, why)
        if layer not in calls:
            why = (
                "in a model that a checkpoint repeats, but not once as a whole: put the checkpoint "
                "around one call of the model, or around parts of it"
            )
            raise refusal(func, (x,), {}, why)
        if calls[layer] != 1:
            why = "called more than once in this module under activation checkpointing"
            raise refusal(func, (x,), {}, why)
        number = 0
    else:
        number = calls.get(layer, 0)
        calls[layer] = number + 1
    if draws.replayed is not None:
        return draws.replayed.place_of(layer, number)
    return _key(mesh, forward, layer, number, part)


class Draws:
    """Counts of the random draws that each module has made, by forward pass."""

    def __init__(self) -> None:
        self._calls: dict[tuple[int, int], dict[str, int]] = {}
        self.replayed: ReplayedKeys | None = None
        """Keys of the step being captured, read by each replay; `None` outside of a capture."""

    def begin(self, forward: int, part: int) -> dict[str, int]:
        """Returns the draw counts of a pass of a step by module, which the caller updates."""
        calls = self._calls.setdefault((forward, part), {})
        while len(self._calls) > _REMEMBERED:
            self._calls.pop(next(iter(self._calls)))
        return calls

    def forget(self, forward: int) -> None:
        """Resets the draw counts of a step of one pass."""
        self._calls.pop((forward, 0), None)

    def rewind(self, forward: int) -> None:
        """Resets the draw counts of all steps after one."""
        self._calls = {key: calls for key, calls in self._calls.items() if key[0] <= forward}


def draws_of(mesh: Mesh) -> Draws:
    """Returns the draw counts of a mesh."""
    return mesh.session.service(Draws, Draws)


class ReplayedKeys:
    """Keys of a captured step, in memory that every replay reads.

    Args:
        mesh: of the step; its draws have this object as `replayed` while the step is captured.
        device: of the step.
    """

    def __init__(self, mesh: Mesh, device: torch.device) -> None:
        self._mesh = mesh
        # Allocated before the capture: otherwise every replay would zero it again.
        self._table = torch.zeros(_REPLAYED, dtype=torch.int64, device=device)
        self._places: dict[tuple[str, int], int] = {}

    def place_of(self, layer: str, number: int) -> Tensor:
        """Returns the memory of the key of a module's draw, one int64.

        Raises:
            NotSupported: the step draws too often.
        """
        place = self._places.setdefault((layer, number), len(self._places))
        if place >= _REPLAYED:
            raise NotSupported(f"a step that draws more than {_REPLAYED} times")
        return self._table[place : place + 1]

    def renew(self) -> None:
        """Enqueues a copy of the keys of the mesh's current forward pass to the device."""
        if not self._places:
            return
        mesh = self._mesh
        keys = [_key(mesh, mesh.session.forwards, layer, number) for layer, number in self._places]
        # Pinned, so that the host does not wait; torch keeps the memory until the copy is done.
        signed = torch.tensor(
            [key - (1 << 64) if key >> 63 else key for key in keys],
            dtype=torch.int64,
            pin_memory=self._table.is_cuda,
        )
        self._table[: len(keys)].copy_(signed, non_blocking=True)


def _key(mesh: Mesh, forward: int, layer: str, number: int, part: int = 0) -> int:
    text = f"{mesh.seed}/{forward}/{layer}/{number}" + (f"/{part}" if part else "")
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
