"""Draws networks with a loss and a split by a Hypothesis strategy, and compares their runs."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn

from support.equivalence import Points, Task, randint, randn, whole_step
from support.equivalence.one_device import Reference
from support.equivalence.strategies import GRIDS, points
from support.networks.small import initialized
from support.random_networks.blocks import make
from support.random_networks.chains import grow
from support.random_networks.spot import Source, Spot, call

BATCH = 2
WORST_NOISE = 1e-8
"""A network can't be judged if noise in the last bit moves its output further than this."""

Loss = Callable[[Tensor, Tensor], Tensor]


def dice(y: Tensor, t: Tensor) -> Tensor:
    """Computes 1 - 2 |A ∩ B| / (|A| + |B|) of the classes' probabilities."""
    p, t = y.softmax(1), t.softmax(1)
    over = tuple(range(2, y.dim()))
    if not over:
        over = (1,)
    return (1 - (2 * (p * t).sum(over) + 0.1) / (p.sum(over) + t.sum(over) + 0.1)).mean()


def focal(y: Tensor, t: Tensor) -> Tensor:
    """Computes cross-entropy with a lower weight of easy voxels."""
    ce = F.cross_entropy(y, t, reduction="none")
    return ((1 - torch.exp(-ce)) ** 2 * ce).mean()


def onehot_dice(y: Tensor, t: Tensor) -> Tensor:
    """Computes the Dice loss of labels, without the background."""
    return dice(y, F.one_hot(t, y.shape[1]).movedim(-1, 1).to(y.dtype) * 3)


LIKE: dict[str, Loss] = {
    "MSE": F.mse_loss,
    "L1": F.l1_loss,
    "smooth L1": F.smooth_l1_loss,
    "Huber, sum": lambda y, t: F.huber_loss(y, t, reduction="sum", delta=0.5),
    "BCE": lambda y, t: F.binary_cross_entropy(y.sigmoid(), t.sigmoid()),
    "BCE of logits": lambda y, t: F.binary_cross_entropy_with_logits(y, (t > 0).to(y.dtype)),
    "KL": lambda y, t: F.kl_div(y.log_softmax(1), t.softmax(1), reduction="batchmean"),
    "Poisson": lambda y, t: F.poisson_nll_loss(y.clamp(max=3), t.exp()),
    "soft margin": lambda y, t: F.soft_margin_loss(y, t.sign()),
    "cosine": lambda y, t: 1 - F.cosine_similarity(y, t, 1, 1e-2).mean(),
    "Dice": dice,
    "by hand": lambda y, t: ((y - t) ** 2 * (t > 0)).sum() / (t > 0).sum().clamp(min=1),
}
"""Losses whose target has the output's shape."""

CLASSES: dict[str, Loss] = {
    "CE": F.cross_entropy,
    "CE, weighted": lambda y, t: F.cross_entropy(
        y, t, torch.arange(1, y.shape[1] + 1).to(y), ignore_index=1
    ),
    "CE, smoothed": lambda y, t: F.cross_entropy(y, t, label_smoothing=0.1),
    "NLL": lambda y, t: F.nll_loss(y.log_softmax(1), t, reduction="sum"),
    "focal": focal,
    "Dice of labels": onehot_dice,
    "Dice and CE": lambda y, t: onehot_dice(y, t) + F.cross_entropy(y, t),
}
"""Losses whose target is a class at each place."""


@dataclass
class Case:
    """Network that the strategy drew, with its loss and the split points of its input."""

    model: nn.Module
    shape: tuple[int, ...]
    points: list[Points]
    loss: str
    keep_thin_blocks: bool
    channel: Sequence[int] = (1,)
    """Shares that the ranks along the channel axis have."""

    def is_sound(self) -> bool:
        """Returns whether one device can train it: finite, without changes of saved tensors."""
        try:
            found = whole_step(self.task())
        except (RuntimeError, ValueError, IndexError):
            return False
        return all(bool(t.isfinite().all()) for t in found.values())

    def task(self) -> Task:
        x = randn(*self.shape, seed=1)
        with torch.no_grad():
            y = copy.deepcopy(self.model)(x)
        if self.loss in LIKE:
            return Task(self.model, x, randn(*y.shape, seed=2), LIKE[self.loss])
        target = randint(y.shape[1], y.shape[0], *y.shape[2:], seed=2)
        return Task(self.model, x, target, CLASSES[self.loss])


