"""Selects this rank's slice of a sharded weight; see `pydist.slices`."""

from __future__ import annotations

from torch import Tensor

from pydist.grid import AXES

_COPIES = "_pydist_axes_of_copies"


def own_slice(parameter: Tensor) -> Tensor:
    """Returns this rank's slice of a sharded weight, a leaf of the graph; else the parameter."""
    held = parameter.__dict__
    # A sharded tensor that is not a parameter is data of its sample group.
    found: Tensor = held["_shard"] if "_is_param" in held and "_shard" in held else parameter
    return found


def is_sharded_weight(tensor: Tensor) -> bool:
    """Returns whether the ranks hold slices of a parameter."""
    return own_slice(tensor) is not tensor


def set_axes_of_copies(slice_: Tensor, axes: tuple[str, ...]) -> None:
    """Records the axes of the mesh along which ranks hold equal copies of a slice."""
    setattr(slice_, _COPIES, axes)


def axes_of_copies(parameter: Tensor) -> tuple[str, ...]:
    """Returns the axes of the mesh along which ranks hold equal copies of a parameter."""
    found: tuple[str, ...] = getattr(parameter, _COPIES, AXES)
    return found
