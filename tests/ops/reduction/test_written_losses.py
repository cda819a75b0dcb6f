"""Losses that are written out equal torch's, with gradients of all operands."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from pydist import distribute_tensor
from support.equivalence import check_function, on_ranks, randint, randn
from support.equivalence.splits import TWO_SPLITS as POINTS

SHAPE = (4, 3, 5, 4, 3)
TARGET = randn(*SHAPE, seed=1)
SIGNS, NEGATIVE = TARGET.sign(), randn(*SHAPE, seed=2)
PAIRS = torch.tensor([1, -1, -1, 1])
CLASSES = torch.tensor([0, 2, 1, 1])


def pooled(x):
    return x.mean((2, 3, 4))


def distance(a, b):
    return (a - b).abs().mean(-1)


LOSSES = {
    "gaussian nll": lambda x, w, **r: F.gaussian_nll_loss(x * w, TARGET, x.exp(), **r),
    "gaussian nll, small variances": lambda x, w, **r: F.gaussian_nll_loss(
        x, TARGET, w.square(), full=True, eps=0.5, **r
    ),
    "gaussian nll, one variance": lambda x, w, **r: F.gaussian_nll_loss(x * w, TARGET, 0.5, **r),
    "gaussian nll, a variance a row": lambda x, w, **r: F.gaussian_nll_loss(
        x * w, TARGET, (x * x).mean(-1), **r
    ),
    "gaussian nll, a variance a voxel": lambda x, w, **r: F.gaussian_nll_loss(
        x * w, TARGET, (x * x).mean(1, keepdim=True), **r
    ),
    "margin ranking": lambda x, w, **r: F.margin_ranking_loss(x, w, SIGNS, 0.3, **r),
    "multilabel soft margin": lambda x, w, **r: F.multilabel_soft_margin_loss(
        x * w, SIGNS.clamp(0), torch.tensor([1.0, 2, 3]).double(), **r
    ),
    "multi margin": lambda x, w, **r: F.multi_margin_loss(pooled(x * w), CLASSES, **r),
    "multi margin, squared and weighted": lambda x, w, **r: F.multi_margin_loss(
        pooled(x * w), CLASSES, 2, 0.7, torch.tensor([1.0, 2, 3]).double(), **r
    ),
    "multi margin at ties": lambda x, w, **r: F.multi_margin_loss(
        pooled(x) * 0, CLASSES, margin=0, **r
    ),
    "multi margin of one": lambda x, w, **r: F.multi_margin_loss(pooled(x * w)[1], CLASSES[1], **r),
    "cosine embedding": lambda x, w, **r: F.cosine_embedding_loss(
        x.flatten(1), w.flatten(1), PAIRS, -0.5, **r
    ),
    "cosine embedding of one": lambda x, w, **r: F.cosine_embedding_loss(
        pooled(x)[0], pooled(w)[0], torch.tensor(1), **r
    ),
    "triplets": lambda x, w, **r: F.triplet_margin_loss(x, w, NEGATIVE, **r),
    "triplets, swapped": lambda x, w, **r: F.triplet_margin_loss(
        pooled(x), pooled(w), pooled(NEGATIVE), 0.6, 1.5, swap=True, **r
    ),
    "triplets of a distance": lambda x, w, **r: F.triplet_margin_with_distance_loss(
        x, NEGATIVE, w, distance_function=distance, swap=True, **r
    ),
    "triplets of torch's distance": lambda x, w, **r: F.triplet_margin_with_distance_loss(
        x, w, NEGATIVE, **r
    ),
}


@pytest.mark.parametrize(
    ("reduction", "split"),
    [("mean", "2x1x1"), ("mean", "2x2x2, half of them empty"), ("sum", "2x1x1"),
     ("none", "2x2x2, half of them empty")],
)  # fmt: skip
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_written_out_losses(loss, reduction, split):
    check_function(
        lambda x: loss(x, x.roll(1, 0).sin(), reduction=reduction), randn(*SHAPE), (), POINTS[split]
    )


@pytest.mark.filterwarnings("ignore:size_average")
def test_modules_and_old_arguments():
    x, labels = randn(*SHAPE), randint(2, *SHAPE).double()
    modules = [
        torch.nn.GaussianNLLLoss(), torch.nn.TripletMarginLoss(), torch.nn.MarginRankingLoss(),
    ]  # fmt: skip
    expected = [float(each(x, TARGET, labels)) for each in modules]
    old = float(F.margin_ranking_loss(x, TARGET, labels, size_average=False))

    def body(mesh):
        parts = [distribute_tensor(each, mesh) for each in (x, TARGET, labels)]
        assert [float(each(*parts)) for each in modules] == pytest.approx(expected, rel=1e-12)
        found = F.margin_ranking_loss(*parts, size_average=False)
        assert float(found) == pytest.approx(old, rel=1e-12)

    on_ranks((2, 1, 1), body)


REFUSED = {
    "negative variances": lambda x: F.gaussian_nll_loss(x, x, x),
    "variances of another size": lambda x: F.gaussian_nll_loss(x, x, (x * x)[:, :2]),
    "reduction": lambda x: F.gaussian_nll_loss(x, x, x * x, reduction="most"),
    "dims": lambda x: F.margin_ranking_loss(x, x, x[0]),
    "pairs": lambda x: F.cosine_embedding_loss(x, x, PAIRS),
    "margin": lambda x: F.triplet_margin_loss(x, x, x, margin=0),
    "classes": lambda x: F.multi_margin_loss(pooled(x), CLASSES + 2),
    "power": lambda x: F.multi_margin_loss(pooled(x), CLASSES, p=3),
}


@pytest.mark.parametrize("call", REFUSED.values(), ids=REFUSED)
def test_what_torch_refuses(call):
    x = randn(*SHAPE)
    with pytest.raises((ValueError, RuntimeError)):
        call(x)

    def body(mesh):
        with pytest.raises((ValueError, RuntimeError)):
            call(distribute_tensor(x, mesh))

    on_ranks((2, 1, 1), body)
