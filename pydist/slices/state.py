"""Gathers and sets the whole network's state of models with sharded weights."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from pydist.errors import UsageError
from pydist.exchange.own_slice import is_sharded_weight
from pydist.grid import AXES
from pydist.layout import Layout
from pydist.slices.whole_state import WholeCopy, WholeState
from pydist.tensor import ShardedTensor, local_of


class _Target(threading.local):
    """Whether state is gathered on rank 0 only; thread-local, as ranks can be threads."""

    is_rank_0 = False


_target = _Target()


@contextmanager
def state_on_rank_0() -> Iterator[None]:
    """Gathers the state of sharded weights on rank 0 only, one tensor after the other.

    Within the block `state_dict()` of a model, and of an optimizer of its weights, is still called
    on all ranks; it is whole on rank 0, which saves it, and has slices on the others. So no other
    rank needs memory for the whole network.
    """
    before, _target.is_rank_0 = _target.is_rank_0, True
    try:
        yield
    finally:
        _target.is_rank_0 = before


def sharded_in(module: nn.Module) -> list[tuple[str, ShardedTensor]]:
    """Returns the sharded weights of a module itself, without its children's."""
    found: Any = module._parameters.items()
    return [(name, p) for name, p in found if p is not None and is_sharded_weight(p)]


def install(module: nn.Module) -> None:
    """Replaces the state of a module by the state of the whole network."""
    module.register_state_dict_post_hook(_gather_weights)
    module.register_load_state_dict_pre_hook(_refuse_assignment)


def gathered(x: ShardedTensor) -> Tensor:
    """Returns the whole tensor on all ranks, or within `state_on_rank_0` on rank 0. Collective.

    Elsewhere it returns the sharded tensor.

    Args:
        x: sharded weight, optimizer state, or a buffer computed from weights.
    """
    cut = [(d, s) for d, s in enumerate(x.layout.splits) if s is not None]
    if not cut:
        return x.full_tensor().detach().clone()
    ((dim, split),) = cut  # along the channel axis
    mesh, own = x.mesh, local_of(x).detach().contiguous()
    group = mesh.group(split.axes)
    to_first = _target.is_rank_0
    if to_first and any(mesh.coords[axis] for axis in AXES if axis not in split.axes):
        return x  # another rank has the same slice
    if to_first and group.rank != 0:
        if own.numel():
            group.send(own, 0)
        return x
    whole = torch.empty(x.layout.shape, dtype=own.dtype, device=own.device)
    for rank in range(group.size):
        lo, hi = split.partition.interval(rank)
        place = whole.narrow(dim, lo, hi - lo)
        part = own if rank == group.rank else torch.empty_like(place).contiguous()
        if not to_first:
            group.broadcast(part, rank)
        elif rank != 0 and part.numel():
            group.recv(part, rank)
        place.copy_(part)
    return whole


def layout_of_slices(parameter: Tensor) -> Layout | None:
    """Returns the layout of a sharded weight; `None` of other parameters."""
    if isinstance(parameter, ShardedTensor) and is_sharded_weight(parameter):
        return parameter.layout
    return None


def own_part(whole: Tensor, layout: Layout) -> Tensor:
    """Returns a copy of this rank's part of a whole tensor."""
    return whole[layout.box.slices].clone()


def note_call(x: ShardedTensor, what: str) -> None:
    """Names a collective call, for the error if one rank alone makes it."""
    group = x.mesh.sample
    group.ledger.note(group, (what,), waits=True)


def _gather_weights(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Replaces the slices in a module's state by whole tensors, unless they are `keep_vars`."""
    for key, weight in _slices_of(module, prefix):
        if isinstance(state.get(key), ShardedTensor) and state[key] is not weight:
            note_call(
                weight, f"state_dict() with the sharded weight {key!r}, to be called on all ranks"
            )
            state[key] = _as_state(key, weight, state)


def _slices_of(module: nn.Module, prefix: str) -> Iterator[tuple[str, ShardedTensor]]:
    """Yields sharded weights, buffers computed from them, and those of modules that came later."""
    for name, x in (*module._parameters.items(), *module._buffers.items()):
        if isinstance(x, ShardedTensor) and x._origin.sizes.of_weight:
            yield prefix + name, x
    for name, child in module._modules.items():
        if child is not None and _gather_weights not in child._state_dict_hooks.values():
            yield from _slices_of(child, f"{prefix}{name}.")


@torch.inference_mode(False)
def _as_state(key: str, weight: ShardedTensor, state: Mapping[str, Any]) -> Tensor:
    """Returns a sharded weight as part of a state, where another module may have it already."""
    for each in state.values():
        if isinstance(each, WholeState) and each.copied.weight is weight and each.copied.is_current:
            return each
    whole = gathered(state[key])
    return whole if _target.is_rank_0 else WholeState(whole, WholeCopy(key, weight, whole))


def _refuse_assignment(
    module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *_: Any
) -> None:
    sharded = sharded_in(module) if metadata.get("assign_to_params_buffers") else []
    if sharded:
        raise UsageError(
            f"load_state_dict(assign=True) of {prefix + sharded[0][0]!r}, a sharded weight: it "
            "would become whole on this rank; load without assign"
        )
