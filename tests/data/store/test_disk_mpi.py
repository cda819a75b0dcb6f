"""Tests of a store with samples on disk on real ranks: 2 sample groups."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pydist.comm import Transport
from pydist.data import Loader, ShardDataset
from pydist.mesh import Mesh
from support.data.reading import Meter

pytestmark = pytest.mark.ranks(2, mpi=("openmpi", "gloo"))

BLOCK = 4 * 8**3 * 2
"""Bytes of a sample of int16 counts."""


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_both_runs_make_the_batches_of_files(
    world: Transport, universes: Path, tmp_path: Path, codec: str
) -> None:
    """24 samples; memory for 3 of the 12 on each rank. The second run reads no file."""
    mesh = Mesh(world, 2)
    with Loader(ShardDataset(universes, normalize="log1p"), mesh, 5) as plain:
        expected = [[each.inputs.to_local().clone() for each in plain] for _ in range(3)]
    for reads_files in (True, False):
        meter = Meter()
        dataset = ShardDataset(universes, normalize="log1p", driver=meter)
        with Loader(
            dataset, mesh, 5, store="memory", store_memory=4 * BLOCK, store_disk="1MB",
            store_folder=tmp_path, store_codec=codec, store_reuse=True,
        ) as loader:  # fmt: skip
            assert loader.store is not None
            for epoch, batches in enumerate(expected):
                before = meter.count
                found = [each.inputs.to_local() for each in loader]
                assert all(map(torch.equal, found, batches))
                figures = loader.store.counted().over(world)
                is_cold = reads_files and epoch == 0
                assert (meter.count > before) == is_cold
                assert figures.hit_rate == (0 if is_cold else 1)
                assert (figures.disk_rate > 0) == (not is_cold)
                assert figures.lost_blocks == 0
                assert figures.most_held_bytes <= 4 * BLOCK + 3 * (BLOCK + 128)
            assert figures.received_bytes > 0
            assert figures.spilled_bytes >= 18 * BLOCK
            assert (figures.compression > 2) == (codec == "zstd")
