"""Selects this rank's slice of a sharded weight; see `pydist.slices`."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from pydist.grid import AXES

_SLICING = "_pydist_slicing"


class Slicing(NamedTuple):
    """What all ranks know of a slice.

    Attributes:
        axes: the axes of the mesh along which ranks hold equal copies of it.
        even: elements that it has if all slices of the weight are equally large.
    """

    axes: tuple[str, ...]
    even: int


def own_slice(parameter: Tensor) -> Tensor:
    """Returns this rank's slice of a sharded weight, a leaf of the graph; else the parameter."""
    held = parameter.__dict__
    # Any other sharded tensor is data of its sample group, also as a torch.nn.Parameter.
    found: Tensor = held["_shard"] if "_is_weight" in held else parameter
    return found


def is_sharded_weight(tensor: Tensor) -> bool:
    """Returns whether the ranks hold slices of a parameter."""
    return own_slice(tensor) is not tensor


def set_slicing(slice_: Tensor, slicing: Slicing) -> None:
    """Records what all ranks know of a slice."""
    setattr(slice_, _SLICING, slicing)


def slicing_of(parameter: Tensor) -> Slicing:
    """Returns what all ranks know of a slice, or of a parameter that is whole on all ranks."""
    found: Slicing | None = getattr(parameter, _SLICING, None)
    return found or Slicing(AXES, parameter.numel())
