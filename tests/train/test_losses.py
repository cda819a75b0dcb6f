"""Tests of segmentation losses and scores against their definitions, unsplit and split."""

from __future__ import annotations

import copy
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from pydist import distribute_tensor, layout_for_sample, parallelize
from pydist.data import ShardDataset
from pydist.data.loader import Batch
from pydist.data.medical.generate import generate_ct
from pydist.data.medical.options import CTOptions
from pydist.errors import UsageError
from pydist.train.config import FactoryConfig, TrainConfig
from pydist.train.losses import SegmentationLoss, confusion, dice_loss, dice_scores
from pydist.train.tasks.factory import AnySegmentation
from support.equivalence import Cut, assert_same, check_function, on_ranks, randint, randn, shard

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
    assert float(dice_loss(scores, LABELS).mean()) == pytest.approx(
        1 - float(sum(terms)) / 6, rel=1e-12
    )


def test_a_perfect_and_a_wrong_answer():
    right = torch.nn.functional.one_hot(LABELS, 4).movedim(-1, 1).double() * 100
    assert float(dice_loss(right, LABELS).mean()) == pytest.approx(0, abs=1e-6)
    assert float(dice_loss(right.roll(1, 1), LABELS).mean()) == pytest.approx(1, abs=1e-6)
    assert float(SegmentationLoss("dice_ce")(right, LABELS)) == pytest.approx(0, abs=1e-6)


POINTS = st.sampled_from(
    [([0, 2, 5], None, None), ([0, 0, 1, 5], None, None), (None, [0, 1, 4], [0, 3, 3, 6]),
     ([0, 3, 5], [0, 2, 4], [0, 5, 6])],
)  # fmt: skip


@given(POINTS)
def test_losses_on_shards_are_those_of_the_whole(points):
    for kind in ("cross_entropy", "dice", "dice_ce"):
        check_function(
            SegmentationLoss(kind),
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
        # The network's output may have another layout than the labels.
        assert torch.equal(confusion(split.redistribute(split.layout.whole()), LABELS), expected)

    on_ranks(spatial, rank)


def test_dice_of_counts():
    counts = torch.tensor([[50, 0, 0, 0], [1, 6, 3, 0], [0, 2, 0, 0], [0, 0, 0, 0]])
    liver, tumor, absent = dice_scores(counts).tolist()
    assert liver == pytest.approx(2 * 6 / (10 + 8))
    assert tumor == 0
    assert math.isnan(absent)


WEIGHTS = (0.5, 2.0, 0.0, 1.25)


def labels_with(ignored: int) -> torch.Tensor:
    """Returns labels that ignore the first of 3 samples, much of the second, none of the last."""
    labels = randint(4, 3, 6, 5, 4, seed=4)
    labels[labels == ignored] = 1
    labels[0] = ignored
    labels[1, :4] = ignored
    return labels


@pytest.mark.parametrize(
    ("kind", "weights", "ignored"),
    [("cross_entropy", WEIGHTS, None), ("cross_entropy", None, 2), ("dice_ce", WEIGHTS, 255)],
)
def test_weighted_means_are_those_of_the_global_batch(kind, weights, ignored):
    """Loss and gradients on groups of any size equal torch's on the global batch."""
    torch.manual_seed(0)
    made = nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), nn.Tanh(), nn.Conv3d(4, 4, 3, padding=1))
    made = made.double()
    x = randn(3, 1, 6, 5, 4)
    labels = labels_with(-1 if ignored is None else ignored).clamp(min=0)
    whole = copy.deepcopy(made)
    scores = whole(x)
    expected = F.cross_entropy(
        scores,
        labels,
        None if weights is None else torch.tensor(weights, dtype=torch.float64),
        ignore_index=-100 if ignored is None else ignored,
    )
    if kind == "dice_ce":
        dice = 0
        for sample, truth in zip(scores.softmax(1), labels, strict=True):
            counted = truth != ignored
            for c in (1, 2, 3):
                p, t = sample[c][counted], (truth == c)[counted].double()
                dice = dice + (2 * (p * t).sum() + 1e-5) / (p.sum() + t.sum() + 1e-5)
        expected = expected + 1 - dice / 9
    expected.backward()

    def rank(mesh, sizes):
        model = parallelize(copy.deepcopy(made), mesh)
        ends = [0, *itertools.accumulate(sizes)]
        # A group without samples trains on the first one with weight 0.
        size = sizes[mesh.data_index]
        rows = slice(ends[mesh.data_index], ends[mesh.data_index + 1]) if size else slice(0, 1)
        own = distribute_tensor(labels[rows], mesh, {1: "depth", 2: "height", 3: "width"})
        loss = SegmentationLoss(kind, weights, ignored)(model(x[rows]), own, mesh, counts=size > 0)
        scale = (size > 0) * max(1.0, len(sizes) / sum(sizes))  # like `Batch.loss_scale`
        (loss * scale).backward()
        value = loss.detach() * size
        mesh.data.all_reduce(value)
        assert float(value) / sum(sizes) == pytest.approx(float(expected.detach()), rel=1e-12)
        for p, q in zip(model.parameters(), whole.parameters(), strict=True):
            assert_same(p.grad, q.grad)

    for sizes, spatial in (((3,), (2, 1, 2)), ((1, 2), (2, 1, 1)), ((1, 1, 1, 0), (1, 1, 1))):
        on_ranks(spatial, lambda mesh, sizes=sizes: rank(mesh, sizes), len(sizes))


