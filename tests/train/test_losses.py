"""Losses and scores of segmentation by their definitions, whole and split."""

from __future__ import annotations

import math

import pytest
import torch
from equivalence import Cut, check_function, on_ranks, randint, randn, shard
from hypothesis import given
from hypothesis import strategies as st

from pydist import layout_for_sample
from pydist.train.losses import confusion, dice_loss, dice_scores, segmentation_loss

SHAPE = (2, 4, 5, 4, 6)
LABELS = randint(4, 2, 5, 4, 6)


def test_soft_dice_is_its_definition():
    scores = randn(*SHAPE)
    probabilities = scores.softmax(1)
    terms = []
    for sample in range(2):
        for c in range(1, 4):
            truth = (LABELS[sample] == c).double()
            p = probabilities[sample, c]
            terms.append((2 * (p * truth).sum() + 1e-5) / (p.sum() + truth.sum() + 1e-5))
    assert float(dice_loss(scores, LABELS)) == pytest.approx(1 - float(sum(terms)) / 6, rel=1e-12)


def test_a_perfect_and_a_wrong_answer():
    right = torch.nn.functional.one_hot(LABELS, 4).movedim(-1, 1).double() * 100
    assert float(dice_loss(right, LABELS)) == pytest.approx(0, abs=1e-6)
    assert float(dice_loss(right.roll(1, 1), LABELS)) == pytest.approx(1, abs=1e-6)
    assert float(segmentation_loss("dice_ce", right, LABELS)) == pytest.approx(0, abs=1e-6)


POINTS = st.sampled_from(
    [([0, 2, 5], None, None), ([0, 0, 1, 5], None, None), (None, [0, 1, 4], [0, 3, 3, 6]),
     ([0, 3, 5], [0, 2, 4], [0, 5, 6])],
)  # fmt: skip


@given(POINTS)
def test_losses_on_shards_are_those_of_the_whole(points):
    for kind in ("cross_entropy", "dice", "dice_ce"):
        check_function(
            lambda scores, labels, kind=kind: segmentation_loss(kind, scores, labels),
            randn(*SHAPE),
            points=points,
            beside=[Cut(LABELS, points)],
        )


@pytest.mark.parametrize("spatial", [(1, 1, 1), (2, 1, 1), (1, 2, 2), (6, 1, 1)])
def test_confusion_counts_every_voxel_once(spatial):
    scores = randn(*SHAPE)
    predicted = scores.argmax(1)
    expected = torch.zeros(2, 4, 4, dtype=torch.int64)
    for sample in range(2):
        for t, p in zip(LABELS[sample].flatten(), predicted[sample].flatten(), strict=True):
            expected[sample, t, p] += 1
    assert torch.equal(confusion(scores, LABELS), expected)

    def rank(mesh):
        layout = layout_for_sample(mesh, LABELS.shape, {1: "depth", 2: "height", 3: "width"})
        split = shard(scores, layout_for_sample(mesh, SHAPE))
        assert torch.equal(confusion(split, shard(LABELS, layout)), expected)
        # The network may give its result in another layout than the labels have.
        assert torch.equal(confusion(split.redistribute(split.layout.whole()), LABELS), expected)

    on_ranks(spatial, rank)


def test_dice_of_counts():
    counts = torch.tensor([[50, 0, 0, 0], [1, 6, 3, 0], [0, 2, 0, 0], [0, 0, 0, 0]])
    liver, tumour, absent = dice_scores(counts).tolist()
    assert liver == pytest.approx(2 * 6 / (10 + 8))
    assert tumour == 0
    assert math.isnan(absent)
