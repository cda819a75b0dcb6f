"""Networks of MONAI with attention that take long: window attention, many layers."""

from __future__ import annotations

import pytest

pytest.importorskip("monai.networks.nets")

from support.networks.attention import LONG, check_attention_network


@pytest.mark.parametrize(("make", "extents"), LONG.values(), ids=LONG)
def test_split_equals_whole(make, extents):
    check_attention_network(make, extents)
