"""Pixel shuffle and unshuffle, which run on the shards."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from support.equivalence import check_function, layout_at, on_ranks, randn, shard
from support.equivalence.strategies import cuts


@settings(max_examples=25)
@given(data=st.data())
def test_any_factor(data):
    factor = data.draw(st.integers(1, 3), "factor")
    down = data.draw(st.booleans(), "down")
    extents = data.draw(st.lists(st.integers(1, 4), min_size=2, max_size=2), "extents")
    if down:
        extents = [n * factor for n in extents]
    x = randn(2, 2 if down else 2 * factor**2, *extents)
    function = F.pixel_unshuffle if down else F.pixel_shuffle
    check_function(
        lambda x: function(x * x, factor), x, (), data.draw(cuts(extents), "points"),
        second_order=data.draw(st.booleans(), "second order"),
    )  # fmt: skip


CALLS = {
    "there and back": lambda x: F.pixel_unshuffle(F.pixel_shuffle(x, 2), 2) * x,
    "PixelShuffle": nn.PixelShuffle(2),
    "PixelUnshuffle, cut within blocks": nn.PixelUnshuffle(3),
    "ChannelShuffle": nn.ChannelShuffle(4),
    "channel_shuffle by keywords": lambda x: F.channel_shuffle(input=x, groups=2),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_by_name(call):
    check_function(lambda x: call(x * x), randn(2, 8, 6, 9), (), [[0, 1, 4, 4, 6], [0, 5, 9]])


def test_refusals():
    def body(mesh):
        x = shard(randn(1, 8, 4, 4), layout_at(mesh, (1, 8, 4, 4), [[0, 2, 4], None]))
        with pytest.raises(RuntimeError, match="upscale_factor = 3"):
            F.pixel_shuffle(x, 3)

    on_ranks((2, 1, 1), body)


@pytest.mark.parametrize("call", [F.pixel_shuffle, F.pixel_unshuffle, torch.channel_shuffle])
def test_split_channels_are_gathered(call):
    check_function(lambda x: call(x, 2), randn(1, 8, 4, 4), (), [[0, 3, 8], [0, 4], [0, 4]])
