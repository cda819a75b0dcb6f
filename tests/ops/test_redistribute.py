"""Operands on their way into shards."""

from __future__ import annotations

import pytest
import torch
from equivalence import on_ranks, randn, shard

from pydist import Layout, Partition, Split
from pydist.errors import UsageError


def cut(mesh, points):
    return Layout(mesh, (3, points[-1]), [None, Split(("depth",), Partition(points))])


def test_a_plain_operand_of_extent_one_is_no_shard():
    """On rank 0 it has the shape of the shard as well."""

    def body(mesh):
        x = shard(randn(3, 4), cut(mesh, [0, 1, 4]))
        assert torch.equal(
            (x * randn(3, 1, seed=1)).full_tensor(), randn(3, 4) * randn(3, 1, seed=1)
        )
        x.detach().mul_(randn(3, 1, seed=1))
        assert torch.equal(x.full_tensor(), randn(3, 4) * randn(3, 1, seed=1))

    on_ranks((2, 1, 1), body)


def test_a_plain_operand_in_the_shape_of_the_shard_is_named():
    def body(mesh):
        x = shard(randn(3, 4), cut(mesh, [0, 2, 4]))
        for call in (torch.add, torch.Tensor.add_):
            with pytest.raises(UsageError, match="has the shape of this rank's shard"):
                call(x.detach(), randn(3, 2))

    on_ranks((2, 1, 1), body)
