"""Tests with parameters that have the ids of freed ones, in another order on each rank.

CPython gives a new object the place of a freed one of its size. What is sent between ranks must not
follow that order.
"""

from __future__ import annotations

import gc
import threading

import pytest
import torch
from torch import nn

from pydist import Mesh, distribute_tensor, parallelize
from support.equivalence import assert_same, on_ranks, randn, whole_of

_alone = threading.Lock()


def reborn(mesh: Mesh, parameters: list[nn.Parameter]) -> list[nn.Parameter] | None:
    """Frees parameters, and makes equal ones with their ids, in an order of the rank's own.

    Returns:
        The new ones; `None` on all ranks if one rank has got other ids.
    """
    values, ids = [p.detach() for p in parameters], [id(p) for p in parameters]
    order = [*range(len(ids))] if mesh.rank % 2 else [*reversed(range(len(ids)))]
    gc.collect()
    mesh.world.barrier()
    with _alone:  # other ranks, which are threads, wait and make no tensors
        gc.disable()
        for i in order:
            parameters[i] = None  # the place freed last is the first to be taken
        found = [nn.Parameter(value) for value in values]
        gc.enable()
    same = sorted(ids) == sorted(map(id, found))
    everyones = mesh.world.all_gather_bytes(bytes([same]))
    return found if all(map(any, everyones)) else None


@pytest.mark.parametrize(
    ("spatial", "options"),
    [((1, 1, 2), {}), ((1, 1, 1), {"data": 2}), ((1, 1, 1), {"axes": {"channel": 2}})],
    ids=["width", "data", "channel"],
)
def test_trained_weights_of_a_criterion(spatial, options):
    """A search whose first trial is left out: nobody has called backward."""
    ones = [torch.ones((), dtype=torch.float64)] * 3
    x, layer = randn(2, 3, 4, 4, 8), nn.Conv3d(3, 3, 3, padding=1).double()

    def loss(y, w):
        factors = enumerate((1, 3, 10))
        return sum(f * (y[:, i] * w[i]).square().mean() for i, f in factors)

    expected = [nn.Parameter(each) for each in ones]
    loss(layer(x), expected).backward()

    def body(mesh: Mesh):
        model = parallelize(nn.Conv3d(3, 3, 3, padding=1).double(), mesh)
        model.load_state_dict(layer.state_dict())
        own = distribute_tensor(x, mesh)
        for _ in range(50):
            first = [nn.Parameter(each.clone()) for each in ones]
            loss(model(own), first)
            if w := reborn(mesh, first):
                break
        assert w is not None
        loss(model(own), w).backward()
        return [p.grad for p in w]

    for found in on_ranks(spatial, body, **options):
        assert_same(found, [p.grad for p in expected])


class Repeated(nn.Module):
    """Two scales that are used many times in a forward pass, as in recurrent networks."""

    def __init__(self, a: nn.Parameter, b: nn.Parameter) -> None:
        super().__init__()
        self.a, self.b = a, b

    def forward(self, x):
        for _ in range(14):
            x = x * self.a + self.b
        return x


def test_weights_that_a_network_uses_again_and_again():
    """A model of each fold: ranks compare such weights while forward runs."""
    values, x = [torch.tensor(0.9), torch.tensor(0.2)], randn(2, 1, 4, 4, 4).float()

    def body(mesh: Mesh):
        own, other = distribute_tensor(x, mesh), parallelize(nn.Conv3d(1, 1, 1), mesh)

        def run(w):
            model = parallelize(Repeated(*w), mesh)
            with torch.no_grad():
                found = whole_of(model(own))
                other(own)
            return found

        for _ in range(50):
            first = [nn.Parameter(each.clone()) for each in values]
            run(first)
            gc.collect()  # the model
            if w := reborn(mesh, first):
                break
        assert w is not None
        return [run(w)]

    expected = Repeated(*map(nn.Parameter, values))(x).detach()
    for found in on_ranks((2, 1, 1), body):
        assert_same(found, [expected])
