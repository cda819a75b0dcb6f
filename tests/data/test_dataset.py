"""Tests of reading blocks: right values, no extra bytes, from any process and thread."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from pydist.data import ShardDataset, UniverseOptions, generate_universes
from pydist.errors import UsageError
from pydist.partition import Box
from pydist.train.config import DataConfig
from support.data.reading import Meter, first_block


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...] = (4, 8, 8, 8)) -> Box:
    lo = [draw(st.integers(0, n)) for n in shape]
    hi = [draw(st.integers(a, n)) for a, n in zip(lo, shape, strict=True)]
    return Box(lo, hi)


def cut(whole: torch.Tensor, box: Box) -> torch.Tensor:
    return whole[box.slices]


# -- values -----------------------------------------------------------------------------------


@pytest.mark.parametrize("normalize", ["none", "log1p", "mean", "standardize"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values(universes: Path, normalize: str, dtype: torch.dtype) -> None:
    dataset = ShardDataset(universes, normalize=normalize, dtype=dtype)
    manifest = dataset.manifest
    with h5py.File(universes / manifest.files[5].path) as file:
        x, unit = file["full"][...].astype(np.float64), file["unitPar"][...]
    c = (slice(None), None, None, None)
    expected = {
        "none": x,
        "log1p": np.log1p(x),
        "mean": x / x.mean(),
        "standardize": (np.log1p(x) - np.array(manifest.log1p_mean)[c])
        / np.array(manifest.log1p_std)[c],
    }[normalize]
    inputs, target = dataset[5]
    assert inputs.dtype == target.dtype == dtype
    np.testing.assert_allclose(inputs, expected, rtol=1e-6 if dtype == torch.float32 else 1e-13)
    np.testing.assert_array_equal(target, unit)
    target.mul_(2)  # by a script
    np.testing.assert_array_equal(dataset[5][1], unit)


def test_standardized_training_data_has_mean_0_and_deviation_1(universes: Path) -> None:
    dataset = ShardDataset(universes, normalize="standardize", dtype=torch.float64)
    every = torch.stack([dataset[i][0] for i in range(len(dataset))])
    torch.testing.assert_close(every.mean((0, 2, 3, 4)), torch.zeros(4).double(), atol=1e-6, rtol=0)
    torch.testing.assert_close(
        every.std((0, 2, 3, 4), correction=0), torch.ones(4).double(), atol=1e-6, rtol=0
    )


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(box=boxes(), index=st.integers(0, 23), normalize=st.sampled_from(["log1p", "mean"]))
def test_block_is_the_part_of_the_sample_to_the_bit(
    universes: Path, public_universes: Path, box: Box, index: int, normalize: str
) -> None:
    ours = ShardDataset(universes, normalize=normalize)
    public = ShardDataset(public_universes, normalize=normalize)
    expected = cut(ours.read_block(index), box)
    assert torch.equal(ours.read_block(index, box), expected)
    assert torch.equal(public.read_block(index, box), expected)
    assert torch.equal(ours.target(index), public.target(index))


@pytest.mark.parametrize("stored", ["i1", "u1", "u2", ">i2", "i4", ">f4", "f8", "f2"])
def test_stored_types(write_samples: Callable[..., Path], stored: str) -> None:
    counts = np.random.default_rng(0).integers(0, 100, (2, 3, 4, 5)).astype(stored)
    dataset = ShardDataset(write_samples([counts]), normalize="log1p")
    np.testing.assert_allclose(dataset[0][0], np.log1p(counts.astype(np.float64)), rtol=1e-6)


def test_by_default_values_are_as_they_are_stored(write_samples: Callable[..., Path]) -> None:
    """A run's configuration has the same default; intensities may be negative."""
    assert DataConfig().normalize == "none"
    sample = np.random.default_rng(0).normal(-5, 900, (1, 4, 3, 2)).astype(np.float32)
    np.testing.assert_array_equal(ShardDataset(write_samples([sample])).read_block(0), sample)


