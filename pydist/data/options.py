"""Defines the options of data sets that are made of existing files."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Voxels = tuple[int, int, int]
Compression = Literal["none", "gzip", "zstd", "blosc"]


@dataclass(frozen=True)
class IndexOptions:
    """Options that say how a data set is made of existing files.

    Attributes:
        width: voxels along a side of a sample; each file is cut into as many as fit. By default a
            sample is a full file.
        dataset: name of the 4-D dataset, channel first or last.
        target: name of the 1-D dataset to predict.
        validation: fraction of the files for the split "val", the last by name. Files in folders
            called train, val, validation or test (in any case) always belong to that split.
        statistics: read all data once, for normalize="mean" and "standardize".
        checksums: read all files once, for `verify_dataset`.
        class_names: names of the classes, in the order of their numbers, if the target is one
            value, the number of the sample's class.
        format: "hdf5", "zarr", "numpy", "tfrecord" or that of a package; "auto" is the first of
            which there are files.
    """

    width: int | None = None
    dataset: str = "full"
    target: str = "unitPar"
    validation: float = 0.1
    statistics: bool = True
    checksums: bool = True
    class_names: tuple[str, ...] = ()
    format: str = "auto"


@dataclass(frozen=True)
class ConvertOptions:
    """Options that say how a data set is copied into another format.

    Attributes:
        format: of the new files: "zarr", "hdf5", "numpy", or that of a package.
        layout: "keep" copies file by file, "channel-first" writes one file per sample.
        chunks: voxels of a chunk along depth, height and width; by default 32, contiguous in HDF5.
        shards: voxels of a shard, a file with several chunks of Zarr, multiples of the chunks'; by
            default each chunk is a file.
        compression: "none", "gzip", or in Zarr "zstd" or "blosc" (bitshuffle and zstd).
        overwrite: replace a data set made from another one or with other options.
    """

    format: str = "zarr"
    layout: Literal["keep", "channel-first"] = "keep"
    chunks: Voxels | None = None
    shards: Voxels | None = None
    compression: Compression = "none"
    overwrite: bool = False

    def recipe(self) -> dict[str, Any]:
        """Returns the options that determine the content of the files."""
        return {name: value for name, value in asdict(self).items() if name != "overwrite"}
