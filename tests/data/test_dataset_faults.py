"""Tests of faulty samples, files and calls: each gives one clear line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from pydist.data import BadSample, ShardDataset
from pydist.errors import DataError, UsageError
from pydist.partition import Box


def one_line(caught: pytest.ExceptionInfo[Exception]) -> str:
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_bad_value_is_named_with_file_sample_and_voxel(
    write_samples: Callable[..., Path], value: float
) -> None:
    samples = [np.ones((2, 4, 5, 6), np.float32) for _ in range(3)]
    samples[1][1, 3, 2, 4] = value
    root = write_samples(samples)
    dataset = ShardDataset(root)
    dataset.read_block(0)
    box = Box((1, 2, 2, 3), (2, 4, 4, 6))
    with pytest.raises(BadSample) as caught:
        dataset.read_block(1, box)
    assert one_line(caught).startswith(
        f"{root / 'sample_1.hdf5'}: 'full', sample 1 of 'train': value {value} at channel 1, "
        "voxel (3, 2, 4)"
    )
    dataset.read_block(1, Box((0, 0, 0, 0), (1, 4, 5, 6)))  # another rank's block is fine


def test_a_window_clips_infinite_values_and_refuses_nan(write_samples: Callable[..., Path]) -> None:
    samples = [np.ones((1, 2, 2, 2), np.float32) for _ in range(3)]
    for sample, value in zip(samples, (np.inf, -np.inf, np.nan), strict=True):
        sample[0, 0, 0, 0] = value
    dataset = ShardDataset(write_samples(samples), normalize="window", window=(0.0, 1.0))
    assert [float(dataset.read_block(n)[0, 0, 0, 0]) for n in (0, 1)] == [1, 0]
    with pytest.raises(BadSample, match="value nan at channel 0"):
        dataset.read_block(2)


def test_count_without_a_logarithm_is_a_bad_value(write_samples: Callable[..., Path]) -> None:
    sample = np.zeros((1, 2, 2, 2), np.int16)
    sample[0, 1, 0, 1] = -1
    root = write_samples([sample])
    with pytest.raises(BadSample, match=r"value -1 at channel 0, voxel \(1, 0, 1\)"):
        ShardDataset(root, normalize="log1p").read_block(0)
    assert ShardDataset(root, normalize="none").read_block(0).min() == -1


def test_flipped_bit_in_a_chunk_is_noticed(write_samples: Callable[..., Path]) -> None:
    counts = np.random.default_rng(0).integers(0, 9, (2, 8, 8, 8)).astype(np.int16)
    root = write_samples([counts], chunks=(1, 8, 8, 8), fletcher32=True)
    path = root / "sample_0.hdf5"
    image = bytearray(path.read_bytes())
    image[image.index(counts[1].tobytes()) + 100] ^= 4
    path.write_bytes(image)
    dataset = ShardDataset(root)
    dataset.read_block(0, Box((0, 0, 0, 0), (1, 8, 8, 8)))
    with pytest.raises(BadSample, match=r"sample_0\.hdf5: 'full', sample 0 of 'train': damaged"):
        dataset.read_block(0)


def test_truncated_file(write_samples: Callable[..., Path]) -> None:
    root = write_samples([np.ones((2, 8, 8, 8), np.float32)] * 2)
    path = root / "sample_1.hdf5"
    whole = path.read_bytes()
    for keep in (0, 7, 100, 2000, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:keep])
        with pytest.raises(DataError) as caught:
            ShardDataset(root).read_block(1)
        assert str(path) in one_line(caught)


def test_missing_file_and_missing_or_wrong_dataset(write_samples: Callable[..., Path]) -> None:
    root = write_samples([np.ones((2, 3, 3, 3), np.int16)] * 4)
    (root / "sample_0.hdf5").unlink()
    for i, change in {1: "missing", 2: "shape", 3: "type"}.items():
        with h5py.File(root / f"sample_{i}.hdf5", "w") as file:
            if change == "missing":
                file["volume"] = np.ones((2, 3, 3, 3), np.int16)
            elif change == "shape":
                file["full"] = np.ones((3, 3, 3, 2), np.int16)
            else:
                file["full"] = np.ones((2, 3, 3, 3), np.float32)
    expected = [
        "sample_0.hdf5: No such file",
        "no 'full' in '/'; it has volume",
        "'full' has the shape (3, 3, 3, 2); (2, 3, 3, 3) was expected",
        "'full' holds float32; the manifest says int16",
    ]
    dataset = ShardDataset(root)
    for i, what in enumerate(expected):
        with pytest.raises(DataError) as caught:
            dataset.read_block(i)
        assert what in one_line(caught)


def test_bad_targets(write_samples: Callable[..., Path]) -> None:
    root = write_samples([np.ones((2, 3, 3, 3), np.int16)] * 3)
    for i, target in enumerate((np.array([0, np.nan, 0, 0]), np.zeros(3), None)):
        with h5py.File(root / f"sample_{i}.hdf5", "a") as file:
            del file["unitPar"]
            if target is not None:
                file["unitPar"] = target
    dataset = ShardDataset(root)
    with pytest.raises(BadSample, match=r"sample 0 of 'train', 'unitPar' is \[0.0, nan"):
        dataset.target(0)
    with pytest.raises(DataError, match=r"'unitPar' has the shape \(3,\); \(4,\) was expected"):
        dataset.target(1)
    with pytest.raises(DataError, match=r"no 'unitPar' in '/'; it has full"):
        dataset.target(2)


def test_wrong_calls(universes: Path) -> None:
    dataset = ShardDataset(universes)
    with pytest.raises(IndexError, match="sample 24 of 24"):
        dataset.read_block(24)
    for lo, hi in (
        ((0, 0, 0, 0), (4, 8, 8, 9)),
        ((0, 0, 0), (8, 8, 8)),
        ((0, 5, 0, 0), (4, 4, 8, 8)),
    ):
        with pytest.raises(UsageError, match="is not in a sample"):
            dataset.read_block(0, type("Box", (), {"lo": lo, "hi": hi})())
    with pytest.raises(UsageError, match=r"torch\.float32 and torch\.float64"):
        ShardDataset(universes, dtype=torch.float16)
    with pytest.raises(UsageError, match="none, log1p, mean, standardize"):
        ShardDataset(universes, normalize="sqrt")


def test_statistics_that_are_not_there(
    write_samples: Callable[..., Path], edit_manifest: Callable[..., None]
) -> None:
    root = write_samples([np.ones((2, 3, 3, 3), np.int16)])
    with pytest.raises(DataError, match=r"standardize.*2 channels"):
        ShardDataset(root, normalize="standardize")
    edit_manifest(root, log1p_mean=[0.0, 0.0], log1p_std=[1.0, 0.0])
    with pytest.raises(DataError, match="standard deviation"):
        ShardDataset(root, normalize="standardize")
