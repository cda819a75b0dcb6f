"""Matrix products and linear layers: over split dims the ranks add partial sums."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from pydist.errors import NotSupported
from support.equivalence import Cut, check_function, layout_at, on_ranks, randn, shard
from support.equivalence.splits import SHAPE
from support.equivalence.splits import THREE_SPLITS as POINTS


def channel_attention(x):
    tokens = x.flatten(2)
    weights = (tokens @ tokens.transpose(1, 2)).softmax(-1)
    return torch.matmul(weights, tokens).view(x.shape) + x


def squeeze_and_excitation(x, w, v):
    y = x.mean((2, 3, 4)).view(2, 3)
    y = torch.sigmoid(F.linear(F.relu(F.linear(y, w)), v)).view([2, 3, 1, 1, 1])
    return x * y


def global_context(x):
    """Computes a softmax over all voxels and adds the mean that it weights."""
    attention = x[:, :1].flatten(2).softmax(-1)
    context = torch.bmm(x.flatten(2), attention.transpose(1, 2))
    return x + context.view(2, 3, 1, 1, 1).expand_as(x)


CALLS = {
    "channel attention": channel_attention,
    "channel attention by einsum": lambda x: torch.einsum("ncdhw,nkdhw->nck", x, x.exp()),
    "weighted by channels": lambda x: torch.einsum("nck,nkdhw->ncdhw", x[:, :, 0, 0, :3], x),
    "global context": global_context,
    "einsum with an ellipsis": lambda x: torch.einsum("nc...,nc...->...", x, x * 2),
    "einsum of everything": lambda x: torch.einsum("ncdhw, ncdhw ->", x, x),
    "einsum without a result": lambda x: torch.einsum("...w, c", x, x[0, :, 0, 0, 0]),
    "einsum of lists": lambda x: torch.einsum(x, [0, 1, ...], x, [0, 1, ...], [1]),
    "einsum of a list": lambda x: torch.einsum("ncdhw->hc", [x]),
    "einsum of three": lambda x: torch.einsum("ncdhw,nc,d", x, x[:, :, 0, 0, 0], x[0, 0, :, 0, 0]),
    "einsum with a diagonal": lambda x: torch.einsum("ncdww->ncd", x[..., :3, :]),
    "einsum with a plain one": lambda x: torch.einsum("ncdhw,hk->nckdw", x, randn(4, 2)),
    "tensordot": lambda x: torch.tensordot(x, x.permute(2, 3, 4, 0, 1), 3),
    "tensordot of named dims": lambda x: torch.tensordot(x, x, ([0, 2, 3, 4], [0, 2, 3, 4])),
    "bilinear": lambda x: F.bilinear(x, x * 2, randn(2, 3, 3), randn(2, seed=1)),
    "bilinear over channels": lambda x: F.bilinear(x.mT, x.mT, randn(2, 4, 4)),
    "outer": lambda x: torch.outer(x[0, 0, :, 0, 0], randn(3)),
    "outer of two": lambda x: torch.outer(x[0, :, 0, 0, 0], x[1, 1, 1, 1]),
    "cross": lambda x: torch.cross(x, x.exp().flip(3), 1),
    "cross over a split dim": lambda x: torch.linalg.cross(x, randn(1, 3, 5, 1, 3)),
    "cross of two splits": lambda x: x.cross(x.exp().flip(2), -1),
    "with a plain matrix": lambda x: x @ randn(3, 2) + (randn(2, 4) @ x).sum(),
    "__rmatmul__ and vectors": lambda x: (randn(4) @ x) * (x @ randn(3)).sum(),
    "dot": lambda x: torch.dot(x[0, 0, :, 0, 0], x[1, 1, :, 1, 1]),
    "mv": lambda x: torch.mv(x[0, 0, 0], x[0, 0, 0, 0]),
    "mm of a row": lambda x: torch.mm(x[0, 0, :, 0], x[0, 1, :, 0].mT[:, :1]),
    "addmm": lambda x: torch.addmm(randn(2), x[0, 0, 0], randn(3, 2), beta=2, alpha=3),
    "addmm without the first": lambda x: torch.addmm(x[0, 0, 0], x[0, 0, 0], randn(3, 3), beta=0),
    "baddbmm": lambda x: torch.baddbmm(x[0, :, 0], x[0, :, 0], randn(3, 3, 3), alpha=2),
    "addbmm": lambda x: torch.addbmm(randn(4, 2), x[0, :, 0], randn(3, 3, 2)),
    "addbmm of plain ones": lambda x: torch.addbmm(x[0, 0, 0], randn(2, 4, 5), randn(2, 5, 3)),
    "addmv": lambda x: randn(3).addmv(x[0, 0, 0].mT, randn(4)),
    "cross attention": lambda x: F.scaled_dot_product_attention(
        x.flatten(2).mT, randn(1, 6, 3), randn(1, 6, 2), randn(6)
    ),
    "channels attend to channels": lambda x: F.scaled_dot_product_attention(
        x.flatten(2), x.flatten(2) * 2, x.flatten(2)[:, :, 1:], scale=0.1
    ),
    "to some channels": lambda x: F.scaled_dot_product_attention(
        x.flatten(2), x.flatten(2), x.flatten(2), torch.eye(3).bool()
    ),
    "attention in a batch of windows": lambda x: F.scaled_dot_product_attention(
        *[x.permute(2, 3, 4, 0, 1).flatten(0, 2)] * 3
    ),
}  # fmt: skip


@pytest.mark.parametrize("points", POINTS.values(), ids=POINTS)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_to_second_order(call, points):
    check_function(lambda x: call(x * x), randn(*SHAPE), (), points, second_order=True)


@pytest.mark.parametrize("points", POINTS.values(), ids=POINTS)
def test_squeeze_and_excitation(points):
    check_function(
        squeeze_and_excitation, randn(*SHAPE), [randn(2, 3, seed=1), randn(3, 2, seed=2)], points,
        second_order=True,
    )  # fmt: skip


def test_of_tensors_with_different_partitions():
    check_function(
        lambda x, y: torch.einsum("ncdh,nkdh->nck", x, y), randn(2, 2, 5, 4), (),
        [[0, 2, 5], [0, 1, 4]], beside=[Cut(randn(2, 3, 5, 4, seed=1), [[0, 4, 5], [0, 4, 4]])],
        second_order=True,
    )  # fmt: skip


def test_a_summed_dim_of_one_tensor_alone_is_split():
    check_function(
        lambda x, y: x @ y, randn(4, 6), (), [None, [0, 1, 6]],
        beside=[Cut(randn(6, 5, seed=1), [None, None])], second_order=True,
    )  # fmt: skip


# -- linear layers --------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 3, 4, 5])
@pytest.mark.parametrize("points", POINTS.values(), ids=POINTS)
def test_features_then_two_linear_layers(batch, points):
    """Outputs are replicated if the batch is smaller than the group, else split by sample."""
    check_function(
        lambda x, w, b, v: F.linear(F.leaky_relu(F.linear(x.flatten(1), w, b)), v),
        randn(batch, *SHAPE[1:]),
        [randn(4, 180, seed=1), randn(4, seed=2), randn(2, 4, seed=3)],
        points,
        second_order=True,
    )


@pytest.mark.parametrize("bias", [[], [randn(5, seed=2)]])
def test_linear_over_a_split_last_dim(bias):
    check_function(
        F.linear, randn(2, 3, 4), [randn(5, 4, seed=1), *bias], [[0, 1, 3], [0, 1, 4]],
        second_order=True,
    )  # fmt: skip


def test_linear_over_a_whole_last_dim_keeps_the_split():
    def body(mesh):
        layout = layout_at(mesh, (2, 6, 4), [[0, 2, 6], None])
        y = F.linear(shard(randn(2, 6, 4), layout), randn(5, 4, seed=1))
        assert y.layout.splits == layout.splits

    on_ranks((2, 1, 1), body)
    check_function(
        F.linear, randn(2, 6, 4), [randn(5, 4, seed=1), randn(5, seed=2)], [[0, 2, 6], None]
    )


@pytest.mark.parametrize("rows", [None, [0, 2, 3]], ids=["whole", "rows"])
def test_a_bias_beside_a_weight_that_is_split_along_the_summed_dim(rows):
    check_function(
        lambda w, x, b: F.linear(x, w, b), randn(5, 4), [randn(5, seed=1)],
        [rows and [0, 2, 5], [0, 1, 4]],
        beside=[Cut(randn(3, 4, seed=2), [rows, None])], second_order=True,
    )  # fmt: skip


@pytest.mark.parametrize("shape", [(), (1,), (1, 5)], ids=str)
def test_a_bias_that_broadcasts(shape):
    b = randn(5, seed=2)[: math.prod(shape)].view(shape)
    check_function(F.linear, randn(2, 6, 4), [randn(5, 4, seed=1), b], [[0, 2, 6], None])


def test_a_scalar_bias():
    check_function(
        lambda x, w, b: F.linear(x, w, b) * x, randn(4), [randn(4, seed=1), randn(1, seed=2)[0]],
        [[0, 1, 4]], second_order=True,
    )  # fmt: skip


@pytest.mark.parametrize("points", POINTS.values(), ids=POINTS)
def test_a_linear_layer_over_the_channels_of_a_permuted_tensor(points):
    x = randn(*SHAPE).to(memory_format=torch.channels_last_3d)
    check_function(
        lambda x, w, b: F.linear(x.permute(0, 2, 3, 4, 1), w, b).permute(0, 4, 1, 2, 3) * 2,
        x, [randn(2, 3, seed=1), randn(2, seed=2)], points, second_order=True,
    )  # fmt: skip


@pytest.mark.parametrize("points", POINTS.values(), ids=POINTS)
def test_a_linear_layer_behind_channels_last_features(points):
    check_function(
        lambda x, w: F.linear(torch.flatten(x * x, 1), w),
        randn(*SHAPE).to(memory_format=torch.channels_last_3d), [randn(4, 180, seed=1)], points,
        second_order=True,
    )  # fmt: skip


def test_autocast_rounds_a_sum_over_ranks_once():
    x, w = randn(2, 64).float(), randn(3, 64, seed=1).float()
    with torch.autocast("cpu", torch.bfloat16):
        whole = F.linear(x, w, w[:, 0])

    def body(mesh):
        with torch.autocast("cpu", torch.bfloat16):
            y = F.linear(shard(x, layout_at(mesh, (2, 64), [[0, 9, 30, 64]])), w, w[:, 0])
        assert y.dtype == whole.dtype
        assert (y.full_tensor() - whole).abs().max() <= whole.abs().max() * 2**-7

    on_ranks((3, 1, 1), body)


# -- refused --------------------------------------------------------------------------------

UNFIT = {
    "mm": lambda x: torch.mm(x, randn(1, 3)),
    "mm of a plain one": lambda x: torch.mm(randn(3, 1), x.T),
    "matmul": lambda x: x @ randn(1, 3),
    "mv": lambda x: torch.mv(x, randn(1)),
    "dot": lambda x: torch.dot(x[0], randn(1)),
    "linear": lambda x: F.linear(x, randn(3, 1)),
    "linear with a bias": lambda x: F.linear(x, randn(1, 2), randn(3)),
    "addmm": lambda x: torch.addmm(randn(3, 3), x[:1], randn(2, 3)),
    "addmm without the first": lambda x: torch.addmm(randn(3, 3), x[:1], randn(2, 3), beta=0),
    "addbmm": lambda x: torch.addbmm(randn(3, 5), x[None], randn(1, 1, 5)),
    "addbmm of batches": lambda x: torch.addbmm(randn(3, 5), x.T[:, :, None], randn(1, 1, 5)),
    "addbmm without the first": lambda x: torch.addbmm(randn(2, 5), x[None], x.T[None], beta=0),
    "bilinear": lambda x: F.bilinear(x, randn(3, 2), randn(4, 1, 2)),
    "bilinear of other rows": lambda x: F.bilinear(x, randn(1, 2), randn(4, 2, 2)),
    "bilinear with a bias": lambda x: F.bilinear(x, x, randn(1, 2, 2), randn(3)),
}


@pytest.mark.parametrize("call", UNFIT.values(), ids=UNFIT)
def test_shapes_that_do_not_fit_though_those_of_blocks_do(call):
    """The summed dim of extent 2 is cut into blocks of extent 1."""
    with pytest.raises(RuntimeError):
        call(randn(3, 2))

    def body(mesh):
        x = shard(randn(3, 2), layout_at(mesh, (3, 2), [None, [0, 1, 2]]))
        with pytest.raises(RuntimeError):
            call(x)

    on_ranks((1, 2, 1), body)


def test_a_sharded_weight_of_a_plain_input():
    def body(mesh):
        x = shard(randn(*SHAPE), layout_at(mesh, SHAPE, POINTS["2x1x1"]))
        with pytest.raises(NotSupported, match="the input is plain"):
            F.linear(randn(2, 3), x)

    on_ranks((2, 1, 1), body)