def test_blocks_of_float_samples_equal_the_whole_to_the_bit(
    write_samples: Callable[..., Path],
) -> None:
    sample = np.random.default_rng(0).exponential(size=(2, 7, 9, 11)).astype(np.float32)
    dataset = ShardDataset(write_samples([sample]), normalize="log1p")
    whole = dataset.read_block(0)
    for axis in range(1, 4):
        for start in range(sample.shape[axis]):
            lo, hi = [0, 0, 0, 0], list(sample.shape)
            lo[axis], hi[axis] = start, start + 1
            box = Box(lo, hi)
            assert torch.equal(dataset.read_block(0, box), cut(whole, box))


def test_reads_into_a_given_tensor(universes: Path) -> None:
    dataset = ShardDataset(universes)
    out = torch.full((3, 4, 8, 8, 8), -1.0)
    assert dataset.read_block(7, out=out[1]).data_ptr() == out[1].data_ptr()
    assert torch.equal(out[1], dataset[7][0])
    assert (out[0] == -1).all()
    assert (out[2] == -1).all()
    with pytest.raises(UsageError, match="contiguous"):
        dataset.read_block(7, out=torch.empty(8, 8, 8, 4).permute(3, 0, 1, 2))


def test_splits(universes: Path) -> None:
    train, val = ShardDataset(universes), ShardDataset(universes, "val")
    assert (len(train), len(val)) == (24, 8)
    assert not {tuple(train.target(i).tolist()) for i in range(24)} & {
        tuple(val.target(i).tolist()) for i in range(8)
    }
    with pytest.raises(UsageError, match=r"no split 'test'; it has train \(24 samples\), val"):
        ShardDataset(universes, "test")


# -- bytes ------------------------------------------------------------------------------------


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(box=boxes())
def test_contiguous_files_give_the_block_and_no_byte_more(
    universes: Path, public_universes: Path, box: Box
) -> None:
    for folder in (universes, public_universes):
        meter = Meter()
        dataset = ShardDataset(folder, driver=meter)
        dataset.read_block(3, Box((0,) * 4, (1,) * 4))  # opens the file and reads its metadata
        assert meter.of(partial(dataset.read_block, 3, box)) == box.volume * 2
        dataset.close()


def test_opening_reads_little_besides_the_block(universes: Path) -> None:
    meter = Meter()
    dataset = ShardDataset(universes, driver=meter)
    assert meter.of(lambda: dataset.read_block(0, Box((0,) * 4, (4, 4, 8, 8)))) < 2048 + 8192
    dataset.close()


def test_file_on_disk_is_read_exactly_too(tmp_path: Path) -> None:
    """The kernel's count, without a counting driver, shows that the sieve buffer is off."""
    generate_universes(tmp_path, UniverseOptions(count=1, width=64, box_width=64))
    dataset = ShardDataset(tmp_path)

    def bytes_read() -> int:
        lines = Path("/proc/self/io").read_text().splitlines()
        return int(dict(line.split(": ") for line in lines)["rchar"])

    dataset.read_block(0, Box((0,) * 4, (1,) * 4))
    for axis in (1, 2, 3):
        lo, hi = [0, 0, 0, 0], [4, 64, 64, 64]
        lo[axis], hi[axis] = 32, 48
        before = bytes_read()
        own = bytes_read() - before
        before = bytes_read()
        dataset.read_block(0, Box(lo, hi))
        found = bytes_read() - before - own
        wanted = 4 * 64 * 64 * 16 * 2
        assert wanted <= found < wanted * 1.05, f"axis {axis}"


