"""Ranks on unequal devices; here they only count as such. On devices: tests/gpu/test_staged_gpu."""

from __future__ import annotations

import pytest
import torch

from pydist import Mesh, distribute_tensor, parallelize
from pydist.errors import NotSupported, UsageError
from pydist.optim import ShardedOptimizer, sharded
from support.training.unequal import X, check, network, on_devices

KINDS = ["cpu", "gpu"]


@pytest.mark.parametrize(
    ("devices", "data", "slices"),
    [(KINDS, 2, False), (["cpu", "cpu", "gpu"], 3, False), (["cpu", "cpu", "gpu", "gpu"], 2, True)],
)
def test_training_is_that_of_one_device(devices, data, slices):
    check(devices, data, slices=slices)


def test_a_step_that_each_device_would_compute_is_refused():
    def body(world):
        mesh = Mesh(world)
        model = parallelize(network(), mesh)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        model(distribute_tensor(X[:2], mesh)).sum().backward()
        with pytest.raises(NotSupported, match=r"SGD on unequal devices.*pydist.optim.sharded"):
            optimizer.step()
        with pytest.raises(UsageError, match="LBFGS can't be partitioned"):
            sharded(torch.optim.LBFGS(model.parameters()), model)

    on_devices(KINDS, body)


def test_equal_devices_step_as_ever():
    def body(world):
        mesh = Mesh(world)
        model = parallelize(network(), mesh)
        optimizer = sharded(torch.optim.SGD(model.parameters(), 0.1), model)
        model(distribute_tensor(X[:2], mesh)).sum().backward()
        optimizer.step()
        return isinstance(optimizer, ShardedOptimizer)

    assert on_devices(["gpu"] * 2, body) == [False] * 2


def test_a_sample_on_unequal_devices_is_refused_on_all_ranks():
    def body(world):
        for cut in ({"spatial": (2, 1, 1)}, {"axes": {"channel": 2}}):
            with pytest.raises(NotSupported, match=r"one sample, of .*, are on unequal devices"):
                Mesh(world, 2, **cut)

    on_devices(["cpu", "cpu", "cpu", "gpu"], body)
    on_devices(["cpu", "cpu", "gpu", "gpu"], lambda world: Mesh(world, 2, (2, 1, 1)))
