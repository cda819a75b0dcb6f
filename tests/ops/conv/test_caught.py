"""Convolution after a caught exception: a call that raised on all ranks leaves no trace."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.nn.functional as F

from pydist import layout_for_sample
from support.equivalence import assert_same, on_ranks, randn, shard

WEIGHT = randn(2, 4, 3, 3, 3, seed=1)
WRONG = {
    "channels": lambda x: F.conv3d(x[:, :3], WEIGHT, padding=1),
    "groups": lambda x: F.conv3d(x, WEIGHT, padding=1, groups=3),
    "bias": lambda x: F.conv3d(x, WEIGHT, torch.ones(5).double(), padding=1),
    "channels of a transposed one": lambda x: F.conv_transpose3d(x, WEIGHT, padding=1),
    "bias of a transposed one": lambda x: F.conv_transpose3d(
        x[:, :2], WEIGHT, torch.ones(5).double(), padding=1
    ),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_the_next_call_is_right(wrong):
    whole = randn(1, 4, 6, 6, 6)
    expected = F.conv3d(whole, WEIGHT, padding=1)

    def rank(mesh):
        x = shard(whole, layout_for_sample(mesh, whole.shape))
        with contextlib.suppress(RuntimeError, ValueError):
            wrong(x)
            pytest.fail("it did not raise")
        return F.conv3d(x, WEIGHT, padding=1).full_tensor()

    for found in on_ranks((2, 1, 1), rank):
        assert_same(found, expected)
