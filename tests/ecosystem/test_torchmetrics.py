"""Metrics of torchmetrics, updated with sharded predictions or with their full tensor."""

from __future__ import annotations

import pytest
import torch

from pydist.errors import NotSupported
from support.equivalence import layout_at, on_ranks, randint, randn, shard, whole_of
from support.networks.vision import declare_missing_operators

declare_missing_operators()  # torchmetrics imports torchvision if it is installed
pytest.importorskip("torchmetrics")

from torchmetrics import (  # noqa: E402
    MeanMetric,
    classification,
    image,
    regression,
    segmentation,
)

SHAPE = (2, 3, 6, 5, 4)
POINTS = [[0, 2, 6], [0, 1, 5], [0, 0, 4]]
X, Y = randn(*SHAPE), randn(*SHAPE, seed=3)
LABELS = randint(3, 2, 6, 5, 4, seed=2)


def _classes(x):
    return x.softmax(1), LABELS


def _binary(x):
    return x[:, 0].sigmoid(), (LABELS > 0).long()


def _labels(x):
    return x.argmax(1), LABELS


def _values(x):
    return x, Y


# Other tests of this process start torch.distributed.
ALONE = {"sync_on_compute": False}
METRICS = {
    "accuracy": (lambda: classification.MulticlassAccuracy(3, **ALONE), _classes),
    "F1": (lambda: classification.MulticlassF1Score(3, **ALONE, average="micro"), _classes),
    "Jaccard": (lambda: classification.MulticlassJaccardIndex(3, **ALONE), _classes),
    "confusion": (lambda: classification.MulticlassConfusionMatrix(3, **ALONE), _classes),
    "binned AUROC": (lambda: classification.MulticlassAUROC(3, **ALONE, thresholds=5), _classes),
    "binary F1": (lambda: classification.BinaryF1Score(**ALONE), _binary),
    "mse": (lambda: regression.MeanSquaredError(**ALONE), _values),
    "mae": (lambda: regression.MeanAbsoluteError(**ALONE), _values),
    "R2": (lambda: regression.R2Score(**ALONE), lambda x: (x.flatten(), Y.flatten())),
    "mean": (lambda: MeanMetric(**ALONE), lambda x: (x,)),
    "Dice": (lambda: segmentation.DiceScore(3, **ALONE, input_format="index"), _labels),
    "mean IoU": (lambda: segmentation.MeanIoU(3, **ALONE, input_format="index"), _labels),
    "average precision": (lambda: classification.BinaryAveragePrecision(**ALONE), _binary),
    "PSNR": (lambda: image.PeakSignalNoiseRatio(**ALONE, data_range=2.0), _values),
}
WAYS = {"sharded": lambda x: x, "full_tensor": lambda x: x.full_tensor()}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize(("make", "inputs"), METRICS.values(), ids=METRICS)
def test_after_two_updates(make, inputs, way):
    def value(x):
        metric = make()
        for sign in (1, -1):
            metric.update(*inputs(sign * x))
        found = metric.compute()
        return whole_of(found)

    def body(mesh):
        return value(way(shard(X, layout_at(mesh, SHAPE, POINTS)).detach()))

    for found in on_ranks((2, 2, 2), body):
        torch.testing.assert_close(found, value(X), rtol=1e-5, atol=1e-7)


def test_areas_under_curves_of_single_values_need_the_full_tensor():
    """They are sums of trapezoids, of values that were sorted."""

    def body(mesh):
        x = shard(X, layout_at(mesh, SHAPE, POINTS)).detach()
        metric = classification.BinaryAUROC(**ALONE)
        metric.update(*_binary(x))
        with pytest.raises(NotSupported, match="full_tensor"):
            metric.compute()

    on_ranks((2, 2, 2), body)
