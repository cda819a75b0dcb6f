"""Losses of sharded predictions: the global mean, and gradients that divide by it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from pydist import ShardedTensor, distribute_tensor
from pydist.errors import NotSupported, UsageError
from support.equivalence import Cut, check_function, layout_at, on_ranks, randint, randn, shard
from support.equivalence.splits import EIGHT_BLOCKS as POINTS
from support.equivalence.splits import SHAPE

BY_VOXEL = (2, 5, 4, 3)
REDUCTIONS = ["mean", "sum", "none"]
REDUCED = [
    *(("mean", points) for points in POINTS), ("sum", "8x1x1"),
    ("none", "2x2x2, half of them empty"),
]  # fmt: skip
"""Reductions and splits; only a mean has more of its own than the values and their sum."""
TARGET = randn(*SHAPE, seed=1)
PROBABILITIES = TARGET.sigmoid()

ELEMENTWISE = {
    "mse": (F.mse_loss, lambda x: x, TARGET, {}),
    "l1": (F.l1_loss, lambda x: x, TARGET, {}),
    "smooth l1": (F.smooth_l1_loss, lambda x: x, TARGET, {"beta": 0.5}),
    "huber": (F.huber_loss, lambda x: x, TARGET, {"delta": 0.7}),
    "bce": (F.binary_cross_entropy, torch.sigmoid, PROBABILITIES, {}),
    "bce, weighted": (
        F.binary_cross_entropy, torch.sigmoid, PROBABILITIES, {"weight": PROBABILITIES}
    ),
    "bce with logits": (F.binary_cross_entropy_with_logits, lambda x: x, PROBABILITIES, {}),
    "bce with positive weights": (
        F.binary_cross_entropy_with_logits, lambda x: x, PROBABILITIES,
        {"pos_weight": torch.tensor([1.0, 2.0, 3.0]).double().view(3, 1, 1, 1)},
    ),
    "kl div": (F.kl_div, lambda x: F.log_softmax(x, 1), TARGET.softmax(1), {}),
    "kl div of logs": (
        F.kl_div, lambda x: F.log_softmax(x, 1), TARGET.log_softmax(1), {"log_target": True}
    ),
    "soft margin": (F.soft_margin_loss, lambda x: x, TARGET.sign(), {}),
    "mse, weighted": (F.mse_loss, lambda x: x, TARGET, {"weight": PROBABILITIES}),
    "l1, weighted": (F.l1_loss, lambda x: x, TARGET, {"weight": PROBABILITIES}),
    "huber, weighted": (F.huber_loss, lambda x: x, TARGET, {"weight": PROBABILITIES}),
    "hinge embedding": (F.hinge_embedding_loss, lambda x: x, TARGET.sign(), {"margin": 0.5}),
    "poisson": (F.poisson_nll_loss, lambda x: x, PROBABILITIES, {"full": False}),
}  # fmt: skip


@pytest.mark.parametrize(("reduction", "split"), REDUCED)
@pytest.mark.parametrize(
    ("loss", "link", "target", "options"), ELEMENTWISE.values(), ids=ELEMENTWISE
)
@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides the total loss by both")
def test_with_a_plain_target(loss, link, target, options, reduction, split):
    check_function(
        lambda x: loss(link(x), target, reduction=reduction, **options),
        randn(*SHAPE), (), POINTS[split],
    )  # fmt: skip


@pytest.mark.parametrize("name", ["mse", "l1", "smooth l1", "huber", "bce with logits", "poisson"])
def test_second_order(name):
    loss, link, target, options = ELEMENTWISE[name]
    check_function(
        lambda x: loss(link(x), target, **options), randn(*SHAPE), (), POINTS["2x1x1"],
        second_order=True,
    )  # fmt: skip


@pytest.mark.parametrize("points", POINTS.values(), ids=POINTS)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_with_a_sharded_target_of_another_layout(reduction, points):
    other = [p and [0, *(p[-1] - q for q in reversed(p[1:-1])), p[-1]] for p in points]
    check_function(
        lambda x, t: F.mse_loss(x, t, reduction=reduction), randn(*SHAPE), (), points,
        beside=[Cut(TARGET, other)],
    )  # fmt: skip


def test_a_target_with_a_gradient():
    check_function(F.smooth_l1_loss, randn(*SHAPE), [TARGET], POINTS["2x1x1"])


def test_a_plain_prediction_and_a_sharded_target():
    check_function(lambda t, x: F.mse_loss(x, t), TARGET, [randn(*SHAPE)], POINTS["2x1x1"])


@pytest.mark.parametrize(
    ("loss", "name"),
    [
        (F.mse_loss, "weight"),
        (F.binary_cross_entropy_with_logits, "weight"),
        (F.binary_cross_entropy_with_logits, "pos_weight"),
    ],
)
def test_only_the_weights_are_sharded(loss, name):
    check_function(
        lambda w, x: loss(x, PROBABILITIES, **{name: w.detach()}) * w.sum(), TARGET.abs(),
        [randn(*SHAPE)], POINTS["2x1x1"],
    )  # fmt: skip


@pytest.mark.parametrize(
    "options", [{"size_average": False}, {"reduce": False}, {"reduction": "batchmean"}]
)
@pytest.mark.filterwarnings("ignore:.*size_average and reduce args will be deprecated")
def test_other_ways_to_name_the_reduction(options):
    check_function(
        lambda x: F.kl_div(F.log_softmax(x, 1), PROBABILITIES, **options), randn(*SHAPE), (),
        POINTS["2x1x1"],
    )  # fmt: skip


# -- classes --------------------------------------------------------------------------------

LABELS = randint(3, *BY_VOXEL)
IGNORING = torch.where(randint(4, *BY_VOXEL, seed=5) == 0, -100, LABELS)
WEIGHT = torch.tensor([0.5, 2.0, 1.5]).double()
CLASSES = {
    "labels": (LABELS, {}),
    "weights": (LABELS, {"weight": WEIGHT}),
    "ignored": (IGNORING, {}),
    "ignored, weights": (IGNORING, {"weight": WEIGHT}),
    "another ignored label": (LABELS, {"ignore_index": 1, "weight": WEIGHT}),
}
SMOOTHED = {
    "smoothing": (LABELS, {"label_smoothing": 0.1}),
    "smoothing, weights, ignored": (IGNORING, {"label_smoothing": 0.2, "weight": WEIGHT}),
    "probabilities": (TARGET.softmax(1), {}),
    "probabilities, weights, smoothing": (
        TARGET.softmax(1), {"weight": WEIGHT, "label_smoothing": 0.1}
    ),
}  # fmt: skip


@pytest.mark.parametrize(("reduction", "split"), REDUCED)
@pytest.mark.parametrize(("target", "options"), [*CLASSES.values(), *SMOOTHED.values()],
                         ids=[*CLASSES, *SMOOTHED])  # fmt: skip
def test_cross_entropy(target, options, reduction, split):
    check_function(
        lambda x: F.cross_entropy(x, target, reduction=reduction, **options),
        randn(*SHAPE), (), POINTS[split],
    )  # fmt: skip


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_labels_of_bytes(reduction):
    """torch takes them for scores without voxels."""
    labels = torch.tensor([0, 1, 2, 2, 1, 0], dtype=torch.uint8)
    check_function(
        lambda x: F.cross_entropy(x.mT, labels, WEIGHT, reduction=reduction),
        randn(3, 6), (), [[0, 2, 6]],
    )  # fmt: skip


@pytest.mark.parametrize("points", POINTS.values(), ids=POINTS)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_learned_weights_of_classes(reduction, points):
    check_function(
        lambda x, w: F.cross_entropy(
            x, TARGET.softmax(1), w, reduction=reduction, label_smoothing=0.1
        ),
        randn(*SHAPE), [WEIGHT], points, second_order=True,
    )  # fmt: skip


def test_weights_of_classes_that_differ_between_ranks_are_named():
    def body(mesh):
        x = shard(randn(*SHAPE), layout_at(mesh, SHAPE, POINTS["2x1x1"]))
        with pytest.raises(UsageError, match="differs between the ranks"):
            F.cross_entropy(x, LABELS, WEIGHT + mesh.rank)

    on_ranks((2, 1, 1), body)


@pytest.mark.parametrize("loss", [F.mse_loss, F.l1_loss])
@pytest.mark.filterwarnings("ignore:Using a target size")
def test_weights_of_a_prediction_that_is_broadcast(loss):
    """Each rank has all weights, whose sum must not count them once per rank."""
    x, weight = randn(2, 3, 1, 4, 3), PROBABILITIES[:, :, :1]
    check_function(lambda t, x, w: loss(x, t, weight=w), TARGET, [x, weight], POINTS["2x1x1"])


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize(("target", "options"), CLASSES.values(), ids=CLASSES)
def test_nll(target, options, reduction):
    check_function(
        lambda x: F.nll_loss(F.log_softmax(x, 1), target, reduction=reduction, **options),
        randn(*SHAPE), (), POINTS["2x2x2, half of them empty"], second_order=True,
    )  # fmt: skip


@pytest.mark.parametrize("batch", [1, 2, 3])
def test_of_gathered_features(batch):
    """A classifier's head: logits [N, K] are replicated, or split over the batch."""
    check_function(
        lambda x, w: F.cross_entropy(F.linear(x.flatten(1), w), randint(4, batch)),
        randn(batch, 2, 4, 3), [randn(4, 24, seed=1)], [[0, 1, 4], None], second_order=True,
    )  # fmt: skip


