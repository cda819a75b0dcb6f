"""Ring attention over real messages."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from pydist import Mesh
from support.attention import forced
from support.equivalence import error, layout_at, randn, shard

pytestmark = pytest.mark.ranks(4, mpi=("openmpi", "gloo"))

SHAPE = (2, 3, 4, 23)
POINTS = {"uneven": [0, 3, 4, 15, 23], "one empty": [0, 8, 8, 9, 23]}


def attend(x, **options):
    return F.scaled_dot_product_attention(x.mT, x.mT * 2, x.mT + 1, **options)


def derivatives(y, x, second):
    (grad,) = torch.autograd.grad((y * y).sum(), x, create_graph=second)
    return [y, grad, *(torch.autograd.grad((grad * grad).sum(), x) if second else ())]


@pytest.mark.parametrize("second", [False, True])
@pytest.mark.parametrize("points", POINTS.values(), ids=POINTS)
@pytest.mark.parametrize("options", [{}, {"is_causal": True}], ids=["all", "causal"])
def test_a_ring(world, options, points, second):
    mesh, whole = Mesh(world, spatial=(4, 1, 1)), randn(*SHAPE).requires_grad_()
    with sdpa_kernel(SDPBackend.MATH):
        expected = derivatives(attend(whole, **options), whole, second)
    x = shard(randn(*SHAPE), layout_at(mesh, SHAPE, [points]))
    with forced("ring"):
        for _ in range(3):  # buffers are used again
            found = derivatives(attend(x, **options), x, second)
    for mine, each in zip(found, expected, strict=True):
        assert error(mine.full_tensor().detach(), each.detach()) < 1e-12


def test_rings_side_by_side(world):
    """Samples along one axis, tokens along the other; blocks of half precision."""
    mesh = Mesh(world, spatial=(2, 2, 1))
    whole = randn(2, 1, 10, 6)

    def body(x):
        return attend(x.mT)

    x = shard(whole, layout_at(mesh, whole.shape, [[0, 3, 10], None]))
    y = shard(whole.bfloat16(), layout_at(mesh, whole.shape, [None, None]))
    with forced("ring"):
        assert error(body(x).full_tensor().detach(), body(whole)) < 1e-12
        z = shard(whole.bfloat16(), layout_at(mesh, whole.shape, [[0, 3, 10], None]))
        assert error(body(z).full_tensor().detach(), body(y).full_tensor().detach()) < 2**-6
