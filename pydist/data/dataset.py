"""Reads data sets of samples in files; each rank reads only its block of a sample."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from pydist.data.axes import as_volume, channels_last, file_order, label_file_order
from pydist.data.file_table import Sample
from pydist.data.formats import Driver, StoredArray
from pydist.data.manifest import Manifest
from pydist.data.normalize import Normalizer, staged_dtype
from pydist.data.open_files import OpenedFile, OpenFiles, in_one_line
from pydist.errors import DataError, DoesNotFit, UsageError, out_of_memory

if TYPE_CHECKING:
    from pydist.partition import Box


class BadSample(DataError):
    """Error that a sample with NaN, an infinite value or damaged bytes raises."""


class ShardDataset(Dataset[tuple[Tensor, Tensor]]):
    """Data set that holds the samples of one split, readable by blocks.

    It is also a torch `Dataset`: `dataset[i]` is the full sample and its target (values of the
    sample, or the class of each voxel). Files are opened when first read, in the process that
    reads; none is carried over a fork or a pickle. Several threads may read.

    Args:
        root: folder with `dataset.json`, as `generate_universes`, `convert_nifti` and
            `index_folder` write it.
        split: the split, "train" or "val".
        normalize: "none", "log1p", "mean", "standardize", "window" or "ct"; see `Normalizer`. By
            default stored values are unchanged, as in a run's configuration.
        window: bounds for normalize="window".
        dtype: of samples and targets, `torch.float32` or `torch.float64`; labels are int64.
        allow_roots: folders that links and virtual datasets may lead to; see `safe_open`.
        open_files: the largest number of files that stay open.
        manifest: replaces the one in `root`, for folders that can't be written.
        driver: `MpiIo()` for HDF5 files by MPI-IO, or a function that makes the file object for
            reading a path; by default the format's library reads the file.
        ignore_label: a label that voxels may have besides the classes.
        untrusted: read the files in another process with limited memory, so that a file that
            crashes a library is a `DataError`.

    Raises:
        DataError: the manifest is missing or damaged, or lacks what `normalize` needs.
        UsageError: no such split, normalization or dtype.
    """

    def __init__(
        self,
        root: str | Path,
        split: str = "train",
        *,
        normalize: str = "none",
        window: tuple[float, float] | None = None,
        dtype: torch.dtype = torch.float32,
        allow_roots: Sequence[str | Path] = (),
        open_files: int = 64,
        manifest: Manifest | None = None,
        driver: Callable[[Path], Driver] | None = None,
        ignore_label: int | None = None,
        untrusted: bool = False,
    ) -> None:
        if dtype not in (torch.float32, torch.float64):
            raise UsageError(f"dtype={dtype}; possible are torch.float32 and torch.float64")
        self.root = Path(root)
        self.split = split
        self.dtype = dtype
        self.manifest = Manifest.load(self.root) if manifest is None else manifest
        self.sample_shape = self.manifest.sample_shape
        """Shape (C, D, H, W) of one sample; the largest extents, where samples differ."""
        self.ignore_label = ignore_label
        """A label that voxels may have besides the classes."""
        numbers = str(dtype).removeprefix("torch.")
        self._normalizer = Normalizer(normalize, self.manifest, numbers, window)
        staged = staged_dtype(self.manifest.dtype)
        self._stored_dtype: torch.dtype = getattr(torch, staged.name)
        self._samples = self.manifest.table.samples_of(split)
        if not len(self._samples):
            found = ", ".join(f"{k} ({n} samples)" for k, n in self.manifest.splits.items())
            raise UsageError(f"{self.root} has no split {split!r}; it has {found or 'none'}")
        self._files = OpenFiles(
            self.root, self.manifest, allow_roots, open_files, driver, untrusted
        )

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        target = self.read_labels(index) if self.labelled else self.target(index)
        return self.read_block(index), target

    @property
    def num_targets(self) -> int:
        """Number of values that are predicted for each sample."""
        return len(self.manifest.target_names)

    @property
    def dims(self) -> int:
        """Number of spatial dims that networks get: 2 for images [N, C, H, W]."""
        return self.manifest.dims

    @property
    def labelled(self) -> bool:
        """Whether `read_labels` returns the class of each voxel."""
        return bool(self.manifest.label)

    @property
    def identity(self) -> str:
        """Text that identifies the content: manifest, split, normalization, dtype, ignore label."""
        normalizer = self._normalizer
        chosen = [self.manifest.digest, self.split, normalizer.kind, str(self.dtype)]
        chosen += [str(normalizer.window)] if normalizer.window else []
        chosen += [] if self.ignore_label is None else [f"ignores {self.ignore_label}"]
        return " ".join(chosen)

    @property
    def value_range(self) -> tuple[npt.NDArray[Any], npt.NDArray[Any]] | None:
        """Least and largest value of each channel after normalization; None if it clips none."""
        return self._normalizer.value_range

    def shape_of(self, index: int) -> tuple[int, int, int, int]:
        """Returns the shape (C, D, H, W) of one sample."""
        extents = self.manifest.table.extents_of(self._number(index))
        return self.sample_shape if extents is None else (self.sample_shape[0], *extents)

    def read_block(self, index: int, box: Box | None = None, out: Tensor | None = None) -> Tensor:
        """Reads one block of one sample, and nothing else, from the disk.

        Reads the block's bytes from a contiguous file, the chunks it meets from a chunked one.

        Args:
            index: the sample, 0 <= index < len(self).
            box: the block in the sample's indices (C, D, H, W); the full sample by default.
            out: the destination, contiguous, of the block's shape and this data set's dtype.

        Returns:
            The normalized block, [C, D, H, W] of the box; `out` if it was given.

        Raises:
            BadSample: a value is NaN or infinite (or has no logarithm), or the bytes are damaged.
            DataError: the file is missing, cut short, or not what the manifest says.
        """
        sample = self._sample(index)
        lo, hi = _bounds(box, self.shape_of(index))
        out = _room(out, lo, hi, self.dtype)
        if out.numel() == 0:
            return out
        stored = self._read_samples(index, sample, lo, hi)
        values = out.numpy()
        if not self._normalizer(stored, lo[0], sample.mean, values):
            self._refuse(index, sample, stored, values, lo)
        return out

    @property
    def bytes_read(self) -> int:
        """Bytes of samples, labels and targets that this process has read from files so far."""
        return self._files.bytes_read

    @property
    def label_dtype(self) -> torch.dtype:
        """Smallest integer type that holds every label of `read_labels`."""
        classes = len(self.manifest.class_names)
        if not classes:  # then every integer is a label
            return torch.int64
        ignored = 0 if self.ignore_label is None else self.ignore_label
        return next(
            dtype
            for dtype in (torch.uint8, torch.int16, torch.int32, torch.int64)
            if torch.iinfo(dtype).min <= min(0, ignored) <= max(classes - 1, ignored)
            and max(classes - 1, ignored) <= torch.iinfo(dtype).max
        )

    @property
    def stored_dtype(self) -> torch.dtype:
        """Type of the values that `read_stored` reads."""
        return self._stored_dtype

    def read_stored(self, index: int, box: Box | None, out: Tensor) -> None:
        """Reads one block of one sample without normalization; see `read_block` and `normalize`.

        Args:
            index: the sample.
            box: the block.
            out: the destination, contiguous, in host memory, of the block's shape and
                `stored_dtype`.

        Raises:
            BadSample: the bytes are damaged.
            DataError: the file is missing, cut short, or not what the manifest says.
        """
        lo, hi = _bounds(box, self.shape_of(index))
        values = _room(out, lo, hi, self.stored_dtype).numpy()
        if values.size:
            self._read_samples(index, self._sample(index), lo, hi, values)

    def normalize(
        self, index: int, first_channel: int, stored: Tensor, out: Tensor, found: Tensor
    ) -> None:
        """Computes the network's input from stored values, on the device that holds them.

        Args:
            index: the sample.
            first_channel: the channel at index 0.
            stored: [C, D, H, W], of `stored_dtype`.
            out: the input, of this data set's dtype, on the same device.
            found: one int32 on that device; becomes 1 if a value is NaN or infinite.
        """
        if out.numel():
            dtype = staged_dtype(self.manifest.dtype)
            mean = self._sample(index).mean
            self._normalizer.launch(stored, dtype, first_channel, mean, out, found)

    def read_labels(self, index: int, box: Box | None = None, out: Tensor | None = None) -> Tensor:
        """Reads the labels of one block of one sample, as `read_block` reads values.

        Args:
            index: the sample.
            box: the block in the sample's indices (D, H, W).
            out: the destination, contiguous, int64.

        Returns:
            The class of each voxel, [D, H, W] of the box.

        Raises:
            BadSample: the bytes are damaged, or a label is none of the classes.
            DataError: the data set has no labels; the file is missing or not as expected.
        """
        sample = self._sample(index)
        if not self.labelled:
            raise DataError(f"{self.root} has no labels: its manifest names none")
        lo, hi = _bounds(box, self.shape_of(index)[1:])
        out = _room(out, lo, hi, torch.int64)
        if out.numel() == 0:
            return out

        def part(opened: OpenedFile) -> npt.NDArray[Any]:
            assert opened.label is not None
            window = label_file_order(self.manifest.axes, _window(sample.offset, lo, hi))
            return self._read(opened, opened.label, window, index, self.manifest.label)

        stored = self._files.read(sample.file, part)
        too_large = stored.dtype == np.uint64 and stored.max() > np.iinfo(np.int64).max
        if stored.dtype.kind == "f" or too_large:
            name = self.manifest.label
            raise DataError(f"{self._where(index, name)}: labels are integers of up to 63 bits")
        values = out.numpy()
        values[...] = stored.reshape(values.shape)
        classes = len(self.manifest.class_names)
        if classes and not 0 <= int(values.min()) <= int(values.max()) < classes:
            wrong = (values < 0) | (values >= classes)
            if self.ignore_label is not None:
                wrong &= values != self.ignore_label
            if wrong.any():
                self._refuse_label(index, values, int(np.argmax(wrong)), lo)
        return out

    def _refuse_label(
        self, index: int, labels: npt.NDArray[Any], wrong: int, lo: Sequence[int]
    ) -> None:
        """Raises `BadSample` for a label that is none of the classes."""
        voxel = np.unravel_index(wrong, labels.shape)
        where = tuple(int(p) + a for p, a in zip(voxel, lo, strict=True))
        hint = "; ignore_label leaves such voxels out" if self.ignore_label is None else ""
        raise BadSample(
            f"{self._where(index, self.manifest.label)}: label {labels[voxel]} at voxel {where}; "
            f"there are {len(self.manifest.class_names)} classes{hint}"
        )

    def target(self, index: int) -> Tensor:
        """Returns the values to predict for a sample, [num_targets].

        Raises:
            BadSample: a value is NaN or infinite.
            DataError: the file is missing, or has no such dataset.
        """
        sample = self._sample(index)
        name = self.manifest.target

        def part(opened: OpenedFile) -> npt.NDArray[np.float64]:
            if opened.target is None:
                with in_one_line(type(opened.file), opened.file.path):
                    dataset = opened.file.dataset(name)
                if dataset.shape != (self.num_targets,):
                    raise DataError(
                        f"{opened.file.path}: {name!r} has the shape {dataset.shape}; "
                        f"({self.num_targets},) was expected: {self.manifest.target_names}"
                    )
                values = self._read(opened, dataset, (), index, name)
                opened.target = values.astype(np.float64)
            return opened.target

        values = self._files.read(sample.file, part)
        if not np.isfinite(values).all():
            raise BadSample(f"{self._where(index)}, {name!r} is {values.tolist()}")
        return torch.from_numpy(values).to(self.dtype)

    def close(self) -> None:
        """Closes all files; later reads open them again."""
        self._files.close()

    def _sample(self, index: int) -> Sample:
        return self.manifest.table.sample(self._number(index))

    def _number(self, index: int) -> int:
        """Returns the number of a sample among all of the data set."""
        if not 0 <= index < len(self._samples):
            raise IndexError(f"sample {index} of {len(self._samples)} in the split {self.split!r}")
        return int(self._samples[index])

    def _read_samples(
        self,
        index: int,
        sample: Sample,
        lo: Sequence[int],
        hi: Sequence[int],
        out: npt.NDArray[Any] | None = None,
    ) -> npt.NDArray[Any]:
        """Reads the stored values of a block as [C, D, H, W]; into `out`, if given."""
        window = _window((0, *sample.offset), lo, hi)
        axes = self.manifest.axes
        window = file_order(axes, window)
        into: npt.NDArray[Any] | None = None
        if out is not None and not channels_last(axes):
            into = out.reshape([part.stop - part.start for part in window])
        stored = self._files.read(
            sample.file, lambda opened: self._read(opened, opened.samples, window, index, "", into)
        )
        if out is None:
            return as_volume(axes, stored)
        if stored is not into:
            out[...] = as_volume(axes, stored)
        return out

    def _read(
        self,
        opened: OpenedFile,
        dataset: StoredArray,
        window: tuple[slice, ...],
        index: int,
        name: str,
        out: npt.NDArray[Any] | None = None,
    ) -> npt.NDArray[Any]:
        """Reads a part of an array, in this machine's byte order; into `out`, if given.

        Errors name the array as `_where(index, name)` does.
        """
        try:
            stored = opened.file.read(dataset, window, out)
        except opened.file.errors as error:
            what, where = " ".join(str(error).split()), self._where(index, name)
            if out_of_memory(error):
                raise DoesNotFit(f"{where}: {what}") from error
            raise BadSample(f"{where}: damaged: {what}") from error
        extents = [each.stop - each.start for each in window] if window else dataset.shape
        if not isinstance(stored, np.ndarray) or stored.shape != tuple(extents):
            shape = getattr(stored, "shape", type(stored).__name__)
            where = self._where(index, name)
            raise DataError(f"{where}: {shape} was read where {tuple(extents)} was asked for")
        if stored.dtype.kind not in "biuf":
            where = self._where(index, name)
            raise DataError(f"{where} holds {stored.dtype}; numbers are needed")
        self._files.count(stored.nbytes)
        return stored.astype(stored.dtype.newbyteorder("="), copy=False)

    def _where(self, index: int, name: str = "") -> str:
        return (
            f"{self.root / self._sample(index).file.path}: {name or self.manifest.dataset!r}, "
            f"sample {index} of {self.split!r}"
        )

    def _refuse(
        self,
        index: int,
        sample: Sample,
        stored: npt.NDArray[Any],
        values: npt.NDArray[Any],
        lo: tuple[int, ...],
    ) -> None:
        """Raises `BadSample` for the first value that is not finite."""
        first = np.unravel_index(int(np.argmin(np.isfinite(values))), values.shape)
        channel, *voxel = (int(p) + a for p, a in zip(first, lo, strict=True))
        raise BadSample(
            f"{self._where(index)}: value {stored[first]} at channel {channel}, voxel "
            f"{tuple(voxel)}, normalized to {values[first]}"
        )


def _bounds(box: Box | None, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the checked corners of a box in a sample."""
    lo, hi = ((0,) * len(shape), shape) if box is None else (tuple(box.lo), tuple(box.hi))
    inside = len(lo) == len(shape) and all(
        0 <= a <= b <= n for a, b, n in zip(lo, hi, shape, strict=True)
    )
    if not inside:
        raise UsageError(f"block {lo} to {hi} is not in a sample of {shape}")
    return lo, hi


def _room(
    out: Tensor | None, lo: tuple[int, ...], hi: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    """Returns the destination of a block: `out`, checked, or a new tensor."""
    shape = tuple(b - a for a, b in zip(lo, hi, strict=True))
    if out is None:
        return torch.empty(shape, dtype=dtype)
    if tuple(out.shape) != shape or out.dtype != dtype or not out.is_contiguous():
        raise UsageError(
            f"out is {tuple(out.shape)} {out.dtype}: contiguous {shape} {dtype} is needed"
        )
    return out


def _window(offset: Sequence[int], lo: Sequence[int], hi: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(o + a, o + b) for o, a, b in zip(offset, lo, hi, strict=True))
