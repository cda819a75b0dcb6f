"""Gradients of weights that a backward pass leaves for later.

A pipeline's stage before waits for the gradient of an activation, and no other stage for that of a
weight before the optimizer's step. A zero-bubble schedule computes the second kind where a rank
would wait. So a layer can compute with a weight outside of the graph; its `backward` leaves the
weight's gradient in a list, and a later pass from the weights on computes it. Hooks and the
reducer see one gradient, in that pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from pydist.exchange.adjoints import is_scale_grad

if TYPE_CHECKING:
    from pydist.mesh import Mesh

Left = list[tuple[Tensor, Callable[[], Tensor]]]
"""Weights, and the functions that compute their gradients, without messages."""


class LeftWeight(NamedTuple):
    """A weight whose gradient is left.

    Attributes:
        weight: the weight, in its graph.
        into: where `backward` leaves the gradient.
    """

    weight: Tensor
    into: Left

    def leave(self, ctx: Any, compute: Callable[[], Tensor]) -> None:
        """Leaves the computation of the gradient, in the `backward` of a `Function`."""
        if ctx.has_gradient:
            self.into.append((self.weight, compute))


class LeftWeights:
    """A mesh's service: where layers leave gradients of weights; `None` if they do not."""

    def __init__(self) -> None:
        self.into: Left | None = None

    @contextmanager
    def leaving(self, into: Left | None) -> Iterator[None]:
        """Lets layers that run forward in the `with` block leave gradients in a list, if any."""
        self.into = into
        try:
            yield
        finally:
            self.into = None


def out_of_graph(mesh: Mesh, x: Tensor, weight: Tensor) -> tuple[Tensor, LeftWeight | None]:
    """Returns the weight for a layer's autograd function; outside of the graph if it is left."""
    service = mesh.session.find(LeftWeights)
    if service is None or service.into is None or not is_left(x, weight):
        return weight, None
    return weight.detach(), LeftWeight(weight, service.into)


def is_left(x: Tensor, weight: Tensor) -> bool:
    """Returns whether a layer that may leave the gradient of its weight leaves it.

    Without an activation that needs a gradient, the result would not be in the graph, and a
    backward pass would have nothing else to compute.
    """
    is_real = not weight.is_complex()  # `root_of` adds numbers
    return is_real and torch.is_grad_enabled() and x.requires_grad and _is_parameter(weight)


def root_of(left: Left) -> Tensor:
    """Returns a scalar whose backward pass gives the weights their gradients. Empties the list."""
    weights, computes = zip(*left, strict=True)
    left.clear()
    with torch.enable_grad():
        root: Tensor = _Root.apply([*reversed(computes)], *weights)
    return root


class _Root(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, computes: list[Callable[[], Tensor]], *weights: Tensor) -> Tensor:
        ctx.computes = computes
        return weights[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Any) -> tuple[Any, ...]:
        computes, found = ctx.computes, []
        while computes:
            found.append(computes.pop()())  # frees the activation that it has kept
        return None, *found


def _is_parameter(weight: Tensor) -> bool:
    """Returns whether a weight is a parameter, or one that was only scaled or converted.

    The gradient of a weight that is computed from activations is needed immediately.
    """
    node: Any = weight.grad_fn
    if node is None:
        return weight.requires_grad
    while is_scale_grad(node) or node.name() == "ToCopyBackward0":
        node = node.next_functions[0][0]
    return bool(node.name() == "torch::autograd::AccumulateGrad")
