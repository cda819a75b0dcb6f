"""Reads data sets of universes and other volumes in HDF5, Zarr or NumPy files, by blocks.

`generate_universes` and `generate_ct` make synthetic data, `convert_nifti` converts medical
volumes with labels, `index_dataset` makes a data set of existing files, `convert_dataset` copies
one into another format, `deep_facts` and `verify_dataset` read all of it, `ShardDataset` reads
blocks of samples, `MeshSampler` assigns samples to the groups of ranks, and `Loader` returns
batches as sharded tensors, read while the previous step computes.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydist.data.augment.options import AugmentOptions
    from pydist.data.augment.source import Augmented
    from pydist.data.batch_sizes import BatchSizes, PassRule
    from pydist.data.convert import convert_dataset
    from pydist.data.dataset import BadSample, ShardDataset
    from pydist.data.index import index_dataset, index_folder, verify_dataset
    from pydist.data.info import Facts, deep_facts
    from pydist.data.loader import Batch, Loader
    from pydist.data.manifest import Manifest
    from pydist.data.medical.convert import convert_nifti
    from pydist.data.medical.generate import generate_ct
    from pydist.data.medical.options import CTOptions, GridOptions, NiftiOptions
    from pydist.data.mpi_io import MpiIo
    from pydist.data.options import ConvertOptions, IndexOptions
    from pydist.data.sampler import MeshSampler
    from pydist.data.trust import FileTrust
    from pydist.data.universes.generate import generate_universes
    from pydist.data.universes.options import UniverseOptions

# Imported on first use: making universes needs no torch.
_HOMES = {
    "AugmentOptions": "augment.options",
    "Augmented": "augment.source",
    "BadSample": "dataset",
    "Batch": "loader",
    "BatchSizes": "batch_sizes",
    "CTOptions": "medical.options",
    "ConvertOptions": "options",
    "Facts": "info",
    "GridOptions": "medical.options",
    "IndexOptions": "options",
    "Loader": "loader",
    "Manifest": "manifest",
    "MeshSampler": "sampler",
    "MpiIo": "mpi_io",
    "NiftiOptions": "medical.options",
    "PassRule": "batch_sizes",
    "ShardDataset": "dataset",
    "FileTrust": "trust",
    "UniverseOptions": "universes.options",
    "convert_dataset": "convert",
    "convert_nifti": "medical.convert",
    "deep_facts": "info",
    "generate_ct": "medical.generate",
    "generate_universes": "universes.generate",
    "index_dataset": "index",
    "index_folder": "index",
    "verify_dataset": "index",
}

__all__ = [
    "AugmentOptions",
    "Augmented",
    "BadSample",
    "Batch",
    "BatchSizes",
    "CTOptions",
    "ConvertOptions",
    "Facts",
    "FileTrust",
    "GridOptions",
    "IndexOptions",
    "Loader",
    "Manifest",
    "MeshSampler",
    "MpiIo",
    "NiftiOptions",
    "PassRule",
    "ShardDataset",
    "UniverseOptions",
    "convert_dataset",
    "convert_nifti",
    "deep_facts",
    "generate_ct",
    "generate_universes",
    "index_dataset",
    "index_folder",
    "verify_dataset",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"pydist.data.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'pydist.data' has no attribute {name!r}")
