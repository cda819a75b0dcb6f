"""Tests of the sample store on real ranks: 2 sample groups, each with its samples cut in 2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from pydist.comm import Transport
from pydist.data import Loader, ShardDataset
from pydist.data.medical.generate import generate_ct
from pydist.data.medical.options import CTOptions
from pydist.mesh import Mesh
from support.data.reading import Meter
from support.data.stored import local_of

pytestmark = pytest.mark.ranks(4, mpi=("openmpi", "gloo"))


@pytest.fixture(scope="module")
def volumes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes 6 volumes with labels, and 3 for validation."""
    root = tmp_path_factory.mktemp("volumes")
    generate_ct(root, CTOptions(count=9, shape=(16, 8, 24), validation=1 / 3))
    return root


def content(batch: Any) -> tuple[Any, ...]:
    return batch.indices, local_of(batch.inputs).clone(), local_of(batch.targets).clone()


def require_equal(found: list[Any], expected: list[Any]) -> None:
    assert [each[0] for each in found] == [each[0] for each in expected]
    for mine, other in zip(found, expected, strict=True):
        assert torch.equal(mine[1], other[1])
        assert torch.equal(mine[2], other[2])


def compare(
    world: Transport, root: Path, normalize: str, split: str = "train", **options: Any
) -> list[Any]:
    """Compares 3 epochs with those of files; returns bytes read and figures of each epoch."""
    mesh, training = Mesh(world, 2, (2, 1, 1)), split == "train"
    with Loader(
        ShardDataset(root, split, normalize=normalize), mesh, 5, training=training
    ) as plain:
        epochs = [[content(b) for b in plain.batches(e * training)] for e in range(3)]
    meter, found = Meter(), []
    dataset = ShardDataset(root, split, normalize=normalize, driver=meter)
    with Loader(dataset, mesh, 5, training=training, store="memory", pad=True, **options) as loader:
        assert loader.store is not None
        for epoch, expected in enumerate(epochs):
            before = meter.count
            require_equal([content(b) for b in loader.batches(epoch * training)], expected)
            world.barrier()
            read = torch.tensor([meter.count - before, loader.store.held_bytes])
            world.all_reduce(read)
            found.append((*read.tolist(), loader.store.counted().over(world)))
        held = torch.zeros(len(dataset), dtype=torch.int64)
        held[list(loader.store.entries)] = 1
        same_part = world.split(mesh.coords["depth"], world.rank)
        same_part.all_reduce(held)
        same_part.close()
        if "store_memory" not in options:
            assert held.tolist() == [1] * len(dataset), "each block is held by one rank"
    return found


@pytest.mark.parametrize("split", ["train", "val"])
def test_no_file_is_read_after_the_first_epoch(
    world: Transport, universes: Path, split: str
) -> None:
    """24 and 8 samples of 4 x 8^3 int16 in batches of 5: the last one is short."""
    samples = 24 if split == "train" else 8
    first, *others = compare(world, universes, "log1p", split)
    assert first[0] > samples * 4 * 8**3 * 2
    size = samples * 4 * 8**3 * 2
    assert size <= first[1] <= size + samples * 2 * 128
    for read, held, figures in others:
        assert read == figures.file_bytes == figures.file_blocks == 0
        assert figures.hit_rate == 1
        assert held == figures.held_bytes == first[1]
        assert (figures.received_bytes > 0) == (split == "train")
        assert figures.received_bytes <= held


def test_labels_travel_with_their_blocks(world: Transport, volumes: Path) -> None:
    """Of 5 bytes a voxel: the int16 intensity and the uint8 label need 3."""
    first, *others = compare(world, volumes, "ct")
    voxels = 6 * 16 * 8 * 24
    assert 3 * voxels <= first[1] <= 3 * voxels + 6 * 2 * 192
    for read, _, figures in others:
        assert read == figures.file_bytes == 0
        assert figures.received_bytes > 0


def test_a_budget_reads_the_rest_again(world: Transport, universes: Path) -> None:
    found = compare(world, universes, "none", store_memory="20 KiB")
    assert found[0][1] <= 4 * 20 * 1024
    for read, held, figures in found[1:]:
        assert read > 0  # of the next epoch too, which is read ahead
        of_blocks = figures.file_blocks * 4 * 4 * 8 * 8 * 2
        assert of_blocks <= figures.file_bytes <= of_blocks + 24 * 4 * 16  # and targets
        assert 0.2 < figures.hit_rate < 0.9
        assert held == found[0][1]


class _Large:
    """Samples of 4 and more MB: the libraries send such messages piece by piece."""

    sample_shape = (1, 32, 128, 256)
    num_targets, labeled, dtype, identity = 1, False, torch.float32, "large"

    def __init__(self) -> None:
        self.reads = 0

    def __len__(self) -> int:
        return 6

    def shape_of(self, index: int) -> tuple[int, int, int, int]:
        return self.sample_shape

    def read_block(self, index: int, box: Any, out: Tensor) -> Tensor:
        self.reads += 1
        depth = torch.arange(box.lo[1], box.hi[1], dtype=torch.float32).view(1, -1, 1, 1)
        return out.copy_(depth.expand_as(out) + 1000 * index)

    def target(self, index: int) -> Tensor:
        return torch.tensor([float(index)])


def test_large_blocks_travel_while_the_step_computes(world: Transport) -> None:
    mesh, source = Mesh(world, 2, (2, 1, 1)), _Large()
    with Loader(source, mesh, 2, store="memory") as loader:
        for _ in range(3):
            for batch in loader:
                for n, index in enumerate(batch.indices):
                    lo = batch.inputs.layout.box.lo[2]
                    expected = 1000 * index + lo + torch.arange(16.0).view(1, -1, 1, 1)
                    assert torch.equal(batch.inputs.to_local()[n], expected.expand(1, -1, 128, 256))
                world.progress()
                sums = batch.inputs.to_local().sum().view(1)
                world.all_reduce(sums)
    assert source.reads == 3
