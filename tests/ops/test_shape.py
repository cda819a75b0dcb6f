"""Reshaping, joining and indexing: what is cut stays cut or is gathered, and gradients follow."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from equivalence import Cut, check_function, layout_at, on_ranks, randint, randn, shard
from hypothesis import given
from hypothesis import strategies as st

from pydist.errors import NotSupported, UsageError

SHAPE = (2, 3, 5, 4, 3)
POINTS = {
    "2x1x1": [[0, 2, 5], None, None],
    "2x2x2, half of them empty": [[0, 2, 5], [0, 1, 4], [0, 0, 3]],
    "1x3x2": [None, [0, 1, 3, 4], [0, 2, 3]],
}
CALLS = {
    "flatten": lambda x: x.flatten(1),
    "torch.flatten of all": torch.flatten,
    "flatten spatial": lambda x: torch.flatten(x, 2),
    "flatten by keyword": lambda x: x.flatten(start_dim=2, end_dim=-1),
    "reshape(-1)": lambda x: x.reshape(-1),
    "reshape to rows": lambda x: x.reshape(2, -1),
    "view keeps the split dims": lambda x: x.view(6, 5, 4, 3),
    "view divides a whole dim": lambda x: x.view(2, 3, 1, 5, 4, 3),
    "view of a list": lambda x: x.view([2, 3, 20, 3]),
    "torch.reshape with a tuple": lambda x: torch.reshape(x, (2, 3, 5, 12)),
    "there and back": lambda x: x.flatten(1).view(SHAPE) * x,
    "unsqueeze": lambda x: x.unsqueeze(2).unsqueeze(-1),
    "squeeze all": lambda x: x.unsqueeze(0).unsqueeze(3).squeeze(),
    "squeeze one": lambda x: torch.squeeze(x.unsqueeze(1), 1),
    "permute": lambda x: x.permute(4, 0, 2, 1, 3) * 2,
    "permute of a tuple": lambda x: torch.permute(x, (0, 2, 3, 4, 1)),
    "transpose": lambda x: x.transpose(1, 2),
    "transpose, negative": lambda x: torch.transpose(x, -1, 0),
    "permuted, then met by its like": lambda x: x.transpose(2, 3).transpose(2, 3) * x,
    "cat of channels": lambda x: torch.cat([x, x * 2], 1),
    "cat of a batch, negative dim": lambda x: torch.cat((x, x), dim=-5),
    "stack": lambda x: torch.stack([x, x.square()], 1),
    "getitem int": lambda x: x[1],
    "getitem channel": lambda x: x[:, 1],
    "getitem slice": lambda x: x[:, 1:3] * 2,
    "getitem ellipsis": lambda x: x[..., :, :],
    "getitem negative": lambda x: x[:, -1:],
    "getitem None": lambda x: x[:, None] * x[:, :, None, ...].sum(),
    "getitem step": lambda x: x[:, ::2],
    "numel, size, len": lambda x: x * x.size(0) + x.numel() + len(x) + x.shape[2] + x.dim(),
}


@pytest.mark.parametrize("points", POINTS.values(), ids=POINTS)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_to_second_order(call, points):
    check_function(lambda x: call(x * x), randn(*SHAPE), (), points, second_order=True)


@given(data=st.data())
def test_any_reshape(data):
    """Factors of an extent are divided and merged in any way."""
    old = data.draw(
        st.permutations([2, 2, 3, 2, 2]).map(lambda f: (f[0] * f[1], f[2], f[3] * f[4]))
    )
    new = data.draw(
        st.sampled_from([(48,), (4, 12), (12, 4), (2, 2, 12), (4, 3, 2, 2), (3, 16), (1, 48, 1)])
    )
    points = [
        [0, data.draw(st.integers(0, old[1])), old[1]],
        [0, data.draw(st.integers(0, old[2])), old[2]],
    ]  # fmt: skip
    check_function(lambda x: x.reshape(new) * 2, randn(*old), (), points)


@pytest.mark.parametrize("points", POINTS.values(), ids=POINTS)
def test_joined_with_a_plain_tensor_and_one_of_another_layout(points):
    check_function(
        lambda x, y, p: torch.cat([p, x * x, y], 1),
        randn(*SHAPE),
        [randn(2, 2, 5, 4, 3, seed=1)],
        points,
        beside=[Cut(randn(2, 1, 5, 4, 3, seed=2), [_moved(p) for p in points])],
        second_order=True,
    )


def _moved(points):
    """Other points of the same extent."""
    return points and [0, *(min(p + 1, points[-1]) for p in points[1:-1]), points[-1]]


def test_slices_of_gathered_features():
    """Flattened and gathered, a tensor is whole: it may be cut as one likes."""
    check_function(
        lambda x: x.flatten(1)[:, 3:7] * x.flatten(1)[1, 2], randn(1 + 1, 3, 5, 4, 3), (),
        [[0, 2, 5], [0, 1, 4], None], second_order=True,
    )  # fmt: skip


# -- linear layers --------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 3, 4, 5])
@pytest.mark.parametrize("points", POINTS.values(), ids=POINTS)
def test_features_then_two_linear_layers(batch, points):
    """Replicated where the batch is smaller than the group, else its samples are shared out."""
    check_function(
        lambda x, w, b, v: F.linear(F.leaky_relu(F.linear(x.flatten(1), w, b)), v),
        randn(batch, *SHAPE[1:]),
        [randn(4, 180, seed=1), randn(4, seed=2), randn(2, 4, seed=3)],
        points,
        second_order=True,
    )


def test_linear_over_a_split_last_dim():
    check_function(
        F.linear, randn(2, 3, 4), [randn(5, 4, seed=1)], [[0, 1, 3], [0, 1, 4]], second_order=True
    )


def test_linear_over_a_whole_last_dim_keeps_the_split():
    def body(mesh):
        layout = layout_at(mesh, (2, 6, 4), [[0, 2, 6], None])
        y = F.linear(shard(randn(2, 6, 4), layout), randn(5, 4, seed=1))
        assert y.layout.splits == layout.splits

    on_ranks((2, 1, 1), body)
    check_function(F.linear, randn(2, 6, 4), [randn(5, 4, seed=1)], [[0, 2, 6], None])


# -- softmax --------------------------------------------------------------------------------

SOFTMAX = {
    "F.softmax": lambda x: F.softmax(x, 1),
    "by keyword": lambda x: F.softmax(x, dim=1),
    "method": lambda x: x.softmax(dim=1),
    "torch.softmax": lambda x: torch.softmax(x, -4),
    "log_softmax": lambda x: F.log_softmax(x, dim=1),
    "of a dtype": lambda x: torch.log_softmax(x.float().double(), 1, dtype=torch.float64),
}


@pytest.mark.parametrize("points", POINTS.values(), ids=POINTS)
@pytest.mark.parametrize("softmax", SOFTMAX.values(), ids=SOFTMAX)
def test_softmax_over_channels(softmax, points):
    check_function(softmax, randn(*SHAPE), (), points, second_order=True)


REFUSED = {
    "slice of a split dim": (lambda x: x[:, :, 1:3], "dim 2 is split"),
    "element of a split dim": (lambda x: x[0, 0, 1], "dim 2 is split"),
    "an index tensor": (lambda x: x[randint(2, 3)], "an index Tensor"),
    "a mask": (lambda x: x[x > 0], "an index"),
    "cat over a split dim": (lambda x: torch.cat([x, x], 2), "dim 2 is split"),
    "softmax over a split dim": (lambda x: x.softmax(2), "dim 2 is split"),
    "softmax without dim": (F.softmax, "give the dim"),
    "view of a dtype": (lambda x: x.view(torch.int64), "another dtype"),
    "linear of a plain input": (lambda x: F.linear(randn(2, 3), x), "the input is plain"),
    "assignment": (lambda x: x.__setitem__(0, 1.0), "__setitem__"),
    "flip": (lambda x: x.flip(2), "flip"),
}


@pytest.mark.parametrize(("call", "message"), REFUSED.values(), ids=REFUSED)
def test_refusals(call, message):
    def body(mesh):
        x = shard(randn(*SHAPE), layout_at(mesh, SHAPE, POINTS["2x1x1"]))
        with pytest.raises(NotSupported, match=message):
            call(x)

    on_ranks((2, 1, 1), body)


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (lambda x: x.view(7, 7), RuntimeError),
        (lambda x: x[5], IndexError),
        (lambda x: x.unsqueeze(9), IndexError),
        (lambda x: x.flatten(9), IndexError),
        (lambda x: x.transpose(0, 7), IndexError),
        (lambda x: x.permute(0, 1), RuntimeError),
        (lambda x: x.permute(0, 1, 1, 2, 3), RuntimeError),
        (lambda x: x[0, 0, :, :, :, 0], IndexError),
        (lambda x: torch.cat([x, x[:, :, :, :1]], 1), (RuntimeError, UsageError)),
        (lambda x: x.sum(9), IndexError),
        (lambda x: x.softmax(9), IndexError),
    ],
)
def test_what_is_wrong_in_torch_is_wrong_here(call, kind):
    """With torch's kind of error, not with a wrong result."""
    with pytest.raises(kind):
        call(randn(*SHAPE))

    def body(mesh):
        x = shard(randn(*SHAPE), layout_at(mesh, SHAPE, [None, None, [0, 1, 3]]))
        with pytest.raises(kind):
            call(x)

    on_ranks((1, 1, 2), body)


