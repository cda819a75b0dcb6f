"""Reads data sets of samples in files; each rank reads only its block of a sample."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset

from pydist.data.axes import as_volume, channels_last
from pydist.data.file_table import Sample
from pydist.data.formats import Driver, StoredArray
from pydist.data.made import state_of
from pydist.data.manifest import Manifest
from pydist.data.normalize import Normalizer, staged_dtype
from pydist.data.open_files import OpenedFile, OpenFiles, in_one_line
from pydist.data.places import BlockPlace, place_of
from pydist.errors import DataError, DoesNotFit, UsageError, one_line, out_of_memory

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
        self._allow_roots, self._untrusted = tuple(allow_roots), untrusted
        self._files = OpenFiles(
            self.root, self.manifest, allow_roots, open_files, driver, untrusted
        )

    def reopened(self, split: str) -> ShardDataset:
        """Opens a split of the same data set as stored, with files that are trusted as these are.

        Args:
            split: see `ShardDataset`.
        """
        return ShardDataset(
            self.root, split, normalize="none", manifest=self.manifest,
            ignore_label=self.ignore_label, allow_roots=self._allow_roots,
            untrusted=self._untrusted,
        )  # fmt: skip

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        target = self.read_labels(index) if self.labeled else self.target(index)
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
    def labeled(self) -> bool:
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
    def files_state(self) -> str:
        """Text that differs after a file has changed; empty where the manifest has checksums.

        Raises:
            DataError: a file is missing.
        """
        if self.manifest.table.has_checksums:
            return ""
        found = hashlib.sha256()
        for file in self.manifest.files:
            path = self.root / file.path
            try:
                found.update(f"{state_of(path, self._allow_roots)} ".encode())
            except OSError as error:
                raise DataError(f"{path}: {error.strerror}") from error
        return found.hexdigest()

    @property
    def value_range(self) -> tuple[npt.NDArray[Any], npt.NDArray[Any]] | None:
        """Least and largest value of each channel after normalization; None if it clips none."""
        return self._normalizer.value_range

    def shape_of(self, index: int) -> tuple[int, int, int, int]:
        """Returns the shape (C, D, H, W) of one sample."""
        return self._shape(self._sample(index))

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
            BadSample: a value is NaN, infinite ("window" and "ct" clip it) or has no logarithm, or
                the bytes are damaged.
            DataError: the file is missing, cut short, or not what the manifest says.
        """
        sample = self._sample(index)
        place = self._place(sample, box)
        out = place.room(out, self.dtype)
        if out.numel() == 0:
            return out
        stored = self._read_samples(index, sample, place)
        values = out.numpy()
        if not self._normalizer(stored, place.lo[0], sample.mean, values):
            self._refuse(index, stored, values, place.lo)
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
        sample = self._sample(index)
        place = self._place(sample, box)
        values = place.room(out, self._stored_dtype).numpy()
        if values.size:
            self._read_samples(index, sample, place, values)

    def normalize(
        self, index: int, first_channel: int, stored: Tensor, out: Tensor, found: Tensor
    ) -> None:
        """Computes the network's input from stored values, on the device that holds them.

        Args:
            index: the sample.
            first_channel: the channel at index 0.
            stored: [C, D, H, W], of `stored_dtype`.
            out: the input, of this data set's dtype, on the same device.
            found: one int32 on that device; becomes 1 if an input is NaN or infinite.
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
        if not self.labeled:
            raise DataError(f"{self.root} has no labels: its manifest names none")
        extents = sample.file.extents or self.sample_shape[1:]
        place = place_of(self.manifest.axes, extents, sample.offset, box)
        out = place.room(out, torch.int64)
        if out.numel() == 0:
            return out

        def part(opened: OpenedFile) -> npt.NDArray[Any]:
            assert opened.label is not None
            return self._read(
                opened, opened.label, place.window, place.stored, index, self.manifest.label
            )

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
                self._refuse_label(index, values, int(np.argmax(wrong)), place.lo)
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
                values = self._read(opened, dataset, (), dataset.shape, index, name)
                opened.target = values.astype(np.float64)
            return opened.target

        values = self._files.read(sample.file, part)
        if not np.isfinite(values).all():
            raise BadSample(f"{self._where(index)}, {name!r} is {values.tolist()}")
        return torch.tensor(values, dtype=self.dtype)  # a copy: the file keeps its values

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

    def _shape(self, sample: Sample) -> tuple[int, int, int, int]:
        extents = sample.file.extents
        return self.sample_shape if extents is None else (self.sample_shape[0], *extents)

    def _place(self, sample: Sample, box: Box | None) -> BlockPlace:
        return place_of(self.manifest.axes, self._shape(sample), sample.offset, box)

    def _read_samples(
        self, index: int, sample: Sample, place: BlockPlace, out: npt.NDArray[Any] | None = None
    ) -> npt.NDArray[Any]:
        """Reads the stored values of a block as [C, D, H, W]; into `out`, if given."""
        axes = self.manifest.axes
        into: npt.NDArray[Any] | None = None
        if out is not None and not channels_last(axes):
            into = out if out.shape == place.stored else out.reshape(place.stored)
        stored = self._files.read(
            sample.file,
            lambda opened: self._read(
                opened, opened.samples, place.window, place.stored, index, "", into
            ),
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
        shape: tuple[int, ...],
        index: int,
        name: str,
        out: npt.NDArray[Any] | None = None,
    ) -> npt.NDArray[Any]:
        """Reads a part of an array, in this machine's byte order; into `out`, if given.

        Args:
            opened: the file.
            dataset: the array.
            window: the part; () for all.
            shape: its extents.
            index: the sample, for errors.
            name: of the array, for errors, as in `_where`.
            out: the destination.
        """
        try:
            stored = opened.file.read(dataset, window, out)
        except opened.file.errors as error:
            what, where = one_line(error), self._where(index, name)
            if out_of_memory(error):
                raise DoesNotFit(f"{where}: {what}") from error
            raise BadSample(f"{where}: damaged: {what}") from error
        if not isinstance(stored, np.ndarray) or stored.shape != shape:
            found = getattr(stored, "shape", type(stored).__name__)
            where = self._where(index, name)
            raise DataError(f"{where}: {found} was read where {shape} was asked for")
        if stored.dtype.kind not in "biuf":
            where = self._where(index, name)
            raise DataError(f"{where} holds {stored.dtype}; numbers are needed")
        self._files.count(stored.nbytes)
        return stored if stored.dtype.isnative else stored.astype(stored.dtype.newbyteorder("="))

    def _where(self, index: int, name: str = "") -> str:
        return (
            f"{self.root / self._sample(index).file.path}: {name or self.manifest.dataset!r}, "
            f"sample {index} of {self.split!r}"
        )

    def _refuse(
        self,
        index: int,
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
