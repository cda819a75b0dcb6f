"""Attention written as products and a softmax: scores keep their rows, keys are gathered."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from pydist import Mesh
from support.equivalence import Cut, check_function, layout_at, on_ranks, randn, shard

SHAPE = (2, 4, 5, 3, 2)
POINTS = {
    "2x1x1": [[0, 2, 5], None, None],
    "2x2x2, half of them empty": [[0, 2, 5], [0, 1, 3], [0, 0, 2]],
    "1x3x2": [None, [0, 1, 1, 3], [0, 1, 2]],
}


def tokens(x):
    return x.flatten(2).mT


def by_matmul(x):
    q, k, v = tokens(x), tokens(x) * 0.5, tokens(x) + 1
    return (q @ k.mT).softmax(-1) @ v


def by_bmm_of_channels_first(x):
    """The attention block of latent diffusion: values before weights."""
    q, k = tokens(x), x.flatten(2)
    weights = torch.bmm(q, k * 0.3).softmax(2)
    return torch.bmm(k, weights.permute(0, 2, 1)).view(x.shape) + x


def by_baddbmm(x):
    q, empty = tokens(x), torch.zeros(2, 30, 30, dtype=torch.float64)
    scores = torch.baddbmm(empty, q, q.mT, beta=0, alpha=0.5)
    return torch.bmm(scores.softmax(-1), q)


def by_einsum_of_heads(x):
    q = x.view(2, 2, 2, *x.shape[2:]).flatten(3)
    scores = torch.einsum("bhci,bhcj->bhij", q, q * 0.5)
    return torch.einsum("bhij,bhcj->bhci", F.dropout(scores.softmax(-1), 0.0), q)


def by_einops(x):
    einops = pytest.importorskip("einops")
    q = einops.rearrange(x, "b (g c) d h w -> b g (d h w) c", g=2)
    weights = einops.einsum(q, q * 0.5, "b g i c, b g j c -> b g i j").softmax(-1)
    y = einops.einsum(weights, q, "b g i j, b g j c -> b g i c")
    return einops.rearrange(y, "b g (d h w) c -> b (g c) d h w", d=5, h=3)


CALLS = {
    "matmul": by_matmul,
    "bmm": by_bmm_of_channels_first,
    "baddbmm": by_baddbmm,
    "einsum": by_einsum_of_heads,
    "einops": by_einops,
    "voxels": lambda x: torch.einsum("ncdhw,ncxyz->ndhwxyz", x, x).softmax(-1),
    "scores of keys": lambda x: torch.einsum("bci,bcj->bij", x.flatten(2), x.flatten(2)).softmax(1),
    "split channels": lambda x: F.scaled_dot_product_attention(
        tokens(x).mT, tokens(x).mT, x.flatten(2), dropout_p=0.0, is_causal=True
    ),
    "channels of some tokens": lambda x: F.scaled_dot_product_attention(
        x.flatten(2), x.flatten(2), x.flatten(2), torch.eye(4).bool() & (torch.arange(4) > 0)
    ),
}  # fmt: skip


@pytest.mark.parametrize("points", POINTS.values(), ids=POINTS)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_to_second_order(call, points):
    check_function(call, randn(*SHAPE), (), points, second_order=True)


@pytest.mark.parametrize("keys", [2, 40])
def test_the_smaller_side_is_gathered(keys):
    """A product of split rows and split columns; its result is split like the larger operand."""

    def call(x, y):
        return (x.mT @ y).softmax(-1) @ y.mT

    beside = [Cut(randn(3, 4, keys, seed=1), [[0, 1, keys]])]
    check_function(call, randn(3, 4, 9), (), [[0, 4, 9]], beside=beside, second_order=True)

    def body(mesh: Mesh) -> tuple[int, ...]:
        x, y = (shard(randn(3, 4, n), layout_at(mesh, (3, 4, n), [[0, 1, n]])) for n in (9, keys))
        return (x.mT @ y).layout.split_dims

    assert set(on_ranks((2, 1, 1), body)) == {(1,) if keys < 9 else (2,)}


def test_scores_of_few_tokens_with_many_channels_stay():
    """Values are gathered, although they are larger, as their sum would be whole on each rank."""

    def body(mesh: Mesh) -> tuple[int, ...]:
        x = shard(randn(1, 64, 6), layout_at(mesh, (1, 64, 6), [[0, 3, 6]]))
        weights = (x.mT @ x).softmax(-1)
        return torch.bmm(x, weights.mT).layout.split_dims

    assert set(on_ranks((2, 1, 1), body)) == {(2,)}
