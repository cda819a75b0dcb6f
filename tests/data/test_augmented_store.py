"""Tests of a sample store with augmentation: the changed samples come from the unchanged blocks."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from pydist.data import Augmented, AugmentOptions, CTOptions, Loader, ShardDataset, generate_ct
from pydist.data.blocks import EpochSource
from pydist.errors import UsageError
from support.equivalence import on_ranks

OPTIONS = AugmentOptions(
    crop=(10, 8, 6), angle=30.0, zoom=(0.8, 1.3), elastic=2.0, elastic_spacing=6.0,
    flip=("depth", "height", "width"), rotate=0.5, probability=0.5, noise=0.2, blur=(0.3, 0.8),
    gamma=(0.7, 1.5),
)  # fmt: skip
EPOCHS = 3


@pytest.fixture(scope="module")
def volumes(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("volumes")
    generate_ct(folder, CTOptions(count=5, shape=(14, 12, 10), validation=0))
    return folder


def batches(volumes: Path, mesh: Any, **store: Any) -> tuple[list[torch.Tensor], list[Any]]:
    """Returns inputs and labels of all batches, and after each epoch the counts of its store."""
    data = ShardDataset(volumes, normalize="ct", dtype=torch.float64)
    found, counts = [], []
    with Loader(Augmented(data, OPTIONS, 3), mesh, 3, seed=1, pad=False, **store) as loader:
        for _ in range(EPOCHS):
            for batch in loader:
                if batch.indices:
                    found += [batch.inputs.full_tensor(), batch.targets.full_tensor()]
            if loader.store is not None:
                counts.append(loader.store.counted())
    return found, counts


@pytest.mark.parametrize(
    ("data", "spatial"), [(1, (1, 1, 1)), (1, (3, 1, 1)), (2, (1, 2, 1)), (3, (1, 1, 1))]
)
def test_samples_are_the_same_from_a_store_and_files_are_read_once(volumes, data, spatial):
    def body(mesh: Any) -> list[Any]:
        expected, _ = batches(volumes, mesh)
        found, counts = batches(volumes, mesh, store="memory")
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-13)
        return counts

    ranks = on_ranks(spatial, body, data=data)
    total = 5 * 14 * 12 * 10 * (2 + 1)  # int16 values and uint8 labels
    read = [sum(counts[epoch].file_bytes for counts in ranks) for epoch in range(EPOCHS)]
    # A rank reads ahead from the next epoch, but each block is read once.
    assert sum(read) == total
    assert read[-1] == 0
    assert sum(counts[-1].file_blocks for counts in ranks) == 0
    assert any(counts[-1].received_bytes for counts in ranks) == (len(ranks) > 1)


def test_blocks_beyond_the_memory_come_from_files_or_from_disk(volumes, tmp_path):
    def body(mesh: Any) -> None:
        expected, _ = batches(volumes, mesh)
        limit = 3000 if mesh.rank else 6000  # some of the five blocks of about 2,600 bytes
        for more in ({}, {"store_disk": 14000, "store_folder": tmp_path / "disk"}):
            found, counts = batches(volumes, mesh, store="memory", store_memory=limit, **more)
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-13)
            assert counts[-1].held_bytes <= limit
            assert (counts[-1].disk_bytes > 0) == bool(more)
            assert (counts[-1].file_bytes > 0) == (not more)

    on_ranks((2, 1, 1), body)


def test_a_preloaded_store_reads_files_before_the_first_batch_alone(volumes):
    def body(mesh: Any) -> None:
        data = ShardDataset(volumes, normalize="ct")
        source = Augmented(data, OPTIONS, 3)
        with Loader(source, mesh, 2, store="memory", store_preload=True) as loader:
            loader.preload()
            before = data.bytes_read
            for _ in loader:
                pass
            assert data.bytes_read == before > 0

    on_ranks((2, 1, 1), body)


def test_a_batch_that_is_not_used_is_read_again(volumes):
    def body(mesh: Any) -> None:
        data = ShardDataset(volumes, normalize="ct", dtype=torch.float64)
        source = Augmented(data, OPTIONS, 3)
        with Loader(source, mesh, 2, store="memory") as loader, Loader(source, mesh, 2) as plain:
            for epoch, start in ((0, 1), (1, 0), (0, 0), (1, 1)):
                one, *_ = list(loader.batches(epoch, start))
                other, *_ = plain.batches(epoch, start)
                torch.testing.assert_close(one.inputs.full_tensor(), other.inputs.full_tensor())

    on_ranks((1, 2, 1), body)


def test_what_cant_be_stored_is_refused(volumes):
    class Own:
        def __init__(self, data: Any) -> None:
            self.data = data

        def __getattr__(self, name: str) -> Any:
            return getattr(self.data, name)

        def in_epoch(self, epoch: int) -> Any:
            return self.data

    def body(mesh: Any) -> None:
        data = ShardDataset(volumes, normalize="ct")
        own: Any = Own(data)
        assert isinstance(own, EpochSource)
        with pytest.raises(UsageError, match=r'store = "memory": .* of Own change from epoch'):
            Loader(own, mesh, 2, store="memory")
        twice = Augmented(Augmented(data, OPTIONS), AugmentOptions(rotate=1.0))
        with pytest.raises(UsageError, match=r'store = "memory": .* of Augmented change from'):
            Loader(twice, mesh, 2, store="memory")
        with pytest.raises(UsageError, match="with augmentation: possible in training"):
            Loader(Augmented(data, OPTIONS), mesh, 2, training=False, store="memory")

    on_ranks((1, 1, 1), body)
    assert not [t for t in threading.enumerate() if t.name.startswith("pydist-store")]
