"""Operands of sharded calls, converted to shards."""

from __future__ import annotations

import math
import operator

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from pydist import Layout, Partition, ShardedTensor, Split
from pydist.errors import UsageError
from support.equivalence import check_function, layout_at, on_ranks, randn, shard


def cut(mesh, points):
    return Layout(mesh, (3, points[-1]), [None, Split(("depth",), Partition(points))])


def test_a_plain_operand_of_extent_one_is_no_shard():
    """On rank 0 the operand happens to have the shape of the shard."""

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


IN_PLACE = {
    "add_": lambda x, y: x.add_(y),
    "mul_": lambda x, y: x.mul_(y),
    "copy_": lambda x, y: x.copy_(y),
    "lerp_": lambda x, y: x.lerp_(y, 0.5),
    "lerp_ by": lambda x, y: x.lerp_(x + 1, y),
    "addcmul_": lambda x, y: x.addcmul_(x + 1, y),
    "masked_fill_": lambda x, y: x.masked_fill_(y > 0, 2.0),
    "+=": operator.iadd,
}
UNFIT = {
    "half the extents": (2, 4),
    "half of one extent": (4, 4),
    "more dims": (1, 4, 8),
    "an extent beside 1": (3, 1),
}


@pytest.mark.parametrize("shape", UNFIT.values(), ids=UNFIT)
@pytest.mark.parametrize("call", IN_PLACE.values(), ids=IN_PLACE)
def test_operands_that_do_not_broadcast_in_place_though_their_blocks_do(call, shape):
    x, y = randn(4, 8), randn(*shape, seed=1)
    with pytest.raises(RuntimeError):
        call(x.clone(), y)

    def body(mesh):
        split = layout_at(mesh, (4, 8), [[0, 2, 4], [0, 4, 8]])
        points = [[0, n // 2, n] for n in shape[-2:]]
        for other in (y, shard(y, layout_at(mesh, shape, points)).detach()):
            own = shard(x, split).detach()
            with pytest.raises((RuntimeError, UsageError)):
                call(own, other)
            assert torch.equal(own.full_tensor(), x)

    on_ranks((2, 2, 1), body)


@pytest.mark.parametrize("shape", [(), (1,), (8,), (4, 1), (1, 8), (4, 8)], ids=str)
@pytest.mark.parametrize("call", IN_PLACE.values(), ids=IN_PLACE)
def test_operands_that_broadcast_in_place(call, shape):
    y = randn(32, seed=1)[: math.prod(shape)].view(shape)
    check_function(lambda x, y: call(x * 2, y), randn(4, 8), [y], [[0, 1, 4], [0, 5, 8]])


def test_channels_last_shards_stay_so():
    """The format holds in forward and backward; plain strides stay plain, too."""
    shape, dims = (2, 3, 6, 4, 2), (0, 2, 3, 4, 1)

    def body(mesh):
        split = Layout(
            mesh, shape, [*[None] * 2, Split(("depth",), Partition([0, 2, 6])), None, None]
        )
        other = split.replace(changes={2: Split(("depth",), Partition([0, 5, 6]))})
        local = shard(randn(*shape), split).to_local().detach()
        local = local.contiguous(memory_format=torch.channels_last_3d)
        x = ShardedTensor.from_local(local.requires_grad_(), split)
        y = x.redistribute(other)
        assert y.to_local().permute(dims).is_contiguous()
        y.backward(shard(randn(*shape, seed=1), other).detach())
        assert torch.equal(x.grad.full_tensor(), randn(*shape, seed=1))
        assert x.grad.to_local().permute(dims).is_contiguous()
        assert torch.equal(y.full_tensor(), randn(*shape))
        plain = shard(randn(*shape), other).redistribute(split)
        assert plain.to_local().is_contiguous()

    on_ranks((2, 1, 1), body)


def test_a_plain_operand_in_a_segment_that_only_some_ranks_compute_again():
    """Rank 1 holds all inputs, saves nothing, and has nothing to recompute."""

    def segment(x):
        x = x + torch.ones(1, 1, 3, 4, dtype=x.dtype)
        return F.interpolate(x, size=(2, 3), mode="bilinear", align_corners=True)

    check_function(
        lambda x: checkpoint(segment, x, use_reentrant=False),
        randn(2, 2, 3, 4),
        (),
        [[0, 0, 3], None],
    )