def test_sharded_labels():
    def body(mesh):
        layout = layout_at(mesh, SHAPE, POINTS["2x1x1"])
        labels = distribute_tensor(LABELS, mesh, dims={1: "depth"})
        return F.cross_entropy(shard(randn(*SHAPE), layout), labels).detach()

    expected = F.cross_entropy(randn(*SHAPE), LABELS)
    for found in on_ranks((2, 1, 1), body):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)


def test_the_loss_is_a_plain_scalar_and_the_same_on_all_ranks():
    def body(mesh):
        loss = F.mse_loss(shard(randn(*SHAPE), layout_at(mesh, SHAPE, POINTS["2x1x1"])), TARGET)
        assert not isinstance(loss, ShardedTensor)
        assert loss.dim() == 0
        return loss.detach()

    first, second = on_ranks((2, 1, 1), body)
    assert torch.equal(first, second)


def _shard_of(t: torch.Tensor, x: ShardedTensor) -> torch.Tensor:
    return t.narrow(-3, 0, x.to_local().shape[2]).contiguous()


REFUSED = {
    "shard-shaped target": (
        UsageError, "shape of this rank's shard", lambda x: F.mse_loss(x, _shard_of(TARGET, x))
    ),
    "shard-shaped labels": (
        UsageError, "shape of this rank's shard", lambda x: F.cross_entropy(x, _shard_of(LABELS, x))
    ),
    "target of another shape": (
        ValueError, r"\(2, 5, 4, 3\) is expected", lambda x: F.cross_entropy(x, randint(3, 2, 4))
    ),
    "a loss without a handler": (
        NotSupported, "multilabel_margin_loss",
        lambda x: F.multilabel_margin_loss(x.mean((2, 3, 4)), torch.zeros(2, 3).long()),
    ),
    "weights of another size": (
        ValueError, "same size", lambda x: F.mse_loss(x, TARGET, weight=torch.ones(3, 1, 1, 1))
    ),
    "weights of the extent of a block": (
        RuntimeError, "broadcast", lambda x: F.binary_cross_entropy_with_logits(
            x, PROBABILITIES, weight=torch.ones(x.to_local().shape[2], 1, 1).double()
        )
    ),
    "positive weights of the extent of a block": (
        RuntimeError, "broadcast", lambda x: F.binary_cross_entropy_with_logits(
            x, PROBABILITIES, pos_weight=torch.ones(x.to_local().shape[2], 1, 1).double()
        )
    ),
    "a target of another size": (
        ValueError, "size", lambda x: F.binary_cross_entropy_with_logits(
            x[:, :, 1:3], PROBABILITIES[:, :, :1]
        )
    ),
    "a soft margin to a larger target": (
        RuntimeError, "doesn't broadcast",
        lambda x: F.soft_margin_loss(x[:, :, :1], x[:, :, 1:3].detach().sign()),
    ),
    "weights of huber of another size": (
        ValueError, "same size",
        lambda x: F.huber_loss(x[:, :, 1:3], TARGET[:, :, 1:3], weight=PROBABILITIES[:, :, :1]),
    ),
    "an unknown reduction": (
        ValueError, "not a valid value", lambda x: F.mse_loss(x, TARGET, reduction="avg")
    ),
    "an unknown reduction of classes": (
        ValueError, "not a valid value", lambda x: F.cross_entropy(x, LABELS, reduction="avg")
    ),
    "a mean over samples": (
        ValueError, "not a valid value", lambda x: F.mse_loss(x, TARGET, reduction="batchmean")
    ),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "message", "call"), REFUSED.values(), ids=REFUSED)
