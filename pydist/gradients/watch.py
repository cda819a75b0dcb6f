"""Refuses an optimizer step with gradients that were not reduced, and names the parameter."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from pydist.errors import NotSupported
from pydist.gradients.leaf import leaf_of
from pydist.gradients.newcomers import refuse_parting
from pydist.gradients.scattered import ScatteredGradient

if TYPE_CHECKING:
    from pydist.mesh import Mesh

# Of plain tensors that require a gradient: the mesh whose sharded tensors they were used with. Not
# an attribute of them, which could not be pickled.
_meshes = WeakIdKeyDictionary()
_installed: list[object] = []


def note_plain(tensor: Tensor, mesh: Mesh) -> None:
    """Notes a leaf that is no parameter, so that it is data of its sample group."""
    if mesh.data_size > 1:
        _meshes[tensor] = weakref.ref(mesh)


def install() -> None:
    """Lets all optimizers look before a step, once."""
    if not _installed:
        _installed.append(register_optimizer_step_pre_hook(_refuse_unreduced))


def _refuse_unreduced(optimizer: Optimizer, *_: object) -> None:
    """Stops a step with a gradient that pydist has met and that was not reduced."""
    own: list[Tensor] = []
    for number, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            if hasattr(parameter, "to_local"):
                continue  # a sharded tensor: its gradient is
            if parameter.grad is None or isinstance(parameter.grad, ScatteredGradient):
                continue
            leaf = leaf_of(parameter)
            if leaf is None:
                if parameter in _meshes and not isinstance(parameter, nn.Parameter):
                    own.append(parameter)
                continue
            leaf.place = leaf.place or (number, index)
            if leaf.paused and leaf.fired and leaf.reducer() is not None:
                if leaf.is_cleared(parameter):
                    continue
                raise NotSupported(
                    f"a step with the parameter {leaf.name}, whose gradient was accumulated under "
                    "no_sync() or by a backward() that raised, and is this rank's part: let a "
                    "backward() outside of no_sync() come before the step, or zero_grad()"
                )
    mesh = _meshes[own[0]]() if own else None
    if mesh is not None:
        refuse_parting(mesh.world, own)
