"""Gathers the full state of a partitioned optimizer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from pydist.errors import NotSupported
from pydist.gradients.partitioned_bucket import ParameterPartition
from pydist.gradients.rows import shaped_like

if TYPE_CHECKING:
    from pydist.comm import Transport

ParameterState: TypeAlias = "dict[str, Any]"
"""The state of one parameter, such as moments, by name."""


def gather_state(
    world: Transport,
    parameters: Sequence[Tensor],
    owned: Mapping[Tensor, Tensor],
    parts: Mapping[int, ParameterPartition],
    state: Mapping[Tensor, ParameterState],
) -> dict[Tensor, ParameterState]:
    """Gathers the full state by parameter, on every rank. Collective.

    Args:
        world: connects the ranks that have the parts.
        parameters: the same ones on all ranks, in the same order.
        owned: this rank's part of a parameter, if it has one; the parameter if not partitioned.
        parts: the parts of partitioned parameters, by id.
        state: by the tensors in `owned`. Values with the shape of the part are parts themselves;
            others (a count of steps) are equal on all ranks.

    Returns:
        The states of parameters that have one.
    """
    mine = [
        _describe(state.get(owned[p], {}), owned[p]) if p in owned and id(p) in parts else None
        for p in parameters
    ]
    everyones = [json.loads(each) for each in world.all_gather_bytes(json.dumps(mine).encode())]
    whole: dict[Tensor, ParameterState] = {}
    for index, parameter in enumerate(parameters):
        part = parts.get(id(parameter))
        if part is None:
            found = dict(state.get(parameter, {}))
        else:
            told: dict[str, Any] = next((each[index] for each in everyones if each[index]), {})
            own = state[owned[parameter]] if parameter in owned and told else {}
            found = {
                name: _gather(world, parameter, part, own.get(name), dtype)
                if kind == "part"
                else _decode(kind, dtype, value, parameter)
                for name, (kind, dtype, value) in told.items()
            }
        if found:
            whole[parameter] = found
    return whole


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
    world: Transport, parameter: Tensor, part: ParameterPartition, own: Tensor | None, dtype: str
) -> Tensor:
    row = torch.empty(parameter.numel(), dtype=getattr(torch, dtype), device=parameter.device)
    mine = row[:0] if own is None else own
    world.all_gather_async(mine, row, part.counts).wait()
    return shaped_like(row, parameter)
