"""Segments volumes with a trained network, each volume spread over the ranks."""

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
from pydist.train.about import load_trained
from pydist.train.device import choose_device
from pydist.train.gather import from_first_rank, on_first_rank


@dataclass(frozen=True)
class Sliding:
    """Prediction window by window, by MONAI's `sliding_window_inference`.

    For volumes whose activations do not fit; a window sees nothing beyond its border, so results
    differ from those of the whole volume.

    Attributes:
        window: voxels along each side, a multiple of what the network halves (8).
        overlap: part that neighboring windows share; there they are averaged, with weights that
            fall towards a window's border.
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
    """A trained network that stays ready: the ranks predict one volume after another.

    Collective over a sample group: all its ranks make the predictor and call it alike. Sample
    groups may predict different volumes.

    Args:
        checkpoint: of a segmentation; see `pydist.train.about.load_trained`.
        mesh: its spatial axes say how volumes are cut.
        sliding: window by window instead of the whole volume; each window then is cut.
        device: "cpu", "cuda", or "auto": CUDA wherever that is possible, as in training.

    Raises:
        CheckpointError: there is none, it is damaged, or its network is not one for segmentation.
        UsageError: a window that the network can't halve, MONAI is missing, or "cuda" where it is
            not possible.
    """

    def __init__(
        self,
        checkpoint: str | Path,
        mesh: Mesh,
        sliding: Sliding | None = None,
        device: str = "auto",
    ) -> None:
        with together(mesh.world):
            self.device = choose_device(device, mesh, "device")
            """Where this rank computes."""
            about, weights = load_trained(checkpoint)
            task = about.task()
            if task.multiple is None:
                name = about.config.model.name
                raise CheckpointError(
                    f"{checkpoint} holds a {name}, which predicts no classes of voxels"
                )
            network = task.network(about.manifest)
            try:
                network.load_state_dict(weights)
            except RuntimeError as error:
                reason = shorten(str(error), 200)  # it may name every parameter
                raise CheckpointError(f"{checkpoint}: its weights do not fit: {reason}") from error
            self._multiple = task.multiple
            if sliding is not None:
                _check_sliding(sliding, self._multiple)
        self.mesh = mesh
        self.class_names = about.manifest.class_names
        """In the order of the labels."""
        self._manifest = about.manifest
        self._sliding = sliding
        data = about.config.data
        self._normalizer = Normalizer(data.normalize, about.manifest, "float32", data.window)
        network.eval()
        self.model = parallelize(network.to(self.device), mesh)

    @property
    def grid(self) -> GridOptions:
        """The grid that volumes are brought to: that of the training data."""
        record = self._manifest.origin.get("grid")
        grid = GridOptions() if record is None else grid_options(record)
        return replace(grid, multiple=math.lcm(grid.multiple, self._multiple))

    def predict_file(self, images: Sequence[str | Path], output: str | Path) -> None:
        """Segments a volume in NIfTI files, and writes the labels on its own grid.

        The first rank of the group reads and writes.

        Args:
            images: a file a channel, or one with all.
            output: ends in .nii or .nii.gz; affine, codes, spacing and extents are those of the
                first image.

        Raises:
            DataError: a file is damaged, or has other channels than the network.
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
                (Hounsfield units, not normalized), extents multiples of what the network halves
                (8): an array of NumPy, torch, CuPy or the like; None on the others.

        Returns:
            On the first rank the class of each voxel, [D, H, W] int64; None on the others.

        Raises:
            DataError: another number of channels, or values that do not fit or are not finite.
            UsageError: it is no array.
        """
        return self._predict(image, "the image")

    def _predict(self, image: ArrayLike | None, name: str) -> npt.NDArray[np.generic] | None:
        """See `predict`; `name` says in errors whose image it is."""
        with torch.no_grad():
            if self._sliding is None:
                scores = self.model(self._input(image, name, self.device))
            else:
                x = self._input(image, name, torch.device("cpu"))
                scores = self._by_windows(x, self._sliding)
        labels = scores.argmax(1).cpu()
        if not isinstance(labels, ShardedTensor):
            return labels[0].numpy() if self.mesh.sample.rank == 0 else None
        whole = on_first_rank(labels)
        return None if whole is None else whole[0].numpy()

    def _input(self, image: ArrayLike | None, name: str, device: torch.device) -> ShardedTensor:
        """The normalized volume on a device; each rank has its block of it."""
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
        stored_block = from_first_rank(whole, layout, dtype)[0]
        block = torch.empty(stored_block.shape)
        self._normalizer(stored_block.numpy(), 0, mean, block.numpy())
        return ShardedTensor.from_local(block[None].to(device), layout)

    def _checked(self, image: npt.NDArray[np.generic], name: str) -> npt.NDArray[np.generic]:
        """The image as the training data were stored."""
        channels = self._manifest.sample_shape[0]
        if image.ndim != 4 or image.shape[0] != channels:
            raise DataError(
                f"{name}: the shape {image.shape}; the network takes [{channels}, D, H, W]"
            )
        if any(extent % self._multiple for extent in image.shape[1:]):
            raise DataError(
                f"{name}: {image.shape[1:]} voxels; the network takes multiples of {self._multiple}"
            )
        return as_stored(image, self._manifest.dtype, name, ", as which training data were stored")

    def _by_windows(self, x: ShardedTensor, sliding: Sliding) -> Tensor:
        """Scores of the whole volume, on every rank: in host memory, where there is most room."""
        from monai.inferers.utils import sliding_window_inference

        def scores_of(window: Tensor) -> Tensor:
            found = self.model(window)
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
        assert isinstance(found, Tensor)  # a network with several outputs would give a tuple
        return found


def _values_of(image: ArrayLike, name: str) -> npt.NDArray[np.generic]:
    """The real numbers of an image in host memory."""
    tensor = as_tensor(image)
    if tensor.layout != torch.strided or tensor.is_meta or tensor.is_complex():
        kind = "meta" if tensor.is_meta else f"{tensor.layout} {tensor.dtype}"
        raise DataError(f"{name}: a tensor of kind {kind}; real numbers in dense memory are needed")
    tensor = tensor.float() if tensor.dtype == torch.bfloat16 else tensor  # NumPy has none
    return tensor.numpy(force=True)


def _check_sliding(sliding: Sliding, multiple: int) -> None:
    if sliding.window % multiple:
        raise UsageError(f"a window of {sliding.window} voxels; multiples of {multiple} can be had")
    try:
        import monai.inferers  # noqa: F401  only whether it is there, before anything is read
    except ImportError:
        raise UsageError("sliding windows need MONAI: pip install 'pydist[medical]'") from None
