"""Tests of published networks in stages, unmodified."""

from __future__ import annotations

import pytest

from support.networks.zoo import WIDE, ZOO, task_of
from support.staged import DEEP, ONE, TWO_GROUPS, check_stages

MESHES = {
    "2": [ONE] * 2,
    "4": [ONE] * 4,
    "depth 2, 1": [DEEP, ONE],
    "2 groups": [TWO_GROUPS] * 2,
}
CASES = [
    pytest.param(name, meshes, id=f"{name}, {meshes}")
    for i, name in enumerate(ZOO)
    for j, meshes in enumerate(MESHES)
    # Of slow networks one mesh each, another one every time.
    if name not in WIDE or i % len(MESHES) == j or (name == "r3d_18" and meshes in ("2", "4"))
]


def test_convolutions_in_space_and_linear_layers_by_channel():
    """CosmoFlow, whose linear layers have most of its weights."""
    meshes = [DEEP, {"channel": 2}]
    check_stages(task_of("CosmoFlow"), meshes, cuts=["network.head"], sharded_weights=True)


@pytest.mark.parametrize(("name", "meshes"), CASES)
def test_a_network_equals_one_device(name, meshes):
    """In two micro-batches where norms allow it: batch norm needs more than one value."""
    groups = MESHES[meshes][0].get("data", 1)
    check_stages(task_of(name), MESHES[meshes], 2 if groups == 1 and name not in WIDE else 1)