def test_chunked_file_gives_the_chunks_touched(write_samples: Callable[..., Path]) -> None:
    meter = Meter()
    counts = np.random.default_rng(0).integers(0, 9, (2, 32, 32, 32)).astype(np.int16)
    root = write_samples([counts], chunks=(1, 8, 16, 32), fletcher32=True)
    dataset = ShardDataset(root, driver=meter)
    dataset.read_block(0, Box((0,) * 4, (1,) * 4))
    chunk = 8 * 16 * 32 * 2 + 4
    box = Box((0, 7, 3, 0), (2, 9, 15, 5))
    read = meter.of(lambda: dataset.read_block(0, box))
    # This read includes the chunk tree once; HDF5 caches the chunk at the origin.
    assert 3 * chunk <= read <= 4 * chunk + 4096
    assert torch.equal(dataset.read_block(0, box), cut(dataset.read_block(0), box))
    dataset.close()


# -- files, processes, threads ----------------------------------------------------------------


def test_files_are_opened_when_needed_and_only_so_many(universes: Path) -> None:
    meter = Meter()
    dataset = ShardDataset(universes, open_files=3, driver=meter)
    assert not meter.files
    first = [dataset.read_block(i) for i in (0, 1, 2, 0, 1, 2)]
    assert len(meter.files) == 3
    dataset.read_block(3)  # closes 0, the least recently used
    dataset.read_block(1)
    assert len(meter.files) == 4
    assert torch.equal(dataset.read_block(0), first[0])
    assert len(meter.files) == 5
    dataset.close()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_no_open_file_crosses_a_fork(universes: Path) -> None:
    meter = Meter()
    dataset = ShardDataset(universes, driver=meter)
    expected = dataset.read_block(0)
    dataset._files._handles.lock.acquire()  # as if another thread were reading at the fork
    pid = os.fork()
    if pid == 0:
        good = torch.equal(dataset.read_block(0), expected) and len(meter.files) == 2
        os._exit(0 if good else 1)
    dataset._files._handles.lock.release()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert torch.equal(dataset.read_block(0), expected)
    assert len(meter.files) == 1
    dataset.close()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_torch_s_loader_with_workers_reads_the_same(universes: Path) -> None:
    dataset = ShardDataset(universes)
    dataset.read_block(0)  # a file is open when the workers start
    alone, shared = (list(DataLoader(dataset, 8, num_workers=n)) for n in (0, 2))
    assert len(alone) == len(shared) == 3
    for expected, found in zip(alone, shared, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_goes_to_another_process_by_pickle(universes: Path) -> None:
    dataset = ShardDataset(universes)
    expected = dataset.read_block(0)
    assert torch.equal(pickle.loads(pickle.dumps(dataset)).read_block(0), expected)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(first_block, (dataset,)) == expected.flatten().tolist()
    dataset.close()


def test_threads_may_read_at_once(universes: Path) -> None:
    dataset = ShardDataset(universes, open_files=2)
    expected = [dataset.read_block(i) for i in range(6)]
    wrong: list[int] = []

    def read(start: int) -> None:
        for k in range(60):
            i = (start + k) % 6
            if not torch.equal(dataset.read_block(i), expected[i]):
                wrong.append(i)

    threads = [threading.Thread(target=read, args=(start,)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_reading_leaves_the_interpreter_to_other_threads(
    write_samples: Callable[..., Path],
) -> None:
    """HDF5, its filters and the normalization run without the GIL."""
    counts = np.random.default_rng(0).poisson(1, (1, 160, 160, 160)).astype(np.int16)
    root = write_samples([counts], chunks=counts.shape, compression="gzip")
    dataset = ShardDataset(root)
    dataset.target(0)  # opens the file
    took: list[float] = []

    def read() -> None:
        started = time.perf_counter()
        dataset.read_block(0)
        took.append(time.perf_counter() - started)

    thread = threading.Thread(target=read)
    thread.start()
    longest, last = 0.0, time.perf_counter()
    while thread.is_alive():
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    assert longest < took[0] / 2, f"stood still for {longest:.3f} s of {took[0]:.3f} s"
