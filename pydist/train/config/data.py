"""Defines the table "data" of a configuration: where samples come from."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError

from pydist.data.augment.options import AugmentOptions, with_preset
from pydist.data.store.options import StoreOptions, check_readers
from pydist.errors import UsageError
from pydist.train.config.settings import Count, Flag, Number, Size, Table


def _completed(table: Any) -> Any:
    """Replaces the name of a preset of augmentation by its settings."""
    try:
        return with_preset(table)
    except UsageError as error:
        raise PydanticCustomError("preset", "{why}", {"why": str(error)}) from None


@dataclass(frozen=True)
class DataConfig(Table):
    """Table that configures the data set."""

    path: Path = Path("data")
    """Folder of the data set, as `pydist data universes`, `nifti` and `ct` write it."""
    normalize: Literal["none", "log1p", "mean", "standardize", "window", "ct"] = "none"
    """Normalization of particle counts n: none (the paper), log(1 + n) (MLPerf), n over its mean,
    or log(1 + n) minus its mean, over its standard deviation; or of intensities: "window" maps
    `window` to [0, 1], "ct" is nnU-Net's scheme for CT."""
    window: tuple[Number, Number] | None = None
    """Lowest and highest intensity, in Hounsfield units for CT."""
    prefetch: Count = 2
    """Batches that are read ahead in the background."""
    readers: Count = 1
    """Threads that read, each a batch, without `store`: several are faster for NumPy and Zarr files
    on shared file systems (HDF5 has one lock). As many batches are read ahead, at least."""
    on_bad_sample: Literal["stop", "skip"] = "stop"
    """Whether a sample with NaN, infinite values or damaged bytes ends the run: "skip" trains on
    the next good sample instead, and validates without it, while at most 1 % are bad."""
    untrusted: bool = False
    """Whether another process with limited memory reads the files: a file that crashes a library is
    then an error that names it. Each block is copied once more."""
    allow_roots: tuple[Path, ...] = ()
    """Folders outside of `path` to which symbolic links among the files may lead. By default such a
    link is refused."""
    mpi_io: bool = False
    """Whether HDF5 files are read by MPI-IO, for which h5py must be built with the site's MPI."""
    store: Literal["off", "memory"] = "off"
    """Whether the ranks' memory keeps the samples: "memory" holds each block once, on the rank that
    reads it first. From the second epoch on ranks receive blocks from one another, and no file is
    read."""
    store_memory: Size | None = None
    """Memory of each rank for `store`, such as "4GB", training and validation set together; the
    rest is read from files in each epoch. By default there is no limit."""
    store_disk: Size | None = None
    """Bytes of samples that each rank writes to disk beyond its memory, before compression."""
    store_folder: Path | None = None
    """Folder for samples on disk, on a disk of each machine."""
    store_codec: Literal["raw", "zstd", "lz4", "blosc"] = "raw"
    """Compression of the samples on disk, of each block that gets smaller by it."""
    store_reuse: Flag = False
    """Whether samples stay on disk, those in memory as well, so that the next run reads no file."""
    store_preload: Flag = False
    """Whether all samples are read before the first step."""
    augment: Annotated[AugmentOptions, BeforeValidator(_completed)] = field(
        default_factory=AugmentOptions
    )
    """Random changes of the training samples, differently in each epoch; "nnunet", or a table with
    preset = "nnunet" and changes of it (`--data.augment.preset nnunet`), is nnU-Net's default."""

    @property
    def store_options(self) -> StoreOptions:
        """Settings that the store gets."""
        return StoreOptions(**{name: getattr(self, name) for name in vars(StoreOptions())})

    def check(self) -> None:
        """Checks that the settings suit each other, whatever this machine can do.

        Raises:
            UsageError: they do not.
        """
        if self.mpi_io and self.untrusted:
            raise UsageError("data.mpi_io reads in this process, data.untrusted in another one")
        self.store_options.check("data.")
        check_readers(self.readers, self.store, "data.")
        self.augment.check("data.augment.")
