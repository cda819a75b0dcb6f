"""Tests of volumes in lists, dicts and dataclasses: models treat them as direct arguments."""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from pydist import ShardedTensor, distribute_tensor, parallelize
from pydist.arguments import leaves, mapped
from support.equivalence import assert_equal, on_ranks, randn


class Pair(NamedTuple):
    image: Any
    scale: float = 1.0


@dataclasses.dataclass(frozen=True)
class Batch:
    image: Any


class Subject(dict):
    """Subclass of dict, as TorchIO's Subject is."""


WRAPS = {
    "list": lambda x: [x, 3],
    "tuples": lambda x: ((x,), "a"),
    "dict": lambda x: {"image": x, "id": "7"},
    "subclass": lambda x: Subject(image=x),
    "ordered": lambda x: OrderedDict(image=x),
    "named tuple": Pair,
    "dataclass": Batch,
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv3d(1, 3, 3, padding=1, bias=False), nn.BatchNorm3d(3), nn.Conv3d(3, 1, 1)
        )

    def forward(self, batch):
        return self.layers(next(leaves((batch,))))


def trained(model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
    """Returns the gradients and running statistics after one backward pass."""
    model(batch).pow(2).mean().backward()
    found = {name: p.grad for name, p in model.named_parameters()}
    return found | {n: b.clone() for n, b in model.named_buffers() if b.is_floating_point()}


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
@pytest.mark.parametrize("cut", [True, False], ids=["sharded", "plain"])
def test_groups_of_unequal_size(wrap, cut):
    torch.manual_seed(0)
    made, volumes = Net().double(), randn(3, 1, 5, 4, 4)
    expected = trained(copy.deepcopy(made), volumes)

    def body(mesh):
        model = parallelize(copy.deepcopy(made), mesh)
        mine = volumes[:2] if mesh.data_index == 0 else volumes[2:]
        return trained(model, wrap(distribute_tensor(mine, mesh) if cut else mine))

    for found in on_ranks((1, 1, 1), body, data=2):
        assert_equal(found, expected)


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
def test_plain_volumes_are_cut(wrap):
    made, volumes = Net().double(), randn(2, 1, 5, 4, 4)
    expected = made(volumes)

    def body(mesh):
        out = parallelize(copy.deepcopy(made), mesh)(wrap(volumes))
        assert isinstance(out, ShardedTensor)
        return out.full_tensor().detach()

    for found in on_ranks((2, 1, 1), body):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)


def test_statistics_follow_the_argument_of_parallelize():
    made, volumes = Net().double(), randn(2, 1, 6, 4, 4)

    def body(mesh):
        model = parallelize(copy.deepcopy(made), mesh, batch_norm="rank")
        x = distribute_tensor(volumes, mesh)
        return model(x).full_tensor().detach(), model({"image": x}).full_tensor().detach()

    for alone, nested in on_ranks((2, 1, 1), body):
        assert torch.equal(nested, alone)


def test_a_dict_stays_the_callers():
    """The caller sees what the model writes; plain volumes of the caller are not replaced."""

    class Writes(Net):
        def forward(self, batch):
            batch["prediction"] = self.layers(batch["image"])
            return batch["prediction"]

    def body(mesh):
        model = parallelize(Writes().double(), mesh)
        volumes = randn(1, 1, 5, 4, 4)
        sharded, plain = {"image": distribute_tensor(volumes, mesh)}, {"image": volumes}
        assert model(sharded) is sharded["prediction"]
        model(plain)
        return plain["image"] is volumes

    assert all(on_ranks((2, 1, 1), body))


def test_kernels_beside_a_volume_are_not_cut():
    volumes, kernel = randn(2, 1, 6, 4, 4), randn(2, 1, 3, 3, 3)

    class Functional(nn.Module):
        def forward(self, x, kernels):
            return nn.functional.conv3d(x, kernels[0], padding=1)

    def body(mesh):
        model = parallelize(Functional(), mesh)
        return model(volumes, [kernel]).full_tensor()

    for found in on_ranks((2, 1, 1), body):
        whole = nn.functional.conv3d(volumes, kernel, padding=1)
        torch.testing.assert_close(found, whole, rtol=0, atol=1e-13)


@pytest.mark.parametrize("given", [
    np.array(["case 1", "case 2"]), np.str_("case 1"), np.array([None, {"a": 1}], dtype=object),
    np.array("2026-01-01", dtype="datetime64[D]"), np.zeros(2, dtype=[("id", "U4"), ("age", int)]),
    np.array([[[[["case 1"]]]]]), np.float64(3),
], ids=repr)  # fmt: skip
def test_arrays_without_numbers_stay_as_they_are(given):
    class Named(nn.Module):
        def forward(self, x, names, *, more):
            assert names is given
            assert more is given
            return x * 2

    volumes = randn(2, 1, 6, 4, 4)

    def body(mesh):
        found = parallelize(Named(), mesh)(volumes, given, more=given)
        assert isinstance(found, ShardedTensor)
        return found.full_tensor()

    for found in on_ranks((2, 1, 1), body):
        assert torch.equal(found, volumes * 2)


def test_containers_that_hold_themselves():
    inner: dict[str, Any] = {"x": 1}
    inner["self"] = inner
    assert list(leaves((inner, [inner]))) == [1]
    assert mapped(lambda x: x + 1, inner)["x"] == 2
    assert inner["x"] == 1
    most = torch.ones(2, 2).max(0)
    assert mapped(lambda x: x * 2, most).values.tolist() == [2, 2]
