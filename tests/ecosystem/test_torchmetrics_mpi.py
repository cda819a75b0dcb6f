"""Metrics of torchmetrics that sum over processes, in jobs of several ranks."""

from __future__ import annotations

import pytest
import torch

import pydist
from pydist import Mesh, distribute_tensor
from pydist.errors import NotSupported, UsageError
from support.equivalence import randint, randn, whole_of
from support.networks.vision import declare_missing_operators

declare_missing_operators()  # torchmetrics imports torchvision if it is installed
pytest.importorskip("torchmetrics")

from torchmetrics import CatMetric, SumMetric, classification, segmentation  # noqa: E402

pytestmark = pytest.mark.ranks(4, mpi=("gloo",))

SAMPLES = 3  # two for the first group, one for the second
X, LABELS = randn(SAMPLES, 3, 6, 5, 4), randint(3, SAMPLES, 6, 5, 4, seed=2)


def _argmax(x):
    return x.argmax(1)


METRICS = {
    "confusion": (lambda **o: classification.MulticlassConfusionMatrix(3, **o), lambda x: x),
    "Dice": (lambda **o: segmentation.DiceScore(3, input_format="index", **o), _argmax),
    "sum": (SumMetric, None),
    "all values": (CatMetric, None),
}


@pytest.fixture(scope="module")
def mesh(world):
    return Mesh(world, 2, (2, 1, 1))


def _value(metric, predict, x, labels):
    for sign in (1, -1):
        metric.update(*((sign * x,) if predict is None else (predict(sign * x), labels)))
    found = metric.compute()
    return whole_of(found)


@pytest.mark.parametrize("is_full", [False, True], ids=["sharded", "full"])
@pytest.mark.parametrize(("make", "predict"), METRICS.values(), ids=METRICS)
def test_states_are_added_up_over_the_groups(mesh, make, predict, is_full):
    if make is CatMetric and not is_full:
        pytest.skip("keeps all values")
    own = slice(0, 2) if mesh.data_index == 0 else slice(2, 3)
    x = distribute_tensor(X[own], mesh)
    metric = make(dist_sync_fn=lambda state, group: pydist.gather_over_groups(state, mesh))
    found = _value(metric, predict, x.full_tensor() if is_full else x, LABELS[own])
    expected = _value(make(sync_on_compute=False), predict, X, LABELS)
    if make is CatMetric:
        found, expected = found.flatten().sort().values, expected.flatten().sort().values
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_gather_of_torch_names_the_one_over_groups(mesh):
    x = distribute_tensor(X, mesh)
    with pytest.raises(NotSupported, match=r"pydist\.gather_over_groups"):
        torch.distributed.all_gather([x, x], x)


def test_groups_may_have_other_shapes_but_not_other_dims(mesh):
    own = torch.arange(mesh.data_index * 3).reshape(3, -1)
    first, second = pydist.gather_over_groups(own, mesh)
    assert first.shape == (3, 0)
    assert second.tolist() == [[0], [1], [2]]
    with pytest.raises(UsageError, match="gather_over_groups of dtype and dims"):
        pydist.gather_over_groups(torch.ones((1,) * (1 + mesh.data_index)), mesh)
