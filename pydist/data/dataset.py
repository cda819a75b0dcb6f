"""Samples in HDF5 files, of which each rank reads only its block."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import h5py
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from pydist.data.manifest import DataFile, Manifest
from pydist.data.normalize import Normalizer
from pydist.data.safe_open import HDF5_ERRORS, Readable, SafeFile, safe_open
from pydist.errors import DataError, UsageError

if TYPE_CHECKING:
    from pydist.partition import Box


class BadSample(DataError):
    """A sample can't be used: a value is NaN or infinite, or its bytes are damaged."""


class _Sample(NamedTuple):
    file: DataFile
    offset: tuple[int, int, int]
    mean: float


class ShardDataset(Dataset[tuple[Tensor, Tensor]]):
    """The samples of one split of a data set, readable by blocks.

    It is a torch `Dataset` as well: `dataset[i]` is the whole sample and its target. Files are
    opened when first read, in the process that reads; none is carried over a fork or a pickle.
    Several threads may read.

    Args:
        root: folder with `dataset.json`, as `generate_universes` and `index_folder` write it.
        split: which split, "train" or "val".
        normalize: "none", "log1p", "mean" or "standardize"; see `Normalizer`.
        dtype: of samples and targets, `torch.float32` or `torch.float64`.
        allow_roots: folders that links and virtual datasets may lead to; see `safe_open`.
        open_files: how many files are held open.
        manifest: instead of the one in `root`, for folders that can't be written.
        driver: makes the file object to read a path through; by default HDF5 reads the file.

    Raises:
        DataError: the manifest is missing or damaged, or lacks what `normalize` needs.
        UsageError: no such split, normalisation or dtype.
    """

    def __init__(
        self,
        root: str | Path,
        split: str = "train",
        *,
        normalize: str = "log1p",
        dtype: torch.dtype = torch.float32,
        allow_roots: Sequence[str | Path] = (),
        open_files: int = 64,
        manifest: Manifest | None = None,
        driver: Callable[[Path], Readable] | None = None,
    ) -> None:
        if dtype not in (torch.float32, torch.float64):
            raise UsageError(f"dtype={dtype}; possible are torch.float32 and torch.float64")
        self.root = Path(root)
        self.split = split
        self.dtype = dtype
        self.manifest = Manifest.load(self.root) if manifest is None else manifest
        self.sample_shape = self.manifest.sample_shape
        """(C, D, H, W) of one sample."""
        self._normalizer = Normalizer(normalize, self.manifest, str(dtype).removeprefix("torch."))
        self._allow_roots = tuple(allow_roots)
        self._open_files = open_files
        self._driver = driver
        self._samples = _samples_of(self.manifest, split)
        if not self._samples:
            found = ", ".join(f"{k} ({n} samples)" for k, n in self.manifest.splits.items())
            raise UsageError(f"{self.root} has no split {split!r}; it has {found or 'none'}")
        self._handles = _Handles()

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.read_block(index), self.target(index)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_handles": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._handles = _Handles()

    @property
    def num_targets(self) -> int:
        """Values to predict for each sample."""
        return len(self.manifest.target_names)

    @property
    def identity(self) -> str:
        """What the content depends on: the manifest, the split, and how values are normalised."""
        chosen = (self.manifest.digest, self.split, self._normalizer.kind, str(self.dtype))
        return " ".join(chosen)

    def read_block(self, index: int, box: Box | None = None, out: Tensor | None = None) -> Tensor:
        """Reads one block of one sample; nothing else is read from the disk.

        From a contiguous file the block's bytes are read, from a chunked one the chunks it meets.

        Args:
            index: the sample, 0 <= index < len(self).
            box: the block in the sample's indices (C, D, H, W); the whole sample by default.
            out: where to put it, contiguous, of the block's shape and this data set's dtype.

        Returns:
            The normalised block, [C, D, H, W] of the box; `out` if it was given.

        Raises:
            BadSample: a value is NaN or infinite (or has no logarithm), or the bytes are damaged.
            DataError: the file is missing, cut short, or not what the manifest says.
        """
        sample = self._sample(index)
        lo, hi = ((0,) * 4, self.sample_shape) if box is None else (tuple(box.lo), tuple(box.hi))
        self._check_box(lo, hi)
        shape = tuple(b - a for a, b in zip(lo, hi, strict=True))
        if out is None:
            out = torch.empty(shape, dtype=self.dtype)
        elif tuple(out.shape) != shape or out.dtype != self.dtype or not out.is_contiguous():
            raise UsageError(
                f"out is {tuple(out.shape)} {out.dtype}: contiguous {shape} {self.dtype} is needed"
            )
        if out.numel() == 0:
            return out
        stored = self._read(index, sample, lo, hi)
        values = out.numpy()
        self._normalizer(stored, lo[0], sample.mean, values)
        if not np.isfinite(values).all():
            self._refuse(index, sample, stored, values, lo)
        return out

    def target(self, index: int) -> Tensor:
        """The values to predict for a sample, [num_targets].

        Raises:
            BadSample: a value is NaN or infinite.
            DataError: the file is missing, or has no such dataset.
        """
        sample = self._sample(index)
        name = self.manifest.target
        handles = self._current()
        with handles.lock:
            opened = self._open(handles, sample.file)
            if opened.target is None:
                dataset = opened.file.dataset(name)
                if dataset.shape != (self.num_targets,):
                    raise DataError(
                        f"{opened.file.path}: {name!r} has the shape {dataset.shape}; "
                        f"({self.num_targets},) was expected: {self.manifest.target_names}"
                    )
                try:
                    opened.target = dataset[...].astype(np.float64)
                except HDF5_ERRORS as error:
                    raise BadSample(
                        f"{self._where(sample, index)}: {name!r} is damaged: {_line(error)}"
                    ) from error
            values = opened.target
        if not np.isfinite(values).all():
            raise BadSample(f"{self._where(sample, index)}, {name!r} is {values.tolist()}")
        return torch.from_numpy(values).to(self.dtype)

    def close(self) -> None:
        """Closes all files; they are opened again when needed."""
        handles = self._current()
        with handles.lock:
            while handles.files:
                handles.files.popitem()[1].file.close()

    def _sample(self, index: int) -> _Sample:
        if not 0 <= index < len(self._samples):
            raise IndexError(f"sample {index} of {len(self._samples)} in the split {self.split!r}")
        return self._samples[index]

    def _check_box(self, lo: tuple[int, ...], hi: tuple[int, ...]) -> None:
        inside = len(lo) == 4 and all(
            0 <= a <= b <= n for a, b, n in zip(lo, hi, self.sample_shape, strict=True)
        )
        if not inside:
            raise UsageError(f"block {lo} to {hi} is not in a sample of {self.sample_shape}")

    def _read(
        self, index: int, sample: _Sample, lo: tuple[int, ...], hi: tuple[int, ...]
    ) -> npt.NDArray[Any]:
        """The stored values of a block, as [C, D, H, W]."""
        window = tuple(
            slice(o + a, o + b) for o, a, b in zip((0, *sample.offset), lo, hi, strict=True)
        )
        last = self.manifest.axes == "DHWC"
        handles = self._current()
        with handles.lock:
            dataset = self._open(handles, sample.file).dataset
            try:
                stored = dataset[(*window[1:], window[0]) if last else window]
            except HDF5_ERRORS as error:
                where = self._where(sample, index)
                raise BadSample(f"{where}: damaged: {_line(error)}") from error
        stored = stored.astype(stored.dtype.newbyteorder("="), copy=False)
        return np.moveaxis(stored, -1, 0) if last else stored

    def _current(self) -> _Handles:
        """The open files of this process; those of a parent are left alone."""
        if self._handles.pid != os.getpid():
            self._handles = _Handles()
        return self._handles

    def _open(self, handles: _Handles, entry: DataFile) -> _Opened:
        """The open file, from the least recently used ones or new; the lock is held."""
        if entry.path in handles.files:
            handles.files.move_to_end(entry.path)
            return handles.files[entry.path]
        path = self.root / entry.path
        driver = None if self._driver is None else self._driver(path)
        file = safe_open(path, allow_roots=self._allow_roots, driver=driver)
        try:
            dataset = file.dataset(self.manifest.dataset)
            self._check_file(file, dataset, entry)
        except BaseException:
            file.close()
            raise
        handles.files[entry.path] = _Opened(file, dataset)
        if len(handles.files) > self._open_files:
            handles.files.popitem(last=False)[1].file.close()
        return handles.files[entry.path]

    def _check_file(self, file: SafeFile, dataset: h5py.Dataset, entry: DataFile) -> None:
        """Compares a file with what the manifest says of it."""
        where = f"{file.path}: {self.manifest.dataset!r}"
        expected = np.dtype(self.manifest.dtype)
        if (dataset.dtype.kind, dataset.dtype.itemsize) != (expected.kind, expected.itemsize):
            raise DataError(f"{where} holds {dataset.dtype}; the manifest says {expected}")
        reach = [max(o[axis] for o in entry.offsets) for axis in range(3)]
        extents = [r + n for r, n in zip(reach, self.sample_shape[1:], strict=True)]
        channels = self.sample_shape[0]
        last = self.manifest.axes == "DHWC"
        needed = (*extents, channels) if last else (channels, *extents)
        fits = dataset.ndim == 4 and all(n >= m for n, m in zip(dataset.shape, needed, strict=True))
        if not fits or dataset.shape[3 if last else 0] != channels:
            raise DataError(f"{where} has the shape {dataset.shape}; {needed} was expected")

    def _where(self, sample: _Sample, index: int) -> str:
        return (
            f"{self.root / sample.file.path}: {self.manifest.dataset!r}, sample {index} of "
            f"{self.split!r}"
        )

    def _refuse(
        self,
        index: int,
        sample: _Sample,
        stored: npt.NDArray[Any],
        values: npt.NDArray[Any],
        lo: tuple[int, ...],
    ) -> None:
        """Raises `BadSample` for the first value that is not finite."""
        first = np.unravel_index(int(np.argmin(np.isfinite(values))), values.shape)
        channel, *voxel = (int(p) + a for p, a in zip(first, lo, strict=True))
        raise BadSample(
            f"{self._where(sample, index)}: value {stored[first]} at channel {channel}, voxel "
            f"{tuple(voxel)}, normalised to {values[first]}"
        )


class _Opened:
    """An open file with its checked dataset, and the target once it was read."""

    def __init__(self, file: SafeFile, dataset: h5py.Dataset) -> None:
        self.file = file
        self.dataset = dataset
        self.target: npt.NDArray[np.float64] | None = None


class _Handles:
    """The open files of one process, by path; the least recently used come first."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.lock = threading.Lock()
        self.files: OrderedDict[str, _Opened] = OrderedDict()


def _samples_of(manifest: Manifest, split: str) -> list[_Sample]:
    return [
        _Sample(file, offset, mean)
        for file in manifest.files
        if file.split == split
        for offset, mean in zip(file.offsets, file.means or (1.0,) * len(file.offsets), strict=True)
    ]


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())