@st.composite
def cases(draw: st.DrawFn, splits_channels: bool = False) -> Case:
    """Draws networks of up to eight blocks in one to three dims, over two to eight ranks.

    Args:
        draw: of hypothesis.
        splits_channels: whether two to four ranks split the channels, evenly or by shares, and up
            to two the space.
    """
    dims = draw(st.sampled_from((1, 2, 3, 3)))
    most = {1: 24, 2: 12, 3: 8}[dims]
    extents = tuple(draw(st.integers(2, most)) for _ in range(dims))
    shape = (BATCH, draw(st.integers(1, 3)), *extents)
    numbers = draw(st.randoms(use_true_random=False))
    body, after = grow(numbers, shape, draw(st.integers(1, 7)), 2)
    head = draw_head(Spot(numbers, after, 0))
    losses = [*LIKE, *(CLASSES if draw(st.booleans()) else ())]
    model = initialized(make(call("nn.Sequential", *body, *head)))
    grids = [g for g in GRIDS[dims] if max(g) < 8] * 3 + GRIDS[dims]
    channel = [1]
    if splits_channels:
        grids = [(1,) * dims, *(g for g in GRIDS[dims] if math.prod(g) == 2)]
        channel = [1] * draw(st.integers(2, 4))
        if draw(st.booleans()):
            channel = [draw(st.integers(1, 4)) for _ in channel]
    grid = draw(st.sampled_from(grids))
    cut: list[Points] = [draw(points(n, parts)) for n, parts in zip(extents, grid, strict=True)]
    return Case(model, shape, cut, draw(st.sampled_from(losses)), draw(st.booleans()), channel)


def draw_head(s: Spot) -> list[Source]:
    """Draws dense classes, numbers per sample, or numbers along one dim."""
    classes, c = s.number(2, 3), s.channels
    over = tuple(range(2, s.dims + 2))
    kind = s.number(0, 6)
    if kind <= 2:
        return [s.layer("Conv", c, classes, 1)]
    if kind == 3:
        return [s.layer("AdaptiveAvgPool", 1), call("nn.Flatten"), call("nn.Linear", c, classes)]
    if kind == 4:
        size = tuple(s.number(1, 2) for _ in over)
        pool = s.layer(s.pick("AdaptiveAvgPool", "AdaptiveMaxPool"), size)
        features = c * torch.Size(size).numel()
        return [pool, call("nn.Flatten"), call("nn.Linear", features, classes)]
    if kind == 5:
        values = torch.Size(s.shape[1:]).numel()
        flat = s.pick(call("nn.Flatten"), call("Expression", "x.view(x.shape[0], -1)"))
        layers = [call("nn.Linear", values, 4), call("nn.ReLU"), call("nn.Linear", 4, classes)]
        return [flat, *layers]
    how = s.pick("mean", "sum", "amax", "logsumexp", "norm")
    return [call("Expression", f"x.{how}(dim={s.pick(over, over, (over[-1],))})")]


def compare(case: Case) -> bool:
    """Compares output, loss, all gradients and buffers with the one-device run.

    Returns:
        Whether it is conclusive: False if they differ and noise alone moves the network's output.

    Raises:
        NotSupported: the network has a call without an exact form.
        AssertionError: something differs.
    """
    reference = Reference(case.task())
    try:
        reference.check_split(
            case.points, keep_thin_blocks=case.keep_thin_blocks, channel=case.channel
        )
    except AssertionError:
        # For example, a norm of equal values: torch's own result is arbitrary.
        if max(reference.bounds[name] for name in ("y", "loss")) <= WORST_NOISE:
            raise
        return False
    return True
