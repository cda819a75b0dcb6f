"""Handles plain tensors used as parameters: fast weights, `functional_call`, lists of weights.

They are equal on all ranks, so their gradient is the mean over the sample groups, like a
parameter's, and over the ranks of a group if they were used on shards. Any other plain tensor is
data of its group, and has the gradient of the group's own loss.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from pydist.errors import NotSupported
from pydist.gradients import graph
from pydist.gradients.newcomers import are_equal, refuse_different
from pydist.grid import SAMPLE_AXES

if TYPE_CHECKING:
    from pydist.gradients.reducer import Reducer
    from pydist.mesh import Mesh

# Not attributes of the tensors, which then could not be pickled.
_reducers = WeakIdKeyDictionary()
_hooks = WeakIdKeyDictionary()


def is_noted(tensor: Tensor) -> bool:
    """Returns whether a plain tensor is used as a parameter."""
    return tensor in _reducers


def note_use(weight: Tensor, reducer: Reducer) -> None:
    """Records that a plain tensor with a gradient, which is not a parameter, is used as one.

    With several sample groups, a leaf gets the mean in every backward pass. A computed tensor gets
    the mean only if a program requests its gradient; see `means`. Otherwise its gradient just flows
    on to the tensors from which it was computed.

    Raises:
        NotSupported: the tensor is used on another mesh.
    """
    known = reducer_of_weight(weight)
    if known is not None and known is not reducer:
        raise NotSupported(
            f"a weight of shape {list(weight.shape)}, a plain tensor, on two meshes: give each a "
            "copy of its own, or make it a torch.nn.Parameter"
        )
    _reducers[weight] = weakref.ref(reducer)
    if reducer.mesh.data_size > 1 and weight.grad_fn is None:
        _hook_on(weight)


def use_locally(weight: Tensor) -> None:
    """Records that a leaf was used on shards, so each rank has a part of its gradient."""
    if is_noted(weight):
        _hook_on(weight).is_local = True


@contextmanager
def means(inputs: Iterable[Any]) -> Iterator[None]:
    """Averages gradients of computed weights within a backward pass.

    Args:
        inputs: the tensors whose gradients the program requests.
    """
    handles = []
    for x in inputs:
        if not isinstance(x, Tensor) or x.grad_fn is None:
            continue
        node: Any = x.grad_fn
        mesh = node.metadata.get(graph.USED_IN)
        if mesh is not None or reducer_of_weight(x) is not None:
            hook = Mean(x, mesh)
            hook.is_local = mesh is not None
            handles.append(graph.register_hook(x, hook))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def reducer_of_weight(weight: Tensor) -> Reducer | None:
    """Returns the reducer of the mesh on which a plain tensor is used as a parameter."""
    found = _reducers.get(weight)
    return None if found is None else found()


def _hook_on(weight: Tensor) -> Mean:
    hook = _hooks.get(weight)
    if hook is None:
        hook = _hooks[weight] = Mean(weight)
        if weight.grad_fn is None:
            graph.register_hook(weight, hook)
    return hook


class Mean:
    """A hook that averages a weight's gradient. Collective.

    Attributes:
        is_local: whether the weight was used on shards.
    """

    __torch_unserializable__ = True  # torch.save leaves it out without a warning

    def __init__(self, weight: Tensor, mesh: Mesh | None = None) -> None:
        """Makes the hook of a weight that was recorded by `note_use`, or is used on a mesh."""
        self._weight, self._mesh = weakref.ref(weight), mesh  # weak, as the weight holds this hook
        self.is_local = False

    def __call__(self, grad: Tensor | None) -> Tensor | None:
        """Returns the mean of the ranks' gradients; `None` where they are undefined."""
        weight = self._weight()
        if weight is None or grad is None:
            return grad
        reducer = reducer_of_weight(weight)
        mesh = self._mesh if reducer is None else reducer.mesh
        if mesh is None:
            return grad
        axes: tuple[str, ...] = ()
        for call in mesh.session.at_backward:
            call()
        if self.is_local and are_equal(mesh.sample, weight):
            axes = SAMPLE_AXES
        group_weight = 1.0
        if reducer is not None and mesh.data_size > 1:
            refuse_different(mesh.data, weight)
            axes, group_weight = ("data", *axes), reducer.weight
        if not axes:
            return grad
        return graph.mean_of(grad, mesh, axes, group_weight)
