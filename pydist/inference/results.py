"""Labels and probabilities from scores, on the grid of the image that they belong to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from pydist.data.medical.grid import resized_part, source_of
from pydist.inference.distributed import BoxedVolume
from pydist.partition import Box


class Results:
    """Labels and probabilities that scores of a volume give, in boxes over the ranks.

    Scores are interpolated trilinearly before they are compared, class by class. Methods are
    collective over the ranks of the scores.

    Args:
        scores: [classes, D, H, W] on the network's grid, which may be padded at the far ends.
        inner: extents of the volume on the network's grid, without padding.
        extents: of the results.
    """

    def __init__(self, scores: BoxedVolume, inner: Sequence[int], extents: Sequence[int]) -> None:
        self._scores, self._inner, self._extents = scores, tuple(inner), tuple(extents)
        self._classes = len(scores.local)
        self._boxes = [self._scaled(box) for box in scores.boxes]
        self._needed = [source_of(box, inner, extents) for box in self._boxes]

    def labels(self) -> BoxedVolume:
        """Returns the class with the highest score in each voxel, [1, D, H, W] uint8 or int32."""
        best = self._of_class(0).clone()
        kind = torch.uint8 if self._classes <= 256 else torch.int32
        labels = torch.zeros(best.shape, dtype=kind)
        for k in range(1, self._classes):
            scores = self._of_class(k)
            labels[scores > best] = k
            torch.maximum(best, scores, out=best)
        return BoxedVolume(self._scores.group, self._boxes, labels[None])

    def probabilities(self) -> Iterator[BoxedVolume]:
        """Yields the probabilities (softmax of the scores) of one class after another."""
        most = self._of_class(0).clone()
        total = torch.ones_like(most)
        for k in range(1, self._classes):
            scores = self._of_class(k)
            higher = torch.maximum(most, scores)
            total.mul_(most.sub_(higher).exp_()).add_((scores - higher).exp_())
            most = higher
        for k in range(self._classes):
            found = (self._of_class(k) - most).exp_().div_(total)
            yield BoxedVolume(self._scores.group, self._boxes, found[None])

    def _of_class(self, k: int) -> Tensor:
        """Returns the scores of a class in this rank's box of the results."""
        rank = self._scores.group.rank
        box = self._boxes[rank]
        if self._inner == self._extents:
            inner = box.shift([-a for a in self._scores.box.lo])
            place = inner.slices
            return self._scores.local[k][place]
        part = self._scores.read_channel(k, self._needed)
        assert part is not None
        source = self._needed[rank]
        found = resized_part(part[0].numpy(), source, self._inner, self._extents, box)
        return torch.from_numpy(found)

    def _scaled(self, box: Box) -> Box:
        """Returns the part of the results for a box of scores; these parts are disjoint."""
        lo, hi = (
            [
                min(n, (2 * min(a, inner) * n + inner) // (2 * inner))
                for a, inner, n in zip(place, self._inner, self._extents, strict=True)
            ]
            for place in (box.lo, box.hi)
        )
        return Box(lo, hi)