# -- a split batch --------------------------------------------------------------------------

OVER_THE_BATCH = {
    "conv": lambda x, w: F.conv1d(x, w, padding=1),
    "strided conv": lambda x, w: F.conv1d(x, w, stride=2),
    "average": lambda x, w: F.avg_pool1d(x, 3, 2, 1) * w.sum(),
    "maximum": lambda x, w: F.max_pool1d(x, 2) * w.sum(),
    "norm": lambda x, w: F.batch_norm(x, None, None, w[:2, 0, 0], training=True),
    "softmax": lambda x, w: F.softmax(x * w.sum(), 1),
    "loss": lambda x, w: F.cross_entropy(x * w.sum(), randint(2, 4, 8)),
    "reductions": lambda x, w: x.mean((0, 2)) * x.amax(0).sum(-1) * w.sum(),
    "flatten": lambda x, w: x.flatten(1) * w.sum(),
    "merged with the channels": lambda x, w: x.flatten(0, 1) * w.sum(),
}


@pytest.mark.parametrize(
    "points",
    [[[0, 1, 4], None, None], [[0, 3, 4, 4], None, [0, 3, 8]], [[0, 0, 4], None, [0, 1, 8]]],
)
@pytest.mark.parametrize("call", OVER_THE_BATCH.values(), ids=OVER_THE_BATCH)
def test_of_a_split_batch(call, points):
    """As features are laid out when every rank takes some samples."""
    check_function(call, randn(4, 2, 8), [randn(3, 2, 3, seed=1)], points, second_order=True)


@pytest.mark.parametrize("points", POINTS.values(), ids=POINTS)
def test_a_linear_layer_behind_channels_last_features(points):
    check_function(
        lambda x, w: F.linear(torch.flatten(x * x, 1), w),
        randn(*SHAPE).to(memory_format=torch.channels_last_3d), [randn(4, 180, seed=1)], points,
        second_order=True,
    )  # fmt: skip
