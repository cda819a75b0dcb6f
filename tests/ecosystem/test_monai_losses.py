"""MONAI's losses on sharded predictions, with plain and sharded labels: equal to one device."""

from __future__ import annotations

import pytest
import torch

from support.equivalence import even_points, layout_at, on_ranks, randint, randn, shard, whole_of

losses = pytest.importorskip("monai.losses")

SHAPE = (2, 3, 6, 5, 4)
POINTS = [[0, 2, 6], [0, 1, 5], [0, 0, 4]]
X, LABELS = randn(*SHAPE), randint(3, 2, 1, 6, 5, 4, seed=2)
SOFTMAX = {"to_onehot_y": True, "softmax": True}
WEIGHTS = torch.tensor([1.0, 2.0, 3.0])

LOSSES = {
    "Dice": lambda: losses.DiceLoss(**SOFTMAX),
    "Dice of the batch, no background": lambda: losses.DiceLoss(
        batch=True, include_background=False, squared_pred=True, jaccard=True, **SOFTMAX
    ),
    "Dice, weighted": lambda: losses.DiceLoss(weight=WEIGHTS, **SOFTMAX),
    "Dice of sigmoids, by class": lambda: losses.DiceLoss(
        to_onehot_y=True, sigmoid=True, reduction="none"
    ),
    "generalized Dice": lambda: losses.GeneralizedDiceLoss(**SOFTMAX),
    "Dice and CE": lambda: losses.DiceCELoss(**SOFTMAX),
    "Dice and CE, weighted": lambda: losses.DiceCELoss(weight=WEIGHTS.double(), **SOFTMAX),
    "Dice and BCE": lambda: losses.DiceCELoss(to_onehot_y=True, sigmoid=True),
    "Dice and focal": lambda: losses.DiceFocalLoss(**SOFTMAX),
    "generalized Dice and focal": lambda: losses.GeneralizedDiceFocalLoss(**SOFTMAX),
    "Tversky": lambda: losses.TverskyLoss(alpha=0.3, beta=0.7, **SOFTMAX),
    "focal": lambda: losses.FocalLoss(to_onehot_y=True, gamma=1.5, alpha=0.3, weight=WEIGHTS),
    "focal of softmax": lambda: losses.FocalLoss(to_onehot_y=True, use_softmax=True),
    "unified focal": lambda: losses.AsymmetricUnifiedFocalLoss(to_onehot_y=True, num_classes=3),
}


def gradient(loss, x, labels):
    """Returns the value and the gradient."""
    value = loss(x, labels)
    value.sum().backward()
    return value.detach(), x.grad


WAYS = {
    "plain labels": lambda x, labels: (x, labels),
    "sharded labels": lambda x, labels: (
        x,
        shard(labels, layout_at(x.mesh, labels.shape, [[0, 3, 6], [0, 1, 5], even_points(4, 2)])),
    ),
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("make", LOSSES.values(), ids=LOSSES)
def test_on_sharded_predictions(make, way):
    """The losses compute in fp32, which sets the tolerance."""
    expected = gradient(make(), X.clone().requires_grad_(), LABELS)

    def body(mesh):
        x, labels = way(shard(X, layout_at(mesh, SHAPE, POINTS)), LABELS)
        return [whole_of(t) for t in gradient(make(), x, labels)]

    for found in on_ranks((2, 2, 2), body):
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_on_the_whole_tensor():
    loss = losses.DiceCELoss(**SOFTMAX)
    expected = gradient(loss, X.clone().requires_grad_(), LABELS)

    def body(mesh):
        x = shard(X, layout_at(mesh, SHAPE, POINTS))
        value = loss(x.full_tensor(), LABELS)
        value.backward()
        torch.testing.assert_close(value.detach(), expected[0], rtol=1e-6, atol=0)
        torch.testing.assert_close(x.grad.full_tensor(), expected[1], rtol=1e-5, atol=1e-8)

    on_ranks((2, 2, 2), body)


def test_what_leaves_torch_is_computed_of_the_whole_tensor():
    """The Hausdorff loss computes distance transforms in SciPy, from the full tensor."""
    loss = losses.HausdorffDTLoss(**SOFTMAX)
    expected = gradient(loss, X.clone().requires_grad_(), LABELS)

    def body(mesh):
        return [
            whole_of(t) for t in gradient(loss, shard(X, layout_at(mesh, SHAPE, POINTS)), LABELS)
        ]

    for found in on_ranks((2, 2, 2), body):
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
