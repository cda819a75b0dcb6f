"""Segments volumes with trained networks, each volume partitioned over the ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pydist.comm import Transport
from pydist.comm.consensus import together
from pydist.data import Manifest
from pydist.data.medical.case import grid_options
from pydist.data.medical.nifti_header import without_private
from pydist.data.medical.nifti_writing import written_nifti
from pydist.data.medical.options import GridOptions
from pydist.data.publish import refuse_overwriting
from pydist.errors import CheckpointError, DataError, UsageError
from pydist.inference.distributed import BoxedVolume
from pydist.inference.loaded import Loaded, load_network
from pydist.inference.results import Results
from pydist.inference.scoring import Scorer, WindowProgress, spatial_boxes
from pydist.inference.source import ArrayImage, ImageFacts, ImageSource, NiftiImage, distribute
from pydist.inference.windows import Sliding, Windows, regions
from pydist.interop import ArrayLike
from pydist.layout import layout_for_sample
from pydist.mesh import Mesh
from pydist.parallel import parallelize
from pydist.partition import Box
from pydist.train.device import choose_device


class Predictor:
    """Trained network, or several whose scores are averaged, that predicts volume after volume.

    The full volume is partitioned over a sample group, and sample groups may predict different
    volumes. Sliding windows of one volume are dealt out to all sample groups, each window
    partitioned over a group: then no rank holds the volume or its scores. Collective over the
    `group` in both cases: all its ranks create the predictor and make the same calls.

    Args:
        checkpoint: checkpoint of a segmentation; see `pydist.train.metadata.load_trained`. Or
            several of the same classes, such as the folds of a cross-validation.
        mesh: the ranks; its spatial axes determine the partition of volumes or windows.
        sliding: sliding windows; None predicts the full volume.
        device: "cpu", "cuda", or "auto" for CUDA where possible, as in training.
        factory: of a network that is not pydist's own, such as "nets.py:make"; it runs only if
            it is named, as a checkpoint may be a stranger's.
        task: the same for a task that is not pydist's own.

    Raises:
        CheckpointError: there is no checkpoint, it is damaged, its network does not segment, or
            checkpoints differ in classes, channels or grid.
        UsageError: a window that the network can't halve, "cuda" where it is impossible, or
            another factory.

    Attributes:
        group: the ranks that predict one volume together; the first one has the image.
    """

    def __init__(
        self,
        checkpoint: str | Path | Sequence[str | Path],
        mesh: Mesh,
        sliding: Sliding | None = None,
        device: str = "auto",
        factory: str = "",
        task: str = "",
    ) -> None:
        checkpoints: Sequence[str | Path]
        checkpoints = [checkpoint] if isinstance(checkpoint, str | Path) else checkpoint
        found: list[Loaded] = []
        with together(mesh.world):
            self.device = choose_device(device, mesh.world, "device")
            """The device of this rank."""
            if not checkpoints:
                raise UsageError("no checkpoint was given: one, or several to average")
            self._multiple = 1
            for each in checkpoints:
                loaded, multiple = _load(each, factory, task)
                found.append(loaded)
                self._multiple = math.lcm(self._multiple, multiple)
                _require_same([own.manifest for own in found], checkpoints)
            if sliding is not None:
                sliding.check(self._multiple)
        self.mesh = mesh
        self.group: Transport = mesh.sample if sliding is None else mesh.world
        self._manifest, self._sliding = found[0].manifest, sliding
        self.class_names = self._manifest.class_names
        """Names of the classes, in the order of the labels."""
        # A batch norm without running statistics forms those of the group's volume or window.
        models = [
            parallelize(own.network.to(self.device), mesh, batch_norm="group") for own in found
        ]
        normalizers = [own.normalizer for own in found]
        self._scorer = Scorer(mesh, models, normalizers, len(self.class_names), self.device)

    @property
    def grid(self) -> GridOptions:
        """The training data's grid, to which volumes are resampled."""
        found = _grid_of(self._manifest)
        return replace(found, multiple=math.lcm(found.multiple, self._multiple))

    def predict_file(
        self,
        images: str | Path | Sequence[str | Path],
        output: str | Path,
        probabilities: str | Path | None = None,
        progress: WindowProgress | None = None,
    ) -> None:
        """Segments a volume in NIfTI files, and writes the labels on its own grid.

        The image is resampled to the grid of the training data, and the scores back. The first
        rank of the group reads and writes, part by part.

        Args:
            images: one file per channel, or one with all channels; or the folder of a DICOM series.
            output: file ending in .nii or .nii.gz; affine, codes, spacing and extents are those of
                the first image.
            probabilities: file for the probabilities, [x, y, z, class] float32; none by default.
            progress: called on each rank with the numbers of finished and of all windows.

        Raises:
            DataError: a file is damaged, or its channels differ from the network's.
            UsageError: nibabel is missing, `output` has another suffix or is one of the images.
            DiskError: `output` can't be written.
        """
        images = [images] if isinstance(images, str | Path) else images
        if not images:
            raise UsageError("no image was given: a file a channel, or one with all")
        for each in (output, probabilities):
            if each is not None:
                refuse_overwriting(images, each)
        source: NiftiImage | None = None
        with together(self.group):
            if self.group.rank == 0:
                source = NiftiImage([Path(i) for i in images], self.grid)
        facts, results = self._results(source, self.grid.multiple, progress)
        kind = "uint8" if len(self.class_names) <= 256 else "uint16"
        self._write(source, facts, output, [results.labels()], kind)
        if probabilities is not None:
            self._write(source, facts, probabilities, results.probabilities(), "float32")

    def predict(self, image: ArrayLike | None) -> npt.NDArray[np.generic] | None:
        """Segments a volume.

        Args:
            image: on the first rank of the group [C, D, H, W], in the units of the training data
                (Hounsfield units, not normalized), extents multiples of the network's downsampling
                factor (8): an array of NumPy, torch, CuPy or the like; None on the others.

        Returns:
            On the first rank the class of each voxel, [D, H, W] int64; None on the others.

        Raises:
            DataError: a wrong number of channels, or values that do not fit or are not finite.
            UsageError: the image is not an array.
        """
        facts, results = self._results(self._array(image))
        found = self._whole(facts, results.labels())
        return None if found is None else found[0].astype(np.int64)

    def probabilities(self, image: ArrayLike | None) -> npt.NDArray[np.float32] | None:
        """Computes the probability of each class in each voxel of a volume.

        Args:
            image: as in `predict`, with the same errors.

        Returns:
            On the first rank [classes, D, H, W] float32; None on the others.
        """
        facts, results = self._results(self._array(image))
        found = [self._whole(facts, each) for each in results.probabilities()]
        parts = [part for part in found if part is not None]
        return np.concatenate(parts) if parts else None

    def _array(self, image: ArrayLike | None) -> ArrayImage | None:
        """Returns the image in memory, on the first rank."""
        with together(self.group):
            if self.group.rank != 0:
                return None
            found = ArrayImage(image, "the image")
            shape = (found.channels, *found.extents)
            channels = self._manifest.sample_shape[0]
            if len(shape) != len(self._manifest.sample_shape) or shape[0] != channels:
                raise DataError(
                    f"the image: the shape {shape}; the network accepts [{channels}, D, H, W]"
                )
            if not all(found.extents):
                raise DataError(f"the image: the shape {shape} has no voxels")
            if any(extent % self._multiple for extent in found.extents):
                raise DataError(
                    f"the image: {found.extents} voxels; the network needs multiples of "
                    f"{self._multiple}"
                )
            return found

    def _results(
        self,
        source: ImageSource | None,
        multiple: int = 1,
        progress: WindowProgress | None = None,
    ) -> tuple[ImageFacts, Results]:
        """Predicts an image, padded to multiples of a number, and closes it."""
        with ExitStack() as stack:
            if source is not None:
                stack.callback(source.close)
            facts = ImageFacts(source, self.group)
            given, channels = facts.channels, self._manifest.sample_shape[0]
            with together(self.group):
                if given != channels:
                    raise DataError(
                        f"{facts.name}: {given} channels; the network accepts [{channels}, D, H, W]"
                    )
            extents = padded = [-(-n // multiple) * multiple for n in facts.inner]
            if self._sliding is None:
                windows, boxes = Windows.whole(extents), self._blocks(extents)
            else:
                extents = [max(n, self._sliding.window) for n in extents]
                window = [self._sliding.window] * len(extents)
                windows = Windows(extents, window, self._sliding.overlap)
                boxes = regions(extents, self.group.size)
            dtype = self._manifest.dtype
            image, mean = distribute(source, facts, self.group, boxes, padded, dtype)
        scores = self._scorer.scores(image, mean, windows, progress)
        with together(self.group, "predicting"):
            if scores.local.isnan().any():
                raise DataError(
                    "the network's scores are NaN: the volume has extreme values, or training "
                    "diverged"
                )
        return facts, Results(scores, facts.inner, facts.extents)

    def _blocks(self, extents: Sequence[int]) -> list[Box]:
        """Returns the box of each rank of a sample group; of equal copies, others are empty."""
        boxes = spatial_boxes(layout_for_sample(self.mesh, (1, 1, *extents)))
        nothing = Box([0] * len(extents), [0] * len(extents))
        return [nothing if box in boxes[:i] else box for i, box in enumerate(boxes)]

    def _whole(self, facts: ImageFacts, volume: BoxedVolume) -> npt.NDArray[Any] | None:
        """Returns all of a volume on the first rank."""
        everything = Box([0] * len(facts.extents), facts.extents)
        part = volume.read([everything, *[None] * (self.group.size - 1)])
        return None if part is None else part.numpy()

    def _write(
        self,
        source: NiftiImage | None,
        facts: ImageFacts,
        path: str | Path,
        volumes: Iterable[BoxedVolume],
        kind: str,
    ) -> None:
        """Writes volumes to one file, slab by slab."""
        with ExitStack() as stack:
            write = None
            with together(self.group):
                if source is not None:
                    more = (len(self.class_names),) if kind == "float32" else ()
                    shape, header = (*source.grid.file_shape, *more), without_private(source.block)
                    write = stack.enter_context(written_nifti(path, shape, header, kind))
            for volume in volumes:
                for slab in facts.slabs(facts.extents):
                    part = volume.read([slab, *[None] * (self.group.size - 1)])
                    with together(self.group, "writing a prediction"):
                        if source is not None and write is not None and part is not None:
                            write(source.grid.in_file_order(part[0].numpy()))
            with together(self.group, "writing a prediction"):
                stack.close()


def _load(checkpoint: str | Path, factory: str, task: str) -> tuple[Loaded, int]:
    """Returns what a checkpoint has, and the multiple that its network needs."""
    loaded = load_network(checkpoint, factory, task)
    if loaded.manifest.dims != 3:
        raise CheckpointError(
            f"{checkpoint} was trained on samples of {loaded.manifest.dims} dims, not on volumes: "
            "give them as .npy files, or a data set"
        )
    if loaded.task.multiple is None:
        raise CheckpointError(
            f"{checkpoint} holds a {loaded.name}, which predicts no classes of voxels: give "
            "samples as .npy files, or a data set"
        )
    return loaded, loaded.task.multiple


def _require_same(manifests: Sequence[Manifest], checkpoints: Sequence[str | Path]) -> None:
    """Raises `CheckpointError` if the last of several networks can't be averaged with the first."""
    first, last = manifests[0], manifests[-1]
    for what, one, other in (
        ("classes", first.class_names, last.class_names),
        ("channels", first.sample_shape[0], last.sample_shape[0]),
        ("values", first.dtype, last.dtype),
        ("grid", _grid_of(first), _grid_of(last)),
    ):
        if one != other:
            where = checkpoints[len(manifests) - 1]
            raise CheckpointError(
                f"{where} was trained with {what} {other}, {checkpoints[0]} with {one}: their "
                "scores can't be averaged"
            )


def _grid_of(manifest: Manifest) -> GridOptions:
    record = manifest.origin.get("grid")
    return GridOptions() if record is None else grid_options(record)
