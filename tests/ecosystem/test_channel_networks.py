"""Networks of MONAI and torchvision on meshes with a channel axis, unmodified."""

from __future__ import annotations

import pytest
import torch.nn.functional as F

from support.equivalence import Task, check_network, randint, randn
from support.networks.small import initialized
from support.networks.zoo import torchvision

nets = pytest.importorskip("monai.networks.nets")

NETWORKS = {
    "UNet": lambda: nets.UNet(3, 1, 2, (8, 16, 32), (2, 2), num_res_units=2, bias=False),
    "DynUNet": lambda: nets.DynUNet(3, 1, 2, [3] * 3, [1, 2, 2], [2, 2], filters=[8, 16, 32]),
    "SegResNet": lambda: nets.SegResNet(3, 8, 1, 2, blocks_down=(1, 2), blocks_up=(1,)),
}
MESHES = {
    "channel 2": ((1, 1, 1), 1, 2),
    "channel 2, depth 2": ((2, 1, 1), 1, 2),
    "channel 3, width 2, data 2": ((1, 1, 2), 2, 3),
}


@pytest.mark.parametrize(("spatial", "data", "channel"), MESHES.values(), ids=MESHES)
@pytest.mark.parametrize("make", NETWORKS.values(), ids=NETWORKS)
def test_split_equals_whole(make, spatial, data, channel):
    x, target = randn(2, 1, 16, 16, 16), randint(2, 2, 16, 16, 16, seed=1)
    task = Task(initialized(make()), x, target, F.cross_entropy)
    check_network(task, spatial, data, axes={"channel": channel})


def test_a_residual_network_of_torchvision():
    make = torchvision("r3d_18")
    x, target = randn(2, 3, 8, 20, 20), randint(3, 2, seed=1)
    task = Task(initialized(make()), x, target, F.cross_entropy)
    check_network(task, (2, 1, 1), axes={"channel": 2})
