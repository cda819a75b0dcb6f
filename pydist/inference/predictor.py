"""Segments volumes with a trained network, each volume partitioned over the ranks."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pydist.comm.consensus import together
from pydist.data.medical.case import grid_options, read_image, write_labels
from pydist.data.medical.grid import GridOptions
from pydist.data.publish import refuse_overwriting
from pydist.errors import CheckpointError, DataError, UsageError
from pydist.inference.loaded import load_network, values_of
from pydist.interop import ArrayLike
from pydist.layout import layout_for_sample
from pydist.mesh import Mesh
from pydist.parallel import parallelize
from pydist.tensor import ShardedTensor
from pydist.train.device import choose_device
from pydist.train.gather import gather_to_first_rank, scatter_from_first_rank
from pydist.train.tasks.factory import first_of


@dataclass(frozen=True)
class Sliding:
    """Options that define a prediction by sliding windows (MONAI's `sliding_window_inference`).

    For volumes whose activations do not fit into memory. A window has no context beyond its border,
    so results differ from those of the full volume.

    Attributes:
        window: voxels along each side, a multiple of the network's downsampling factor (8).
        overlap: fraction shared by neighboring windows, which are averaged there with weights that
            decrease toward a window's border.
    """

    window: int
    overlap: float = 0.25

    def __post_init__(self) -> None:
        if not isinstance(self.window, int) or not isinstance(self.overlap, (int, float)):
            raise UsageError(
                f"window={self.window!r}, overlap={self.overlap!r}: a whole number of voxels, and "
                "a part in [0, 1)"
            )
        if not 1 <= self.window < 1 << 31 or not 0 <= self.overlap < 1:
            raise UsageError(
                f"window={self.window}, overlap={self.overlap}: at least 1 voxel and below 2**31, "
                "and a part in [0, 1)"
            )


class Predictor:
    """Trained network that predicts one volume after another.

    Collective over a sample group: all its ranks create the predictor and make the same calls.
    Sample groups may predict different volumes.

    Args:
        checkpoint: checkpoint of a segmentation; see `pydist.train.metadata.load_trained`.
        mesh: the ranks; its spatial axes determine the partition of volumes.
        sliding: sliding windows, each of them partitioned; None predicts the full volume.
        device: "cpu", "cuda", or "auto" for CUDA where possible, as in training.
        factory: of a network that is not pydist's own, such as "nets.py:make"; it runs only if
            it is named, as a checkpoint may be a stranger's.
        task: the same for a task that is not pydist's own.

    Raises:
        CheckpointError: there is no checkpoint, it is damaged, or its network does not segment.
        UsageError: a window that the network can't halve, MONAI is missing, "cuda" where it is
            impossible, or another factory.
    """

    def __init__(
        self,
        checkpoint: str | Path,
        mesh: Mesh,
        sliding: Sliding | None = None,
        device: str = "auto",
        factory: str = "",
        task: str = "",
    ) -> None:
        with together(mesh.world):
            self.device = choose_device(device, mesh.world, "device")
            """The device of this rank."""
            self._loaded = load_network(checkpoint, factory, task)
            multiple = self._loaded.task.multiple
            if multiple is None:
                raise CheckpointError(
                    f"{checkpoint} holds a {self._loaded.name}, which predicts no classes of voxels"
                )
            self._multiple = multiple
            if sliding is not None:
                check_sliding(sliding, self._multiple)
        self.mesh = mesh
        self.class_names = self._loaded.manifest.class_names
        """Names of the classes, in the order of the labels."""
        self._sliding = sliding
        self.model = parallelize(self._loaded.network.to(self.device), mesh)

    @property
    def grid(self) -> GridOptions:
        """The training data's grid, to which volumes are resampled."""
        record = self._loaded.manifest.origin.get("grid")
        grid = GridOptions() if record is None else grid_options(record)
        return replace(grid, multiple=math.lcm(grid.multiple, self._multiple))

    def predict_file(self, images: Sequence[str | Path], output: str | Path) -> None:
        """Segments a volume in NIfTI files, and writes the labels on its own grid.

        The first rank of the group reads and writes.

        Args:
            images: one file per channel, or one with all channels.
            output: file ending in .nii or .nii.gz; affine, codes, spacing and extents are those of
                the first image.

        Raises:
            DataError: a file is damaged, or its channels differ from the network's.
            UsageError: nibabel is missing, `output` has another suffix or is one of the images.
            DiskError: `output` can't be written.
        """
        if not images:
            raise UsageError("no image was given: a file a channel, or one with all")
        refuse_overwriting(images, output)
        group = self.mesh.sample
        image, header = None, b""
        with together(group):
            if group.rank == 0:
                image, first = read_image(tuple(Path(i) for i in images), self.grid)
                header = first.block
        labels = self._predict(image, str(images[0]))
        with together(group):
            if labels is not None:
                kind = "uint8" if len(self.class_names) <= 256 else "uint16"
                write_labels(output, labels.astype(kind), header, self.grid, kind)

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
        return self._predict(image, "the image")

    def _predict(self, image: ArrayLike | None, name: str) -> npt.NDArray[np.generic] | None:
        """Implements `predict`; `name` identifies the image in errors."""
        with torch.no_grad():
            if self._sliding is None:
                scores = first_of(self.model(self._input(image, name, self.device)))
            else:
                x = self._input(image, name, torch.device("cpu"))
                scores = self._by_windows(x, self._sliding)
        labels = scores.argmax(1).cpu()
        if not isinstance(labels, ShardedTensor):
            return labels[0].numpy() if self.mesh.sample.rank == 0 else None
        whole = gather_to_first_rank(labels)
        return None if whole is None else whole[0].numpy()

    def _input(self, image: ArrayLike | None, name: str, device: torch.device) -> ShardedTensor:
        """Returns the normalized volume on a device, partitioned over the ranks."""
        group = self.mesh.sample
        facts = b""
        whole = None
        with together(group):
            if group.rank == 0:
                stored = self._checked(values_of(image, name), name)
                mean = float(stored.mean(dtype=np.float64))
                if not math.isfinite(mean):
                    raise DataError(f"{name}: a value is NaN or infinite")
                facts = json.dumps([stored.shape, mean]).encode()
                whole = torch.from_numpy(np.ascontiguousarray(stored))[None]
        shape, mean = json.loads(group.broadcast_bytes(facts))
        layout = layout_for_sample(self.mesh, (1, *shape))
        dtype = getattr(torch, self._loaded.manifest.dtype)
        stored_block = scatter_from_first_rank(whole, layout, dtype)[0]
        block = torch.empty(stored_block.shape)
        self._loaded.normalizer(stored_block.numpy(), 0, mean, block.numpy())
        return ShardedTensor.from_local(block[None].to(device), layout)

    def _checked(self, image: npt.NDArray[np.generic], name: str) -> npt.NDArray[np.generic]:
        """Checks an image's shape and converts it to the dtype of the stored training data."""
        stored = self._loaded.stored(image, name)
        if any(extent % self._multiple for extent in image.shape[1:]):
            raise DataError(
                f"{name}: {image.shape[1:]} voxels; the network needs multiples of {self._multiple}"
            )
        return stored

    def _by_windows(self, x: ShardedTensor, sliding: Sliding) -> Tensor:
        """Computes scores of the full volume on every rank, in host memory, which is larger."""
        from monai.inferers.utils import sliding_window_inference

        def scores_of(window: Tensor) -> Tensor:
            found = first_of(self.model(window))
            return found.full_tensor() if isinstance(found, ShardedTensor) else found

        found = sliding_window_inference(
            x.full_tensor(),
            (sliding.window,) * 3,
            sw_batch_size=1,
            predictor=scores_of,
            overlap=sliding.overlap,
            mode="gaussian",
            sw_device=self.device,
            device="cpu",
        )
        assert isinstance(found, Tensor)  # only networks with several outputs give a tuple
        return found


def check_sliding(sliding: Sliding, multiple: int) -> None:
    """Checks that windows suit a network, and that MONAI is installed.

    Raises:
        UsageError: they do not, or it is not.
    """
    if sliding.window % multiple:
        raise UsageError(f"a window of {sliding.window} voxels is not a multiple of {multiple}")
    try:
        import monai.inferers  # noqa: F401  checks that it is installed, before anything is read
    except ImportError:
        raise UsageError("sliding windows need MONAI: pip install 'pydist[medical]'") from None
