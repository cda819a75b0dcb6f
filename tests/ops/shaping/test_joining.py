"""Joining and repeating, along unsplit dims and split ones."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.equivalence import Cut, check_function, layout_at, on_ranks, randn, shard
from support.equivalence.splits import SHAPE
from support.equivalence.splits import THREE_SPLITS as POINTS
from support.equivalence.strategies import GRIDS, points

COUNTS = torch.tensor([2, 0, 1, 3, 1])
CALLS = {
    "cat of channels": lambda x: torch.cat([x, x * 2], 1),
    "cat of a batch, negative dim": lambda x: torch.cat((x, x), dim=-5),
    "cat over a split dim": lambda x: torch.cat([x, x[:, :, 1:3] * 2], 2),
    "concat of thin ones": lambda x: torch.concat([x[:, :, :1], x[:, :, :1]], 3) * 2,
    "cat with zeros, as padding": lambda x: torch.cat([torch.zeros(2, 3, 5, 1, 3), x], axis=3),
    "cat of many": lambda x: torch.cat([x[..., :1], x, x[..., 1:], x[..., :0]], -1),
    "cat with an empty vector": lambda x: torch.cat([torch.empty(0), x], 2),
    "stack": lambda x: torch.stack([x, x.square()], 1),
    "stack last": lambda x: torch.stack((x, x), dim=-1),
    "hstack": lambda x: torch.hstack([x, x]),
    "vstack": lambda x: torch.vstack([x, x * 2]),
    "dstack": lambda x: torch.dstack([x, x[:, :, 1:]]),
    "hstack of vectors": lambda x: torch.hstack([x[0, 0, :, 0, 0], x[1, 1, 1, :, 1]]),
    "vstack of vectors": lambda x: torch.vstack([x[0, 0, 0, 0], x[0, 0, 0, 1]]),
    "column_stack of vectors": lambda x: torch.column_stack([x[0, 0, :, 0, 0], x[1, 0, :, 1, 1]]),
    "dstack of vectors": lambda x: torch.dstack([x[0, 0, 0, 0], x[0, 1, 0, 0]]),
    "vectors, many exchanges": lambda x: (
        torch.hstack([x[0, 0, :, 0, 0], x[1, 1, 1, :, 1]]) * torch.vstack([x[0, 0, 0, 0]]).sum()
    ),
    "repeat": lambda x: x.repeat(2, 1, 3, 1, 2),
    "repeat with new dims": lambda x: x.repeat((2, 1, 2, 1, 1, 1)),
    "tile": lambda x: torch.tile(x, (2, 1)) * x.tile(dims=(2, 1, 1, 1, 1)).sum(),
    "repeat_interleave": lambda x: x.repeat_interleave(2, dim=2) * x.repeat_interleave(2, 2).mean(),
    "repeat_interleave by counts": lambda x: torch.repeat_interleave(x, COUNTS, 2, output_size=7),
    "repeat_interleave of all": lambda x: x.repeat_interleave(2),
}  # fmt: skip


@pytest.mark.parametrize("points", POINTS.values(), ids=POINTS)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_to_second_order(call, points):
    check_function(lambda x: call(x * x), randn(*SHAPE), (), points, second_order=True)


@given(data=st.data())
@settings(max_examples=25)
def test_any_cat(data):
    """The tensors have different extents and partitions; one is plain."""
    extents = data.draw(st.tuples(*[st.integers(1, 5)] * 3))
    grid = data.draw(st.sampled_from(GRIDS[3]))
    dim = data.draw(st.integers(0, 2))
    tensors, where = [], []
    for seed in range(3):
        shape = [data.draw(st.integers(0, 5)) if d == dim else n for d, n in enumerate(extents)]
        tensors.append(randn(2, *shape, seed=seed))
        where.append([data.draw(points(n, k)) for n, k in zip(shape, grid, strict=True)])
    order = data.draw(st.permutations(range(3)))

    def call(*given):
        return torch.cat([given[i] * 2 for i in order], dim + 1)

    check_function(
        call, tensors[0], [tensors[2]], where[0], beside=[Cut(tensors[1], where[1])],
        second_order=True,
    )  # fmt: skip


@pytest.mark.parametrize("points", POINTS.values(), ids=POINTS)
def test_joined_with_a_plain_tensor_and_one_of_another_layout(points):
    check_function(
        lambda x, y, p: torch.cat([p, x * x, y], 1),
        randn(*SHAPE),
        [randn(2, 2, 5, 4, 3, seed=1)],
        points,
        beside=[Cut(randn(2, 1, 5, 4, 3, seed=2), [_moved(p) for p in points])],
        second_order=True,
    )


def _moved(points):
    """Returns other split points of the same extent."""
    return points and [0, *(min(p + 1, points[-1]) for p in points[1:-1]), points[-1]]


def test_a_joined_dim_is_split_in_the_shares_of_the_largest():
    def body(mesh):
        x = shard(randn(1, 8), layout_at(mesh, (1, 8), [[0, 2, 8]]))
        assert torch.cat([x, x], 1).layout.splits[1].partition.points == (0, 4, 16)
        assert x.repeat_interleave(3, 1).layout.splits[1].partition.points == (0, 6, 24)

    on_ranks((2, 1, 1), body)
