"""Computes the scores of a volume by windows, which are dealt out to sample groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from textwrap import shorten

import torch
from torch import Tensor, nn

from pydist.data.normalize import Normalizer
from pydist.errors import CheckpointError
from pydist.exchange.redistribution import redistributed
from pydist.inference.distributed import BoxedVolume
from pydist.inference.windows import Windows
from pydist.layout import Layout, layout_for_sample
from pydist.mesh import Mesh
from pydist.partition import Box
from pydist.tensor import ShardedTensor
from pydist.train.tasks.factory import outputs_of

WindowProgress = Callable[[int, int], object]
"""Called with the number of windows that are done, and of all."""


@dataclass(frozen=True)
class Scorer:
    """Networks that compute the scores of classes, as the mean over the networks.

    Attributes:
        mesh: the ranks, on which each network is parallelized.
        models: the networks.
        normalizers: of the inputs of each.
        classes: number of classes.
        device: of the networks.
    """

    mesh: Mesh
    models: Sequence[nn.Module]
    normalizers: Sequence[Normalizer]
    classes: int
    device: torch.device

    def scores(
        self,
        image: BoxedVolume,
        mean: float,
        windows: Windows,
        progress: WindowProgress | None = None,
    ) -> BoxedVolume:
        """Computes the scores of an image. Collective over the image's ranks.

        In each round every sample group reads a window of the image, computes its scores, and adds
        them, weighted, to the boxes that hold its voxels. Contributions are added in the order of
        the windows: the result has the same bits for any number of groups.

        Args:
            image: as stored, [C, ...].
            mean: of the image.
            windows: that cover the volume.
            progress: called after each round.

        Returns:
            The scores, [classes, ...], in the boxes of the image.

        Raises:
            CheckpointError: a network has other outputs than scores of each voxel.
        """
        mesh, group = self.mesh, image.group
        channels = len(image.local)
        inputs = layout_for_sample(mesh, (1, channels, *windows.window))
        outputs = layout_for_sample(mesh, (1, self.classes, *windows.window))
        taken, boxes = spatial_boxes(inputs), spatial_boxes(outputs)
        # Of equal copies, as along the channel axis, one is added.
        given = [None if box in boxes[:i] else box for i, box in enumerate(boxes)]
        own, index = divmod(group.rank, mesh.sample_size)
        dtype = _torch_dtype(self.normalizers[0])
        found = BoxedVolume.empty(group, image.boxes, self.classes, dtype)
        groups = group.size // mesh.sample_size
        for first in range(0, len(windows), groups):
            starts = [windows.start(n) for n in range(first, min(first + groups, len(windows)))]
            block = image.read(_dealt(taken, starts, group.size))
            values = None
            if block is not None:
                values = self._of_window(block, mean, inputs, outputs)
                values = windows.weighted(values, first + own, boxes[index])
            del block
            found.add(_dealt(given, starts, group.size), None if given[index] is None else values)
            if progress is not None:
                progress(min(first + groups, len(windows)), len(windows))
        return found

    @torch.no_grad()
    def _of_window(self, block: Tensor, mean: float, inputs: Layout, outputs: Layout) -> Tensor:
        """Returns the scores of this rank's part of a window, [classes, ...] in host memory."""
        total: Tensor | None = None
        for number, model, normalizer in zip(count(1), self.models, self.normalizers, strict=False):
            values = torch.empty(block.shape, dtype=_torch_dtype(normalizer))
            normalizer(block.numpy(), 0, mean, values.numpy())
            x = ShardedTensor.from_local(values[None].to(self.device), inputs)
            scores = self._local(model(x), outputs, number)[0].to("cpu", values.dtype)
            total = scores if total is None else total + scores
        assert total is not None
        return total if len(self.models) == 1 else total / len(self.models)

    def _local(self, output: object, layout: Layout, number: int) -> Tensor:
        """Returns this rank's part of a network's scores."""
        scores = outputs_of(output)[:1]
        if not scores or tuple(scores[0].shape) != layout.shape:
            given = tuple(scores[0].shape) if scores else shorten(repr(output), 100)
            raise CheckpointError(
                f"network {number} of {len(self.models)} computes {given} from a window; expected "
                f"the scores of {self.classes} classes in each voxel, {layout.shape}"
            )
        found = scores[0]
        if not isinstance(found, ShardedTensor):
            return found
        return redistributed(found.to_local(), found.layout, layout)


def _dealt(
    parts: Sequence[Box | None], starts: Sequence[Sequence[int]], ranks: int
) -> list[Box | None]:
    """Returns each rank's part of the window of its sample group; None where it has none.

    Args:
        parts: of a window, for the ranks of a sample group.
        starts: the first voxel of the window of each group that has one.
        ranks: number of ranks of all groups.
    """
    found: list[Box | None] = []
    for rank in range(ranks):
        group, index = divmod(rank, len(parts))
        part = parts[index] if group < len(starts) else None
        found.append(None if part is None else part.shift(starts[group]))
    return found


def spatial_boxes(layout: Layout) -> list[Box]:
    """Returns the boxes of a sample group's ranks, without dims for samples and channels."""
    return [Box(box.lo[2:], box.hi[2:]) for box in layout.boxes]


def _torch_dtype(normalizer: Normalizer) -> torch.dtype:
    return torch.float64 if normalizer.dtype == "float64" else torch.float32
