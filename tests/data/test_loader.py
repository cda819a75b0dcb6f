"""Tests of the loader: right blocks on each rank, hidden reads, errors per batch, clean ends."""

from __future__ import annotations

import gc
import os
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from pydist.comm import LocalTransport, Transport
from pydist.data import BadSample, BatchSizes, Loader, PassRule, ShardDataset
from pydist.errors import DataError, UsageError
from pydist.mesh import Mesh
from pydist.partition import Box
from support.data.numbers import Numbers, on_ranks, seen
from support.data.reading import Meter


@pytest.mark.parametrize(
    ("data", "spatial"),
    [(1, (1, 1, 1)), (2, (2, 1, 1)), (1, (3, 1, 2)), (3, (1, 2, 1)), (1, (6, 1, 1))],
)
def test_every_rank_reads_its_blocks(data: int, spatial: tuple[int, int, int]) -> None:
    """Blocks may be uneven or empty: 4 planes on 6 ranks."""

    def job(transport: Transport) -> list:
        mesh, dataset = Mesh(transport, data, spatial, seed=3), Numbers(11)
        with Loader(dataset, mesh, 4) as loader:
            return [(b.epoch, b.step, b.count, seen(b, dataset)) for _ in range(2) for b in loader]

    ranks = data * spatial[0] * spatial[1] * spatial[2]
    found = on_ranks(ranks, job)
    group = ranks // data
    for rank in range(ranks):
        assert found[rank] == found[rank // group * group], "one group, one answer"
    for epoch in range(2):
        counted = [
            i for rank in range(0, ranks, group) for e, _, n, s in found[rank] if e == epoch and n
            for i in s
        ]  # fmt: skip
        assert sorted(counted) == list(range(11))


def test_blocks_come_from_the_file(universes: Path) -> None:
    def job(transport: Transport) -> None:
        mesh, dataset = Mesh(transport, 1, (2, 1, 2)), ShardDataset(universes)
        with Loader(dataset, mesh, 5) as loader:
            batch = next(iter(loader))
            assert batch.inputs.to_local().shape == (5, 4, 4, 8, 4)
            for n, index in enumerate(batch.indices):
                assert torch.equal(batch.inputs.full_tensor()[n], dataset[index][0])
            assert batch.inputs.dtype == batch.weight.dtype == torch.float32

    on_ranks(4, job)


def test_each_byte_is_read_by_one_rank(public_universes: Path) -> None:
    """Each of 4 ranks has half of the depth and half of the width."""

    def job(transport: Transport) -> int:
        meter = Meter()
        dataset = ShardDataset(public_universes, driver=meter)
        for index in range(0, 24, 8):
            dataset.target(index)  # opens the file of each universe
            dataset.read_block(index, Box((0,) * 4, (1,) * 4))
        opened = meter.count
        with Loader(dataset, Mesh(transport, 1, (2, 1, 2)), 5, training=False) as loader:
            assert sum(len(b.indices) for b in loader) == 24
        dataset.close()
        return meter.count - opened

    of_all_samples = 24 * 4 * 8**3 * 2
    assert on_ranks(4, job) == [of_all_samples // 4] * 4


def test_padding_has_no_weight() -> None:
    def job(transport: Transport) -> tuple:
        dataset = Numbers(4)
        with Loader(dataset, Mesh(transport, 3), 3, seed=1) as loader:
            last = list(loader)[-1]
        return (
            last.count,
            last.weight.tolist(),
            last.loss_scale,
            last.global_size,
            len(last.indices),
        )

    assert on_ranks(3, job) == [(1, [1.0], 3.0, 1, 1), (0, [0.0], 0.0, 1, 1), (0, [0.0], 0.0, 1, 1)]


def test_evaluation_sees_every_sample_once_each_time() -> None:
    def job(transport: Transport) -> list:
        dataset = Numbers(7)
        with Loader(dataset, Mesh(transport, 3), 3, training=False) as loader:
            return [[i for b in loader.batches(0) for i in seen(b, dataset)] for _ in range(2)]

    found = on_ranks(3, job)
    assert found == [[[0, 3, 6]] * 2, [[1, 4]] * 2, [[2, 5]] * 2]


def test_seed_is_the_meshs_by_default() -> None:
    def job(transport: Transport, mesh_seed: int, seed: int | None) -> list:
        with Loader(Numbers(20), Mesh(transport, seed=mesh_seed), 20, seed=seed) as loader:
            return next(iter(loader)).indices

    assert on_ranks(1, job, 1, None) == on_ranks(1, job, 2, 1) != on_ranks(1, job, 2, None)


@pytest.mark.parametrize(
    ("name", "values"),
    [("passes", [PassRule(4), PassRule(4, 2)]), ("divide", [True, False]), ("pad", [True, False])],
)
def test_ranks_with_different_passes_are_told(name: str, values: list[Any]) -> None:
    def body(transport: Transport) -> None:
        with pytest.raises(UsageError, match=f"the loader's {name} differs between the ranks"):
            Loader(Numbers(8), Mesh(transport, 1, (2, 1, 1)), 4, **{name: values[transport.rank]})

    on_ranks(2, body)


def test_ranks_with_different_data_are_told() -> None:
    def job(transport: Transport) -> str:
        dataset = Numbers(8)
        dataset.identity = f"set {transport.rank // 2}"
        with pytest.raises(UsageError) as caught:
            Loader(dataset, Mesh(transport), 4)
        return str(caught.value)

    message = "data set differs between the ranks: set 0 on rank 0, set 1 on rank 2"
    assert all(message in m for m in on_ranks(3, job))


# -- resume -----------------------------------------------------------------------------------


def test_resume_goes_on_with_the_next_batch_though_more_were_read() -> None:
    def job(transport: Transport) -> None:
        mesh = Mesh(transport)
        with Loader(Numbers(10), mesh, 2, prefetch=4) as loader:
            expected = [b.indices for _ in range(2) for b in loader]
        with Loader(Numbers(10), mesh, 2, prefetch=4) as first:
            batches = iter(first)
            got = [next(batches).indices for _ in range(3)]
            state = first.state_dict()
        with Loader(Numbers(10), mesh, 2) as second:
            second.load_state_dict(state)
            got += [b.indices for b in second] + [b.indices for b in second]
        assert got == expected
        with Loader(Numbers(10), mesh, 2) as third:
            assert [b.indices for b in third.batches(1, start=2)] == expected[7:]
            assert list(third.batches(1, start=5)) == []

    on_ranks(1, job)


def test_resume_goes_on_with_a_batch_that_the_loop_has_changed() -> None:
    def loader() -> Loader:
        sizes, rule = BatchSizes(4, [(4, 5)]), PassRule(4, by="batch")
        return Loader(Numbers(20), Mesh(LocalTransport()), sizes, passes=rule)

    with loader() as first, loader() as resumed:
        next(iter(first))
        before = first.state_dict()
        next(iter(first))
        first.change_batch(6)
        state = first.state_dict()
        expected = [b.indices for b in first]
        assert [len(each) for each in expected] == [6, 5]
        resumed.load_state_dict(state)
        assert [b.indices for b in resumed] == expected
        assert resumed.state_dict() == first.state_dict()
        first.load_state_dict(before)  # the same loader, from before the change
        assert [len(b.indices) for b in first] == [5, 5, 5, 1]
        with (
            pytest.raises(UsageError, match=r"batches that change at \[\(4, 5\)\] .*one at \[\]"),
            Loader(Numbers(20), Mesh(LocalTransport()), 4) as other,
        ):
            other.load_state_dict(state)


# -- reading ahead ----------------------------------------------------------------------------


@pytest.mark.parametrize("samples", [1, 2])
def test_slow_reads_are_hidden_behind_the_step(samples: int) -> None:
    """A read takes 50 ms and a step 70 ms per sample; waiting takes at most 2% of the time."""

    def job(transport: Transport) -> None:
        with Loader(Numbers(6 * samples, delay=0.05), Mesh(transport), samples) as loader:
            waits = []
            started = time.perf_counter()
            for _ in range(2):
                for _ in loader:
                    waits.append(loader.waited_s)
                    time.sleep(0.07 * samples)
            elapsed = time.perf_counter() - started
        assert waits[0] >= 0.045 * samples, "nothing can hide the first read"
        assert waits[-1] - waits[0] <= 0.02 * elapsed

    on_ranks(1, job)


def test_waiting_is_measured() -> None:
    def job(transport: Transport) -> None:
        with Loader(Numbers(4, delay=0.05), Mesh(transport), 1) as loader:
            for _ in loader:
                pass
        assert loader.waited_s >= 0.15  # four reads of 0.05 s

    on_ranks(1, job)


def test_reads_only_so_far_ahead() -> None:
    def job(transport: Transport) -> None:
        dataset = Numbers(20)
        with Loader(dataset, Mesh(transport), 1, prefetch=3, seed=0) as loader:
            batches = iter(loader)
            for taken in range(1, 5):
                next(batches)
                time.sleep(0.05)
                assert len(dataset.reads) == taken + 3
        order = loader.sampler.order(0).tolist()
        assert dataset.reads == order[:7], "each sample is read once, in order"

    on_ranks(1, job)


def test_training_reads_on_into_the_next_epoch_and_evaluation_does_not() -> None:
    def job(transport: Transport, training: bool) -> int:
        dataset = Numbers(3)
        with Loader(dataset, Mesh(transport), 1, training=training) as loader:
            for _ in loader:
                pass
            time.sleep(0.05)
        return len(dataset.reads)

    assert on_ranks(1, job, True) == [5]
    assert on_ranks(1, job, False) == [3]


# -- ends -------------------------------------------------------------------------------------


def loader_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("pydist-loader")]


def test_a_closed_loader_says_so() -> None:
    def job(transport: Transport) -> None:
        with Loader(Numbers(3), Mesh(transport), 1) as loader:
            next(iter(loader))
        with pytest.raises(UsageError, match="this loader is closed: make another one"):
            next(iter(loader))
        with pytest.raises(UsageError, match="this loader is closed"):
            loader.start()

    on_ranks(1, job)


def test_no_thread_is_left_behind() -> None:
    def job(transport: Transport) -> None:
        mesh = Mesh(transport)
        with Loader(Numbers(50, delay=0.01), mesh, 1, prefetch=8) as loader:
            next(iter(loader))
            assert loader_threads()
        assert not loader_threads()
        loader.close()
        forgotten = Loader(Numbers(50), mesh, 1)
        next(iter(forgotten))
        del forgotten
        gc.collect()
        for _ in range(100):
            if not loader_threads():
                return
            time.sleep(0.01)
        raise AssertionError("a forgotten loader keeps its thread")

    on_ranks(1, job)


def test_reading_ahead_forks_nothing(universes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fork after MPI_Init has undefined behavior."""

    def refuse(*_: object) -> int:
        raise AssertionError("forked")

    for name in ("fork", "posix_spawn"):
        monkeypatch.setattr(os, name, refuse)
    monkeypatch.setattr(subprocess, "Popen", refuse)

    def job(transport: Transport) -> int:
        with Loader(ShardDataset(universes), Mesh(transport), 6) as loader:
            return len([b for _ in range(2) for b in loader])

    assert on_ranks(1, job) == [8]


def test_nothing_starts_before_it_is_asked_for() -> None:
    def job(transport: Transport) -> None:
        dataset = Numbers(5)
        with Loader(dataset, Mesh(transport), 1):
            time.sleep(0.02)
            assert not dataset.reads
            assert not loader_threads()

    on_ranks(1, job)


def test_wrong_options_are_refused() -> None:
    def job(transport: Transport) -> None:
        for options in ({"prefetch": 0}, {"prefetch": 10**12}, {"on_bad_sample": "ignore"}):
            with pytest.raises(UsageError, match="stop or skip are possible"):
                Loader(Numbers(5), Mesh(transport), 1, **options)
        for readers, store in ((0, "off"), (65, "off"), (2, "memory")):
            with pytest.raises(UsageError, match=f"readers = {readers}"):
                Loader(Numbers(5), Mesh(transport), 1, readers=readers, store=store)

    on_ranks(1, job)


# -- errors -----------------------------------------------------------------------------------


def test_error_in_the_background_comes_at_its_batch() -> None:
    def job(transport: Transport) -> None:
        dataset = Numbers(10, bad={3: None})
        with Loader(dataset, Mesh(transport), 2, training=False, prefetch=3) as loader:
            batches = iter(loader)
            assert next(batches).indices == (0, 1)
            time.sleep(0.05)
            with pytest.raises(BadSample, match="numbers: sample 3 is bad"):
                next(batches)
            assert [b.indices for b in loader.batches(0, start=2)] == [(4, 5), (6, 7), (8, 9)]

    on_ranks(1, job)


def test_missing_file_is_named(universes: Path, write_samples: Callable[..., Path]) -> None:
    root = write_samples([np.ones((1, 4, 4, 4), np.int16)] * 3)
    (root / "sample_2.hdf5").unlink()

    def job(transport: Transport) -> None:
        with (
            Loader(ShardDataset(root), Mesh(transport), 1, training=False) as loader,
            pytest.raises(DataError, match=r"sample_2\.hdf5: No such file"),
        ):
            list(loader)

    on_ranks(1, job)


def test_bad_sample_is_replaced_on_all_ranks_of_its_group() -> None:
    """Sample 2 and its first replacement are bad in the block of one rank only."""
    corner, other = Box((0, 0, 0, 0), (1, 1, 1, 1)), Box((0, 3, 0, 0), (1, 4, 1, 1))

    def job(transport: Transport) -> tuple:
        dataset = Numbers(400, bad={2: corner, 3: other})
        mesh = Mesh(transport, 1, (2, 1, 1))
        with Loader(dataset, mesh, 4, training=False, on_bad_sample="skip") as loader:
            batch = next(iter(loader))
            full = batch.inputs.full_tensor()
        assert batch.indices == (0, 1, 2, 3)
        assert batch.weight.tolist() == [1, 1, 0, 0]
        for n, index in enumerate((0, 1, 4, 4)):
            assert torch.equal(full[n], dataset.whole(index))
            assert torch.equal(batch.targets[n], dataset.target(index))
        return loader.skipped

    first, second = on_ranks(2, job)
    assert first == {2: "numbers: sample 2 is bad", 3: "bad on another rank"}
    assert second == {2: "bad on another rank", 3: "numbers: sample 3 is bad"}


def test_too_many_bad_samples_stop_the_run() -> None:
    def job(transport: Transport) -> None:
        dataset = Numbers(250, bad=dict.fromkeys((10, 90, 200)))
        with (
            Loader(dataset, Mesh(transport), 5, training=False, on_bad_sample="skip") as loader,
            pytest.raises(DataError, match="3 of 250 samples are bad, 2 may be skipped; the last"),
        ):
            list(loader)

    on_ranks(1, job)


@pytest.mark.parametrize("count", [1, 3])
def test_no_sample_can_replace_a_bad_one(count: int) -> None:
    """All others have another shape, or there is no other."""

    class Mixed(Numbers):
        def shape_of(self, index: int) -> tuple[int, int, int, int]:
            return self.sample_shape if index == 0 else (1, 9, 9, 9)

    def job(transport: Transport) -> None:
        dataset = Mixed(count, bad={0: None})
        with (
            Loader(
                dataset, Mesh(transport), 1, training=False, on_bad_sample="skip", prefetch=1
            ) as loader,
            pytest.raises(DataError, match="no good sample can replace a bad one: numbers: sample"),
        ):
            next(iter(loader))

    on_ranks(1, job)


def test_nan_in_one_ranks_block_is_skipped_from_files(write_samples: Callable[..., Path]) -> None:
    samples = [np.full((1, 4, 4, 4), i, np.float32) for i in range(3)]
    root = write_samples(samples)
    with h5py.File(root / "sample_1.hdf5", "a") as file:
        file["full"][0, 3, 0, 0] = np.nan

    def job(transport: Transport) -> None:
        dataset = ShardDataset(root, normalize="none")
        mesh = Mesh(transport, 1, (2, 1, 1))
        with Loader(dataset, mesh, 3, training=False, on_bad_sample="skip") as loader:
            (batch,) = list(loader)
            means = batch.inputs.full_tensor().mean((1, 2, 3, 4))
            assert means.tolist() == [0, 2, 2]
            assert batch.targets[:, 0].tolist() == [0, 2, 2]
            assert list(loader.skipped) == [1]

    on_ranks(2, job)
