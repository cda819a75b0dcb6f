"""Networks of MONAI whose tokens attend to each other, unmodified, on split volumes."""

from __future__ import annotations

import pytest

pytest.importorskip("monai.networks.nets")

from support.attention import forced
from support.networks.attention import NETWORKS, check_attention_network


@pytest.mark.parametrize(("make", "extents"), NETWORKS.values(), ids=NETWORKS)
def test_split_equals_whole(make, extents):
    check_attention_network(make, extents)


def test_in_a_ring():
    with forced("ring"):
        check_attention_network(*NETWORKS["DiffusionModelUNet, fused"])
