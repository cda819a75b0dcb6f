"""Passes the loss of the global batch to optimizers that depend on a closure's loss.

A line search (LBFGS) compares losses. The groups' losses differ, so ranks would take different
steps. The mean over the groups, weighted like gradients, is the same on all ranks.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from pydist.errors import NotSupported
from pydist.exchange.own_slice import own_slice
from pydist.gradients.leaf import leaf_of
from pydist.gradients.reducer import Reducer
from pydist.group_sizes import batches_entering, weights_of

if TYPE_CHECKING:
    from pydist.mesh import Mesh

_models: list[tuple[weakref.ref[nn.Module], Mesh]] = []
"""Models that are on several sample groups."""
_lock = threading.Lock()


def agree_on_closures_of(model: nn.Module, mesh: Mesh) -> None:
    """Passes the loss of the global batch to optimizers that depend on a closure's loss."""
    with _lock:
        alive = [known for known in _models if known[0]() is not None]
        _models[:] = [*alive, (weakref.ref(model), mesh)]


def agree_before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """Replaces the closure of a step by one that returns the loss of the global batch."""
    place = "closure" if "closure" in kwargs else 1
    closure = kwargs.get("closure") if place == "closure" else args[1] if len(args) > 1 else None
    if not callable(closure) or not _decides(optimizer):
        return None
    agreed = _agreed(closure, optimizer)
    if place == "closure":
        return args, {**kwargs, "closure": agreed}
    return (args[0], agreed, *args[2:]), kwargs


def _decides(optimizer: Optimizer) -> bool:
    """Returns whether the optimizer may use the loss; torch's own, except LBFGS, only return it."""
    home = type(optimizer).step.__module__
    return isinstance(optimizer, LBFGS) or not home.startswith(("torch.optim.", "pydist."))


def _mesh_of(optimizer: Optimizer) -> Mesh | None:
    """Returns the mesh over whose sample groups losses are averaged, if there are several."""
    stepped = [p for group in optimizer.param_groups for p in group["params"]]
    for parameter in stepped:
        leaf = leaf_of(own_slice(parameter))
        reducer = None if leaf is None else leaf.reducer()
        # Members, as all ranks know the same ones; a newcomer may be known to this rank alone.
        if not isinstance(reducer, Reducer) or not reducer.members.has(parameter):
            continue
        if reducer.mesh.data_size > 1:
            return reducer.mesh
    # Frozen parameters are no members: some optimizers need no gradients.
    ids = set(map(id, stepped))
    with _lock:
        known = [(reference(), mesh) for reference, mesh in _models]
    for model, mesh in known:
        if model is not None and any(id(p) in ids for p in model.parameters()):
            return mesh
    return None


def _agreed(closure: Callable[..., Any], optimizer: Optimizer) -> Callable[..., Any]:
    def evaluate(*args: Any, **kwargs: Any) -> Any:
        with batches_entering() as entered:
            found = closure(*args, **kwargs)
        # A closure may return more, such as the output.
        loss, *others = found if type(found) is tuple and found else (found,)
        is_number = isinstance(loss, Real) or (isinstance(loss, Tensor) and loss.numel() == 1)
        # Now, as the first backward pass makes a head or a learned input a member.
        mesh = _mesh_of(optimizer)
        if mesh is None or not is_number:
            return found
        weights = weights_of(mesh)
        seen = [sizes for of_mesh, sizes in entered if of_mesh is weights]
        if any(not sizes.weighs_as(seen[0]) for sizes in seen):
            raise NotSupported(
                "a closure whose batches the sample groups share differently, as "
                f"{' and '.join(str(list(sizes.shares)) for sizes in seen)}: return the loss of "
                "the whole batch, formed with pydist.sum_over_groups, and parallelize with "
                'group_weight="equal"'
            )
        with torch.no_grad():
            batch = seen[0] if seen else weights.batch_of([getattr(loss, "grad_fn", None)])
            weight = 1.0 if batch is None else batch.weight
            value = loss.item() if isinstance(loss, Tensor) else float(loss)
            # The mean loss of an empty batch is NaN.
            mine = torch.tensor([weight and weight * value], dtype=torch.float64)
            mesh.data.all_reduce(mine)
            mean = float(mine) / mesh.data_size
            agreed = torch.full_like(loss, mean) if isinstance(loss, Tensor) else mean
        return agreed if found is loss else (agreed, *others)

    return evaluate
