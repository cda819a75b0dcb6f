"""What a store keeps of a data set on one rank: the type of the values, the form of each entry."""

from __future__ import annotations

from typing import Any

import torch

from pydist._loader import native
from pydist.data.blocks import BlockSource, by_voxel, stored_source
from pydist.data.store.entry import EntryFormat
from pydist.data.store.source import BatchSource, StoredBatchSource
from pydist.layout import layout_for_sample
from pydist.mesh import Mesh


class BlockForm:
    """Form that the entries of a rank's blocks have.

    The stored values are kept where they are smaller than the normalized ones, so int16 counts stay
    counts; a device, which may round differently, always gets stored values. Labels have the
    smallest type that holds the classes.

    Args:
        dataset: the samples.
        mesh: determines the blocks.
        on_device: whether the loader normalizes stored values on a device.

    Attributes:
        source_type: makes a batch of such entries.
        raw: whether entries hold stored values; else inputs.
        dtype: of the values.
        label_dtype: of the labels, if there are some.
    """

    def __init__(self, dataset: BlockSource, mesh: Mesh, on_device: bool) -> None:
        self.source_type: type[BatchSource] = BatchSource
        self.raw, self.dtype = False, dataset.dtype
        if (source := stored_source(dataset)) is not None:
            if on_device:
                self.source_type = StoredBatchSource
            if on_device or source.stored_dtype.itemsize < dataset.dtype.itemsize:
                self.raw, self.dtype = True, source.stored_dtype
        self.label_dtype: torch.dtype = getattr(dataset, "label_dtype", torch.int64)
        self._dataset, self._mesh = dataset, mesh
        self._formats: dict[tuple[int, ...], EntryFormat] = {}

    def __str__(self) -> str:
        return f"{self.dtype}, labels {self.label_dtype}"

    def of(self, sample: int) -> EntryFormat:
        """Returns the format of a sample's entry."""
        shape = self._dataset.shape_of(sample)
        if shape not in self._formats:
            self._formats[shape] = self._format(shape)
        return self._formats[shape]

    def facts(self) -> dict[str, Any]:
        """Returns what determines the bytes of this rank's entries, as JSON values.

        Raises:
            DataError: a file without a checksum is missing.
        """
        dataset, mesh = self._dataset, self._mesh
        # Manifests without checksums are equal for any data of equal names and sizes.
        files: str = getattr(dataset, "files_state", "")
        shapes = sorted({dataset.shape_of(sample) for sample in range(len(dataset))})
        boxes = [layout_for_sample(mesh, (1, *shape)).box for shape in shapes]
        return {
            "pydist": native.__version__,
            "data set": dataset.identity,
            **({"files": files} if files else {}),
            "samples": len(dataset),
            "keeps": str(self),
            "stored values": self.raw,
            "blocks": [[list(shape), list(box.lo), list(box.hi)]
                       for shape, box in zip(shapes, boxes, strict=True)],
        }  # fmt: skip

    def _format(self, shape: tuple[int, int, int, int]) -> EntryFormat:
        dataset = self._dataset
        layout = layout_for_sample(self._mesh, (1, *shape))
        block = layout.local_shape[1:]
        if not dataset.labeled:
            return EntryFormat(block, self.dtype, (dataset.num_targets,), dataset.dtype)
        labels = by_voxel(layout).local_shape[1:]
        return EntryFormat(block, self.dtype, labels, self.label_dtype)
