"""Tests of the loader's thread with MPI: it reads while the main thread communicates."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pydist.comm import Transport
from pydist.data import Loader, ShardDataset
from pydist.mesh import Mesh

pytestmark = pytest.mark.ranks(2)


def test_blocks_make_up_the_samples(world: Transport, universes: Path) -> None:
    """Each rank makes the data set itself from one seed, so the manifests must agree."""
    dataset = ShardDataset(universes)
    mesh = Mesh(world, 1, (2, 1, 1))
    with Loader(dataset, mesh, 5, prefetch=3, on_bad_sample="skip") as loader:
        seen = []
        for batch in loader:
            full = batch.inputs.full_tensor()
            expected = torch.stack([dataset[i][0] for i in batch.indices])
            assert torch.equal(full, expected)
            seen += batch.indices
    assert sorted(seen) == list(range(len(dataset)))
    assert not loader.skipped


def test_groups_share_a_batch(world: Transport, universes: Path) -> None:
    mesh = Mesh(world, 2, (1, 1, 1))
    with Loader(ShardDataset(universes), mesh, 4, seed=1) as loader:
        sums = torch.zeros(24, dtype=torch.int64)
        for batch in loader:
            assert batch.first_sample == 2 * world.rank
            sums[list(batch.indices)] += 1
    world.all_reduce(sums)
    assert sums.tolist() == [1] * 24