@pytest.mark.filterwarnings("ignore:Using a target size")
def test_refusals(kind, message, call):
    def body(mesh):
        x = shard(randn(*SHAPE), layout_at(mesh, SHAPE, POINTS["2x1x1"]))
        with pytest.raises(kind, match=message):
            call(x)

    on_ranks((2, 1, 1), body)


def test_split_channels_are_gathered():
    labels = randint(2, 2, 3, 4, 3)
    check_function(
        lambda x: F.cross_entropy(x.transpose(1, 2), labels), randn(*SHAPE), (), POINTS["2x1x1"]
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_means_in_half_precision_are_rounded_once(dtype):
    """The sum of all voxels overflows fp16, and their count is not a bf16 number."""
    x = (randn(1, 2, 41, 10, 9) * 20).to(dtype)
    labels = randint(2, 1, 41, 10, 9)
    calls = [
        lambda t: F.mse_loss(t, torch.zeros(x.shape, dtype=t.dtype)),
        lambda t: F.cross_entropy(t, labels),
        lambda t: F.cross_entropy(t, labels, ignore_index=0),
    ]

    def body(mesh):
        sharded = shard(x, layout_at(mesh, x.shape, [[0, 20, 41], None, None]))
        return [call(sharded).detach() for call in calls]

    for found in on_ranks((2, 1, 1), body):
        for a, call in zip(found, calls, strict=True):
            assert a.dtype == dtype
            close = 2 * torch.finfo(dtype).eps
            torch.testing.assert_close(a.double(), call(x.double()), rtol=close, atol=0)


def test_on_one_rank():
    def body(mesh):
        x = shard(randn(*SHAPE), layout_at(mesh, SHAPE, [None, None, None]))
        return F.l1_loss(x, TARGET).detach()

    (found,) = on_ranks((1, 1, 1), body)
    torch.testing.assert_close(found, F.l1_loss(randn(*SHAPE), TARGET), rtol=1e-12, atol=0)
