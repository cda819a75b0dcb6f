"""Segments volumes with a trained network, each volume partitioned over the ranks."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import shorten

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pydist.comm.consensus import together
from pydist.data.medical.case import grid_options, read_image, write_labels
from pydist.data.medical.collection import as_stored
from pydist.data.medical.grid import GridOptions
from pydist.data.normalize import Normalizer
from pydist.data.publish import refuse_overwriting
from pydist.errors import CheckpointError, DataError, UsageError
from pydist.interop import ArrayLike, as_tensor
from pydist.layout import layout_for_sample
from pydist.mesh import Mesh
from pydist.parallel import parallelize
from pydist.tensor import ShardedTensor
from pydist.train.device import choose_device
from pydist.train.gather import gather_to_first_rank, scatter_from_first_rank
from pydist.train.metadata import load_trained
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
            metadata, weights = load_trained(checkpoint)
            trained_for = metadata.task(factory, task)
            if trained_for.multiple is None:
                name = metadata.config.model.name
                raise CheckpointError(
                    f"{checkpoint} holds a {name}, which predicts no classes of voxels"
                )
            network = trained_for.network(metadata.manifest)
            try:
                network.load_state_dict(weights)
            except RuntimeError as error:
                reason = shorten(str(error), 200)  # the error may name every parameter
                raise CheckpointError(f"{checkpoint}: its weights do not fit: {reason}") from error
            self._multiple = trained_for.multiple
            if sliding is not None:
                _check_sliding(sliding, self._multiple)
        self.mesh = mesh
        self.class_names = metadata.manifest.class_names
        """Names of the classes, in the order of the labels."""
        self._manifest = metadata.manifest
        self._sliding = sliding
        data = metadata.config.data
        self._normalizer = Normalizer(data.normalize, metadata.manifest, "float32", data.window)
        network.eval()
        self.model = parallelize(network.to(self.device), mesh)

    @property
    def grid(self) -> GridOptions:
        """The training data's grid, to which volumes are resampled."""
        record = self._manifest.origin.get("grid")
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
                stored = self._checked(_values_of(image, name), name)
                mean = float(stored.mean(dtype=np.float64))
                if not math.isfinite(mean):
                    raise DataError(f"{name}: a value is NaN or infinite")
                facts = json.dumps([stored.shape, mean]).encode()
                whole = torch.from_numpy(np.ascontiguousarray(stored))[None]
        shape, mean = json.loads(group.broadcast_bytes(facts))
        layout = layout_for_sample(self.mesh, (1, *shape))
        dtype = getattr(torch, self._manifest.dtype)
        stored_block = scatter_from_first_rank(whole, layout, dtype)[0]
        block = torch.empty(stored_block.shape)
        self._normalizer(stored_block.numpy(), 0, mean, block.numpy())
        return ShardedTensor.from_local(block[None].to(device), layout)

    def _checked(self, image: npt.NDArray[np.generic], name: str) -> npt.NDArray[np.generic]:
        """Checks an image's shape and converts it to the dtype of the stored training data."""
        channels = self._manifest.sample_shape[0]
        if image.ndim != 4 or image.shape[0] != channels:
            raise DataError(
                f"{name}: the shape {image.shape}; the network accepts [{channels}, D, H, W]"
            )
        if any(extent % self._multiple for extent in image.shape[1:]):
            raise DataError(
                f"{name}: {image.shape[1:]} voxels; the network needs multiples of {self._multiple}"
            )
        return as_stored(image, self._manifest.dtype, name, ", as which training data were stored")

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


def _values_of(image: ArrayLike, name: str) -> npt.NDArray[np.generic]:
    """Returns an image as an array of real numbers in host memory."""
    tensor = as_tensor(image)
    if tensor.layout != torch.strided or tensor.is_meta or tensor.is_complex():
        kind = "meta" if tensor.is_meta else f"{tensor.layout} {tensor.dtype}"
        raise DataError(f"{name}: a tensor of kind {kind}; real numbers in dense memory are needed")
    tensor = tensor.float() if tensor.dtype == torch.bfloat16 else tensor  # NumPy has none
    return tensor.numpy(force=True)


def _check_sliding(sliding: Sliding, multiple: int) -> None:
    if sliding.window % multiple:
        raise UsageError(f"a window of {sliding.window} voxels is not a multiple of {multiple}")
    try:
        import monai.inferers  # noqa: F401  checks that it is installed, before anything is read
    except ImportError:
        raise UsageError("sliding windows need MONAI: pip install 'pydist[medical]'") from None
