"""Local gradient clipping: each sample group clips its own gradient, before it is accumulated.

With N groups, a group's share of the mean gradient is its own gradient over N. Where the noise of
the samples dominates, N shares of norm s add up to a gradient of norm √N s. So a share is clipped
to N^(-1/2) of the threshold of the mean gradient.

Source: Lin, Han, Mao, Wang and Dally (2018), arXiv:1712.01887, "local gradient clipping".
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from pydist.comm.interface.handles import Work
    from pydist.gradients.forms.messages import Messages


class LocalClipping:
    """The factor that clips the gradient of this rank's sample group, in each backward pass.

    The norm is that of all parameters, so the factor is known after all buckets of the pass have
    been averaged within the group: the first bucket that is waited for waits for all of them.
    """

    def __init__(self, within: Messages, groups: int, clip_norm: float) -> None:
        """Takes the threshold.

        Args:
            within: the sample group, whose ranks have different intervals of each bucket.
            groups: number of sample groups, N.
            clip_norm: the threshold of the norm of the mean over the groups.
        """
        self._within, self._groups = within, groups
        self._limit = clip_norm / math.sqrt(groups)
        self._parts: list[tuple[Tensor, Work]] = []  # of the running pass
        self._factor: Tensor | None = None

    def until_known(self, part: Tensor, work: Work, scale: float) -> Iterator[Work]:
        """Yields what a bucket waits for before the factor is known.

        Args:
            part: this rank's interval of the bucket.
            work: the message that brings it.
            scale: the factor of the loss in the running pass.
        """
        self._parts.append((part, work))
        yield work
        if self._factor is None:
            self._factor = self._measured(scale)

    def clip(self, row: Tensor) -> None:
        """Scales a part of the group's gradient, in place."""
        assert self._factor is not None
        row.mul_(self._factor.to(row.device))

    def clear(self) -> None:
        """Ends the running pass."""
        self._parts.clear()
        self._factor = None

    def _measured(self, scale: float) -> Tensor:
        """Returns the factor, a scalar in fp64, after all messages of the pass. Within the group.

        It is 1 if the gradient is not finite: NaN and infinity pass as they are.
        """
        norms = []
        for part, work in self._parts:
            work.wait()
            norms.append(torch.linalg.vector_norm(part, dtype=torch.float64))
        own = torch.stack([each.to(norms[0].device) for each in norms])
        norm: Tensor = torch.linalg.vector_norm(own).view(1)
        size = self._within.size
        if size > 1:
            every = norm.new_empty(size)
            self._within.all_gather(norm, every, [1] * size).wait()
            norm = torch.linalg.vector_norm(every)
        share = norm.view(()) / (scale * self._groups)
        factor = (self._limit / share).clamp(max=1.0)
        return torch.where(torch.isfinite(share), factor, torch.ones_like(factor))
