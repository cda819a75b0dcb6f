"""Tests of the sample store over files: every stored type, real layouts, hidden messages."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from pydist.comm import Transport, run_local
from pydist.data import Loader, ShardDataset
from pydist.mesh import Mesh
from support.data.stored import Stored, local_of
from support.latency import Latency, delayed


@pytest.mark.parametrize(
    ("stored", "kept"),
    [
        ("uint8", torch.uint8), ("int16", torch.int16), ("uint16", torch.uint16),
        ("float16", torch.float16), ("int32", torch.float32), ("uint32", torch.float32),
        ("float32", torch.float32), ("float64", torch.float32),
    ],
)  # fmt: skip
@pytest.mark.parametrize("normalize", ["none", "log1p", "mean"])
def test_every_stored_type_has_the_bits_of_files(
    write_samples: Callable[..., Path], stored: str, kept: torch.dtype, normalize: str
) -> None:
    """What is kept has at most the bytes of the input."""
    draw = np.random.default_rng(1)
    samples = [draw.integers(0, 250, (2, 5, 3, 4)).astype(stored) for _ in range(7)]
    root = write_samples(samples)

    def job(transport: Transport) -> None:
        mesh = Mesh(transport, 2, (2, 1, 1))
        plain, dataset = (ShardDataset(root, normalize=normalize) for _ in range(2))
        with Loader(plain, mesh, 3) as files, Loader(dataset, mesh, 3, store="memory") as loader:
            assert loader.store is not None
            for _ in range(3):
                for one, other in zip(files, loader, strict=True):
                    assert torch.equal(one.inputs.to_local(), other.inputs.to_local())
                    assert torch.equal(one.targets, other.targets)
            assert {entry.block.dtype for entry in loader.store.entries.values()} == {kept}

    run_local(job, 4, timeout=60)


@pytest.mark.parametrize("root", ["universes", "public_universes", "volumes"])
@pytest.mark.parametrize(
    ("data", "spatial"), [(1, (1, 1, 1)), (2, (1, 2, 1)), (3, (1, 1, 1)), (1, (2, 1, 2))]
)
def test_both_layouts_and_labels(
    root: str, data: int, spatial: tuple[int, int, int], request: pytest.FixtureRequest
) -> None:
    folder = request.getfixturevalue(root)
    normalize = "ct" if root == "volumes" else "standardize"

    def job(transport: Transport) -> None:
        mesh = Mesh(transport, data, spatial)
        plain, dataset = (ShardDataset(folder, normalize=normalize) for _ in range(2))
        with Loader(plain, mesh, 5) as files, Loader(dataset, mesh, 5, store="memory") as loader:
            for _ in range(2):
                for one, other in zip(files, loader, strict=True):
                    assert torch.equal(one.inputs.to_local(), other.inputs.to_local())
                    assert torch.equal(local_of(one.targets), local_of(other.targets))
            before = dataset.bytes_read
            for _ in loader:
                pass
            assert dataset.bytes_read == before > 0

    run_local(job, data * spatial[0] * spatial[1] * spatial[2], timeout=60)


@pytest.mark.parametrize("prefetch", [1, 3])
def test_messages_travel_while_steps_compute(prefetch: int) -> None:
    """A message takes 50 ms and a step 70 ms: without overlap, waiting is 40 % of the time."""

    def job(transport: Transport) -> None:
        mesh = Mesh(transport, 2, seed=1)
        with Loader(Stored(12), mesh, 2, prefetch=prefetch, store="memory") as loader:
            for _ in loader:
                pass
            waited, began = 0.0, time.perf_counter()
            for _ in range(2):
                for _ in loader:
                    waited = waited or loader.waited_s  # nothing can hide the first ones
                    time.sleep(0.07)
            assert loader.waited_s - waited <= 0.2 * (time.perf_counter() - began)
            assert loader.store is not None
            assert loader.store.counted().received_bytes > 0

    with delayed(Latency(0.05)):
        run_local(job, 2, timeout=60)


def test_labels_have_the_smallest_type_that_holds_the_classes(volumes: Path) -> None:
    classes = len(ShardDataset(volumes).manifest.class_names)
    assert 1 < classes < 256
    for ignored, dtype in (
        (None, torch.uint8), (255, torch.uint8), (256, torch.int16), (-1, torch.int16),
        (40_000, torch.int32), (2**40, torch.int64),
    ):  # fmt: skip
        assert ShardDataset(volumes, ignore_label=ignored).label_dtype == dtype


def test_labels_that_are_accepted_are_a_part_of_the_identity(volumes: Path) -> None:
    """Blocks of an earlier run would bring labels that this one refuses."""
    found = {ShardDataset(volumes, ignore_label=ignored).identity for ignored in (None, 200, 255)}
    assert len(found) == 3