def test_nothing_that_counts_makes_a_loss_of_zero():
    scores = randn(*SHAPE).requires_grad_()
    loss = SegmentationLoss("dice_ce", WEIGHTS, 255)(scores, torch.full_like(LABELS, 255))
    loss.backward()
    assert float(loss.detach()) == 0
    assert scores.grad is not None
    assert not scores.grad.any()


def test_ignored_voxels_are_in_no_score():
    scores = randn(*SHAPE)
    labels = LABELS.clone()
    labels[0, :3] = 255
    rest = torch.where(labels == 255, 0, labels)
    counted = labels != 255
    found = confusion(scores, labels, 255)
    assert int(found.sum()) == int(counted.sum())
    for sample in range(2):
        pairs = rest[sample] * 4 + scores[sample].argmax(0)
        expected = torch.bincount(pairs[counted[sample]], minlength=16).view(4, 4)
        assert torch.equal(found[sample], expected)
    assert not confusion(scores, LABELS, 2)[:, 2].any()


@pytest.mark.parametrize("kind", ["cross_entropy", "dice", "dice_ce"])
@pytest.mark.parametrize("weights", [None, (0.2, 1.0, 0.0, 3.0)])
@pytest.mark.parametrize("ignored", [None, 1])
def test_parts_of_a_batch_have_the_loss_of_the_batch(kind, weights, ignored):
    """Two groups share five samples, and each divides its own; one sample has no weight at all."""
    weights = None if kind == "dice" else weights
    loss = SegmentationLoss(kind, weights, ignored)
    scores, labels = randn(5, 4, 3, 4, 2), randint(4, 5, 3, 4, 2)
    labels[4] = 1
    expected = float(loss(scores, labels))

    def body(mesh):
        first, last = ((0, 2), (2, 5))[mesh.data_index]
        mine = labels[first:last]
        of_part = loss.of_parts([mine], mesh, 5)
        parts = [(first, first + 1), (first + 1, last)]
        found = [float(of_part(scores[a:b], labels[a:b])) * (b - a) for a, b in parts]
        return sum(found) / 5

    assert sum(on_ranks((1, 1, 1), body, 2)) == pytest.approx(expected, rel=1e-12)


CUT = ((8, 4), (4, 4))
"""Extents of the volumes of two groups, pass by pass."""


@pytest.fixture(scope="module")
def weighing(tmp_path_factory):
    """Returns a task of several outputs whose voxels have weights."""
    folder = tmp_path_factory.mktemp("volumes")
    generate_ct(folder, CTOptions(count=2, shape=(8, 8, 8), validation=0.5))
    train = TrainConfig(class_weights=(1.0, 3.0, 0.5))
    task = AnySegmentation(FactoryConfig(factory="torch.nn:Conv3d"), train)
    task.check(ShardDataset(folder))
    return task


def passes_of(mesh, labels):
    """Returns the passes of a group, with a volume each; the step has 4 volumes."""
    return [
        Batch(distribute_tensor(each[:, None].double(), mesh), each, torch.ones(1), (0,), 1, 0, 2,
              0.5, 0, 0, 4, part=i, parts=len(labels), in_parts=True)
        for i, each in enumerate(labels)
    ]  # fmt: skip


def test_unlike_volumes_weigh_voxels_as_one_batch(weighing):
    """One group meets two extents, the other one: both exchange the same sums."""
    labels = [[randint(3, 1, n, n, n, seed=n + i) for i, n in enumerate(own)] for own in CUT]
    scores = [[[n * randn(1, 3, *[n // stride] * 3, seed=n + i) for stride in (1, 2)]
               for i, n in enumerate(own)] for own in CUT]  # fmt: skip

    def body(mesh):
        mine, outputs = labels[mesh.data_index], scores[mesh.data_index]
        criterion = weighing.criterion(passes_of(mesh, mine))
        return sum(float(criterion(x, y)) / 4 for x, y in zip(outputs, mine, strict=True))

    weights = torch.tensor((1.0, 3.0, 0.5), dtype=torch.float64)
    expected = 0.0
    for i, stride in enumerate((1, 2)):
        flat = torch.cat([x[i].flatten(2) for own in scores for x in own], 2)
        nearest = [y[:, ::stride, ::stride, ::stride].flatten(1) for own in labels for y in own]
        expected += float(F.cross_entropy(flat, torch.cat(nearest, 1), weights)) * 0.5**i / 1.5
    assert sum(on_ranks((1, 1, 1), body, 2)) == pytest.approx(expected, rel=1e-12)


def test_outputs_out_of_proportion_have_no_weighted_voxels(weighing):
    """The weights of all passes are summed before the later ones have outputs."""
    labels = [torch.zeros(1, n, n, n, dtype=torch.int64) for n in (8, 5)]
    fine, coarse = ([randn(1, 3, n, n, n) for n in own] for own in ((8, 5), (4, 2)))

    def body(mesh):
        criterion = weighing.criterion(passes_of(mesh, labels))
        criterion([fine[0], coarse[0]], labels[0])
        with pytest.raises(UsageError, match=r"output 2 .* \(2, 2, 2\) for .* not \(3, 3, 3\)"):
            criterion([fine[1], coarse[1]], labels[1])

    on_ranks((1, 1, 1), body)
