"""Gathers the full state of a partitioned optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from pydist.errors import NotSupported
from pydist.exchange.own_slice import own_slice, slicing_of
from pydist.gradients.partitioned_bucket import ParameterPartition
from pydist.gradients.rows import shaped_like
from pydist.slices.steps import shown_as

if TYPE_CHECKING:
    from pydist.mesh import Mesh

ParameterState: TypeAlias = "dict[str, Any]"
"""The state of one parameter, such as moments, by name."""


def gather_state(
    mesh: Mesh,
    parameters: Sequence[Tensor],
    owned: Mapping[Tensor, Tensor],
    parts: Mapping[int, ParameterPartition],
    state: Mapping[Any, ParameterState],
) -> dict[Any, ParameterState]:
    """Gathers the full state by parameter, on every rank. Collective.

    Args:
        mesh: the mesh.
        parameters: the same ones on all ranks, in the same order.
        owned: this rank's part of a parameter, if it has one; the parameter if not partitioned.
        parts: the parts of partitioned parameters, by id.
        state: by the tensors in `owned`. Values with the shape of the part are parts themselves;
            others (a count of steps) are equal on all ranks, and so is the state of no parameter.

    Returns:
        The states of parameters that have one; those of sharded weights are sharded like them. And
        what `state_of_all` returns.
    """
    mine = [
        _describe(state.get(owned[p], {}), owned[p]) if p in owned and id(p) in parts else None
        for p in parameters
    ]
    everyones = mesh.world.all_gather_json(mine)
    whole = state_of_all(state)
    for index, parameter in enumerate(parameters):
        part = parts.get(id(parameter))
        if part is None:
            found = dict(state.get(parameter, {}))
        else:
            told: dict[str, Any] = next((each[index] for each in everyones if each[index]), {})
            own = state[owned[parameter]] if parameter in owned and told else {}
            slice_ = own_slice(parameter)
            found = {
                name: _gather(mesh, slice_, part, own.get(name), dtype)
                if kind == "part"
                else _decode(kind, dtype, value, slice_)
                for name, (kind, dtype, value) in told.items()
            }
            if slice_ is not parameter:
                found = shown_as(found, slice_, parameter)
        if found:
            whole[parameter] = found
    return whole


def state_of_all(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """Returns the state that belongs to no parameter, under keys that are no tensors."""
    return {key: values for key, values in state.items() if not isinstance(key, Tensor)}


def _describe(state: ParameterState, part: Tensor) -> dict[str, tuple[str, str, Any]]:
    """Describes a rank's state of one parameter, with the values that are not parts."""
    described = {}
    for name, value in state.items():
        if not isinstance(value, Tensor):
            described[name] = ("value", "", value)
            continue
        dtype = str(value.dtype).removeprefix("torch.")
        if value.shape == part.shape:
            described[name] = ("part", dtype, None)
        elif value.dim() == 0:
            # Fused steps count on the device, others on the host.
            kind = "scalar" if value.device == part.device else "scalar of the host"
            described[name] = (kind, dtype, value.item())
        else:
            raise NotSupported(
                f"the optimizer's state {name!r} of shape {tuple(value.shape)}, for a part of "
                f"shape {tuple(part.shape)}: it can't be gathered"
            )
    return described


def _decode(kind: str, dtype: str, value: Any, parameter: Tensor) -> Any:
    if kind == "value":
        return value
    device = parameter.device if kind == "scalar" else "cpu"
    return torch.tensor(value, dtype=getattr(torch, dtype), device=device)


def _gather(
    mesh: Mesh, parameter: Tensor, part: ParameterPartition, own: Tensor | None, dtype: str
) -> Tensor:
    row = torch.empty(parameter.numel(), dtype=getattr(torch, dtype), device=parameter.device)
    mine = row[:0] if own is None else own
    group = mesh.group(slicing_of(parameter).axes)
    group.all_gather_async(mine, row, part.counts).wait()
    return shaped_like(row, parameter)
