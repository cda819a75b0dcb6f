"""Tests of scatter and gather between one rank and blocks, for any split."""

from __future__ import annotations

import pytest
import torch

from pydist import ShardedTensor, layout_for_sample
from pydist.train.gather import gather_to_first_rank, scatter_from_first_rank
from support.equivalence import on_ranks, randint


@pytest.mark.parametrize("spatial", [(1, 1, 1), (2, 1, 1), (1, 3, 2), (7, 1, 1)])
@pytest.mark.parametrize("dtype", [torch.int16, torch.uint8, torch.float32, torch.int64])
def test_there_and_back(spatial, dtype):
    """Blocks have unequal extents, and on seven ranks one is empty."""
    whole = randint(100, 1, 2, 6, 5, 3).to(dtype)

    def rank(mesh):
        layout = layout_for_sample(mesh, whole.shape)
        first = mesh.sample.rank == 0
        local = scatter_from_first_rank(whole if first else None, layout, dtype)
        box = layout.box
        expected = whole[box.slices]
        assert torch.equal(local, expected)
        assert local.dtype == dtype
        back = gather_to_first_rank(ShardedTensor.from_local(local, layout))
        assert (back is not None) == first
        assert back is None or torch.equal(back, whole)

    on_ranks(spatial, rank)
