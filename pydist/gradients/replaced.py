"""Plain tensors in the place of parameters: fast weights, `functional_call`, lists of weights.

All sample groups have the same, so their gradient is the mean over the groups, as a parameter's is.
Any other plain tensor is data of its group, and has the gradient of the group's own loss.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from pydist.exchange.adjoints import mean_ranks
from pydist.gradients import graph
from pydist.gradients.newcomers import refuse_different

if TYPE_CHECKING:
    from pydist.gradients.reducer import Reducer

# Not attributes of the tensors, which could not be pickled with them.
_reducers = WeakIdKeyDictionary()


def note(weight: Tensor, reducer: Reducer) -> None:
    """Notes that a plain tensor is used as a parameter, by several sample groups.

    A leaf gets the mean in every backward pass. From one that was computed, gradients go on to what
    it was computed from; it gets the mean where a program asks for its own: see `means`.
    """
    if isinstance(weight, nn.Parameter) or not weight.requires_grad or weight in _reducers:
        return
    _reducers[weight] = weakref.ref(reducer)
    if weight.grad_fn is None:
        graph.register_hook(weight, _Mean(weight))


@contextmanager
def means(inputs: Iterable[Tensor]) -> Iterator[None]:
    """Lets computed weights have means in a backward pass.

    Args:
        inputs: what the program wants the gradients of.
    """
    weights = [x for x in inputs if isinstance(x, Tensor) and x in _reducers]
    handles = [graph.register_hook(x, _Mean(x)) for x in weights if x.grad_fn is not None]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Mean:
    """A hook: the mean of a weight's gradient over the groups. Collective over the data axis."""

    __torch_unserializable__ = True  # torch.save leaves it out without a warning

    def __init__(self, weight: Tensor) -> None:
        self._weight = weakref.ref(weight)  # it holds this hook

    def __call__(self, grad: Tensor) -> Tensor:
        weight = self._weight()
        reducer = None if weight is None else _reducers[weight]()
        if weight is None or reducer is None:
            return grad
        mesh = reducer.mesh
        refuse_different(mesh.data, weight)
        mean = mean_ranks(grad, mesh, ("data",), "gradients", reducer.weight)
        if torch.is_grad_enabled():
            graph.mark(mean, mesh, graph.NOTHING)
        return mean
