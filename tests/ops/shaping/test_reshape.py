"""Merging and dividing dims: splits stay in place if possible, and gradients follow."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from pydist.errors import NotSupported
from support.equivalence import check_function, layout_at, on_ranks, randint, randn, shard
from support.equivalence.splits import SHAPE
from support.equivalence.splits import THREE_SPLITS as POINTS
from support.equivalence.strategies import cuts


def pixel_shuffle(x):
    """Shuffles pixels as MONAI's SubpixelUpsample does."""
    n, c, *extents = x.shape
    x = x.reshape(n, c // 8, 2, 2, 2, *extents).permute(0, 1, 5, 2, 6, 3, 7, 4)
    return x.reshape(n, c // 8, *(2 * e for e in extents))


def pixel_unshuffle(x):
    n, c, d, h, w = x.shape
    x = x.view(n, c, d // 2, 2, h // 2, 2, w // 2, 2).permute(0, 1, 3, 5, 7, 2, 4, 6)
    return x.reshape(n, 8 * c, d // 2, h // 2, w // 2)


CALLS = {
    "flatten": lambda x: x.flatten(1),
    "torch.flatten of all": torch.flatten,
    "flatten spatial": lambda x: torch.flatten(x, 2),
    "flatten by keyword": lambda x: x.flatten(start_dim=2, end_dim=-1),
    "ravel": lambda x: x.ravel(),
    "reshape(-1)": lambda x: x.reshape(-1),
    "reshape to rows": lambda x: x.reshape(2, -1),
    "view keeps the split dims": lambda x: x.view(6, 5, 4, 3),
    "view divides a whole dim": lambda x: x.view(2, 3, 1, 5, 4, 3),
    "view of a list": lambda x: x.view([2, 3, 20, 3]),
    "view(size)": lambda x: x.view(size=(2, 15, 4, 3)),
    "torch.reshape with a tuple": lambda x: torch.reshape(x, (2, 3, 5, 12)),
    "there and back": lambda x: x.flatten(1).view(SHAPE) * x,
    "tokens and back": lambda x: x.flatten(2).transpose(1, 2).mT.unflatten(2, (5, 4, 3)) * x,
    "channels-last rows": lambda x: x.permute(0, 2, 3, 4, 1).reshape(-1, 3) * 2,
    "view_as": lambda x: x.flatten(2).view_as(x) * randn(*SHAPE).reshape_as(x),
    "unflatten": lambda x: x.unflatten(-2, (2, -1)) * 2,
    "squeeze all": lambda x: x.unsqueeze(0).unsqueeze(3).squeeze(),
    "squeeze one": lambda x: torch.squeeze(x.unsqueeze(1), 1),
    "squeeze a split dim": lambda x: x[:, :, 4:].squeeze(2) * x[..., :1].squeeze(axis=-1).sum(),
}  # fmt: skip


@pytest.mark.parametrize("points", POINTS.values(), ids=POINTS)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_to_second_order(call, points):
    check_function(lambda x: call(x * x), randn(*SHAPE), (), points, second_order=True)


@given(data=st.data())
@settings(max_examples=40)
def test_any_reshape(data):
    """The call divides and merges factors of the extents in any way."""
    factors = st.lists(st.sampled_from([2, 2, 3]), max_size=2)
    drawn = data.draw(st.lists(factors, min_size=3, max_size=5))
    old = [math.prod(each) for each in drawn]
    rest, new = sorted(itertools.chain(*drawn)), []
    while rest:
        count = data.draw(st.integers(1, len(rest)))
        new.append(math.prod(rest[:count]))
        rest = rest[count:]
    new = data.draw(st.permutations([*new[:6], math.prod(new[6:])]))
    where = data.draw(cuts(old[-3:]))
    check_function(lambda x: x.reshape(new) * 2, randn(*old), (), where)


@pytest.mark.parametrize("call", [pixel_shuffle, pixel_unshuffle])
@given(data=st.data())
@settings(max_examples=8)
def test_three_dimensional_pixel_shuffle(call, data):
    extents = [2 * n for n in data.draw(st.tuples(*[st.integers(1, 3)] * 3))]
    x = randn(1, 16, *extents)
    check_function(call, x, (), data.draw(cuts(extents)), second_order=True)


def _layout(call, shape, where, spatial):
    def body(mesh):
        x = shard(randn(*shape), layout_at(mesh, shape, where))
        messages = len(mesh.session.plans)
        y = call(x)
        moved = [key for key in list(mesh.session.plans)[messages:] if key[0] == "redistribute"]
        return {d: (s.axes, s.partition.points) for d, s in enumerate(y.layout.splits) if s}, moved

    return on_ranks(spatial, body)[0]


def test_tokens_of_a_tensor_split_in_depth_stay_where_they_are():
    splits, moved = _layout(lambda x: x.flatten(2), SHAPE, [[0, 2, 5], None, None], (2, 1, 1))
    assert splits == {2: (("depth",), (0, 24, 60))}
    assert not moved


def test_tokens_of_a_tensor_split_in_two_dims_move_within_a_row_of_ranks():
    splits, _ = _layout(lambda x: x.flatten(2), SHAPE, [[0, 2, 5], [0, 1, 4], None], (2, 2, 1))
    assert splits == {2: (("depth", "height"), (0, 12, 24, 48, 60))}


def test_pixel_shuffle_moves_nothing():
    shape, where = (1, 8, 5, 4, 3), [[0, 2, 5], [0, 1, 4], None]
    splits, moved = _layout(pixel_shuffle, shape, where, (2, 2, 1))
    assert splits == {2: (("depth",), (0, 4, 10)), 3: (("height",), (0, 2, 8))}
    assert not moved


def test_dividing_a_split_dim_moves_its_points_to_a_multiple():
    splits, _ = _layout(lambda x: x.view(2, 3, 2), (2, 6), [[0, 3, 6]], (2, 1, 1))
    assert splits == {1: (("depth",), (0, 2, 3))}


def test_features_are_gathered():
    where = [[0, 2, 5], [0, 1, 4], None]
    assert _layout(lambda x: x.flatten(1), SHAPE, where, (2, 2, 1))[0] == {}
    samples = (4, *SHAPE[1:])
    splits, _ = _layout(lambda x: x.flatten(1), samples, where, (2, 2, 1))
    assert splits == {0: (("depth", "height"), (0, 1, 2, 3, 4))}


# -- views ----------------------------------------------------------------------------------


def test_a_view_shares_its_memory_or_says_that_it_does_not():
    def body(mesh):
        x = shard(randn(*SHAPE), layout_at(mesh, SHAPE, [[0, 2, 5], [0, 1, 4], None])).detach()
        x.view(2, 15, 4, 3)  # moved
        x.transpose(0, 1).unsqueeze(0)[0, 1].mul_(0)
        expected = randn(*SHAPE)
        expected[:, 1] = 0
        assert torch.equal(x.full_tensor(), expected)
        for cut in (
            lambda t: t.view(2, 3, -1),
            lambda t: t[:, :, 1],
            lambda t: t.flatten(2)[:, :1],
            lambda t: t.unbind(2)[0],
        ):
            base = x.clone()
            view = cut(base)
            view.clone().zero_()
            assert torch.equal(base.full_tensor(), expected)
            view.zero_()
            assert not view.full_tensor().any()
            with pytest.raises(NotSupported, match="in torch one may be a view of the other"):
                base.full_tensor()

    on_ranks((2, 2, 1), body)


def test_in_place_on_a_copied_view_of_nothing_in_use_is_right():
    check_function(
        lambda x: F.relu((x * 2).view(2, 3, -1), inplace=True), randn(*SHAPE), (),
        [[0, 2, 5], [0, 1, 4], None],
    )  # fmt: skip


def _then_in_place(copy, use_both):
    def call(x):
        y = torch.relu(x * 1)
        copied = copy(y.transpose(1, 2))
        copied.mul_(3)
        return copied.sum() + (y * y if use_both else 0)

    return call


@pytest.mark.parametrize("points", [[0, 1, 4], [0, 0, 4], [0, 4, 4]], ids=str)
@pytest.mark.parametrize(
    "copy", [lambda t: t.flatten(1, 2), lambda t: t.contiguous()], ids=["merged", "contiguous"]
)
def test_what_torch_copies_is_a_copy_on_ranks_with_nothing_to_move_too(copy, points):
    """With at most one plane the shard already has the new order: in place would change y.

    Backward of relu reads y. All ranks refuse to use both: shards don't show which is a view.
    """
    x, where = randn(1, 2, 4, 3, 2), [points, None, None]
    check_function(_then_in_place(copy, use_both=False), x, (), where)
    cloned = _then_in_place(lambda t: copy(t).clone(), use_both=True)
    check_function(cloned, x, (), where)

    def body(mesh):
        own = shard(x, layout_at(mesh, x.shape, where))
        with pytest.raises(NotSupported, match="in torch one may be a view of the other"):
            _then_in_place(copy, use_both=True)(own)

    on_ranks((2, 1, 1), body)


def test_a_view_with_elements_of_another_size_is_refused():
    def body(mesh):
        x = shard(randn(*SHAPE), layout_at(mesh, SHAPE, POINTS["2x1x1"]))
        with pytest.raises(NotSupported, match="another size"):
            x.view(torch.int32)

    on_ranks((2, 1, 1), body)


FLATTENED = {
    "view": lambda x: x.view(x.size(0), -1),
    "reshape": lambda x: x.reshape(x.size(0), 4, -1),
    "flatten": lambda x: x.flatten(1),
    "samples": lambda x: x.view(-1, 4),
}


@pytest.mark.parametrize("call", FLATTENED.values(), ids=FLATTENED)
def test_inferred_dims_in_a_group_without_samples(call):
    """torch does not infer these dims only because its batch is not empty."""

    def body(mesh):
        samples = torch.zeros(2, 4, 1, 1, 1), torch.zeros(0, 4, 1, 1, 1)
        full, empty = (call(shard(x, layout_at(mesh, x.shape, [None] * 3))) for x in samples)
        assert empty.shape == (0, *full.shape[1:])

    on_ranks((2, 1, 1), body)


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
    """Features have this layout if every rank holds some samples."""
    check_function(call, randn(4, 2, 8), [randn(3, 2, 3, seed=1)], points, second_order=True)
