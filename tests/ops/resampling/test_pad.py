"""Split padding and cropping equal the one-device run and move no more than the rims."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pydist.errors import NotSupported, UsageError
from pydist.exchange.exchanger import Exchanger
from support.equivalence import (
    check_function,
    error,
    layout_at,
    on_ranks,
    on_shards,
    randint,
    randn,
    shard,
)
from support.equivalence.strategies import cuts

MODES = ["constant", "reflect", "replicate", "circular"]


@st.composite
def pads(draw: st.DrawFn, mode: str, extents: list[int]) -> list[int]:
    """Draws valid pads of the last dims, in torch's order, that keep part of each dim."""
    most = {"constant": 9, "reflect": -1, "replicate": 9, "circular": 0}[mode]
    found: list[int] = []
    for extent in reversed(extents):
        high = most if most > 0 else extent + most
        before = draw(st.integers(-extent + 1, high))
        low = max(-extent + 1, 1 - extent - before)
        after = draw(st.integers(low, high))
        if mode == "circular" and min(before, after) < 0:
            # The rest may wrap once at most; torch checks this for the full extent only.
            left = extent + min(0, before) + min(0, after)
            before, after = min(before, left), min(after, left)
        found += [before, after]
    return found


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=12)
@given(data=st.data())
def test_any_pad(mode, dims, data):
    extents = data.draw(st.lists(st.integers(2, 9), min_size=dims, max_size=dims), "extents")
    amounts = data.draw(pads(mode, extents), "pads")
    x = randn(1, 2, *extents)
    if data.draw(st.booleans(), "channels last"):
        x = x.movedim(1, -1).contiguous().movedim(-1, 1)
    check_function(
        lambda x: F.pad(x * x, amounts, mode), x, (), data.draw(cuts(extents), "points"),
        second_order=data.draw(st.booleans(), "second order"),
    )  # fmt: skip


CALLS = {
    "batch and channels": lambda x: F.pad(x, (1, 0, 0, 2, 3, 1, -1, 2, 0, 1), value=1.5),
    "by keywords": lambda x: F.pad(input=x, pad=[1, 2], mode="constant", value=None),
    "constant_pad_nd": lambda x: torch.constant_pad_nd(x, (1, 1, 2, 2, -3, 3), 2.0),
    "ZeroPad3d": nn.ZeroPad3d((1, 2, 0, 1, 3, 0)),
    "ConstantPad3d": nn.ConstantPad3d(2, -1.0),
    "ReflectionPad3d": nn.ReflectionPad3d(1),
    "ReplicationPad3d": nn.ReplicationPad3d((9, 0, 1, 1, 0, 9)),
    "CircularPad3d": nn.CircularPad3d((1, 2, 4, 0, 5, 5)),
    "nothing": lambda x: F.pad(x, (0, 0, 0, 0, 0, 0), "reflect").relu_() + x,
    "to a skip's shape and back": lambda x: F.pad(F.pad(x, (0, 1, 1, 2, 2, 3)), [-1, 0] * 3) * 2,
}
POINTS = {
    "2x1x1": [[0, 3, 6], None, None],
    "4x1x2, some empty": [[0, 0, 1, 6, 6], None, [0, 1, 4]],
    "2x2x2": [[0, 2, 6], [0, 3, 5], [0, 0, 4]],
}


@pytest.mark.parametrize("points", POINTS.values(), ids=POINTS)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_by_name_to_second_order(call, points):
    check_function(lambda x: call(x * x), randn(2, 3, 6, 5, 4), (), points, second_order=True)


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_samples_without_a_batch_dim(mode, dims):
    x, amounts = randn(2, *(5, 4, 3)[:dims]), (2, 1) * dims
    points = [[0, 1, 2], *[None] * dims][-3:]
    check_function(lambda x: F.pad(x * x, amounts, mode), x, (), points)


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
def test_a_padded_convolution_in_second_order(mode):
    """The exchange before the padding also runs on ranks with empty shards."""
    check_function(
        lambda x, w: F.conv3d(F.pad(F.conv3d(x, w, padding=1), (1,) * 6, mode), w),
        randn(1, 2, 6, 4, 4), [randn(2, 2, 3, 3, 3, seed=1)], [[0, 0, 2, 6], None, [0, 4, 4]],
        second_order=True,
    )  # fmt: skip


def test_the_layer_after_a_padding_has_the_partition_from_before():
    def body(x, _):
        assert F.pad(x, (0, 0, 0, 0, 2, 1)).layout.splits[2].partition.points == (0, 5, 8)
        y = F.conv3d(F.pad(x, (1,) * 6, "reflect"), torch.ones(1, 3, 3, 3, 3).double())
        assert y.layout.splits == x.layout.splits

    on_shards(body, shape=(1, 3, 5, 4, 3), spatial=(2, 1, 1), keep_thin_blocks=True)


@pytest.mark.parametrize(("mode", "elements"), [("constant", 0), ("reflect", 0), ("circular", 2)])
def test_only_rims_that_lie_elsewhere_travel(mode, elements, monkeypatch):
    sent = []
    start = Exchanger.start

    def counting(self, local):
        sent.extend(message.elements for message in self.plan.sends)
        return start(self, local)

    monkeypatch.setattr(Exchanger, "start", counting)
    on_shards(lambda x, _: F.pad(x, (0, 0, 0, 0, 1, 1), mode), shape=(1, 1, 8, 1, 1))
    assert sum(sent) == elements


TYPES = {
    "constant": [torch.int64, torch.uint8, torch.bool, torch.bfloat16],
    "reflect": [torch.int64, torch.uint8, torch.bfloat16],  # torch has no other kernels
    "replicate": [torch.int64, torch.uint8, torch.bfloat16],
    "circular": [torch.int64, torch.uint8, torch.bool, torch.bfloat16],
}


@pytest.mark.parametrize(("mode", "dtype"), [(m, t) for m, types in TYPES.items() for t in types])
def test_other_types(mode, dtype):
    x = randint(2, 1, 2, 6, 5, 4).to(dtype)
    expected = F.pad(x, (2, 1, -1, 0, 3, 5), mode)

    def body(mesh):
        y = F.pad(shard(x, layout_at(mesh, x.shape, POINTS["2x2x2"])), (2, 1, -1, 0, 3, 5), mode)
        assert torch.equal(y.full_tensor(), expected)

    on_ranks((2, 2, 2), body)


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("mode", MODES)
def test_autocast_is_that_of_torch(mode, dims):
    x = randn(1, 2, *[6] * dims).bfloat16()

    def body(mesh):
        split = shard(x, layout_at(mesh, x.shape, [[0, 0, 6], *[None] * (dims - 1)]))
        with torch.autocast("cpu", torch.bfloat16):
            expected = F.pad(x, (1, 1) * dims, mode)
            y = F.pad(split, (1, 1) * dims, mode).full_tensor()
        assert y.dtype == expected.dtype
        assert torch.equal(y, expected)

    on_ranks((2, 1, 1), body)


def test_channels_last_stays_channels_last():
    x = randn(1, 2, 6, 4, 4).to(memory_format=torch.channels_last_3d)

    def body(mesh):
        split = shard(x, layout_at(mesh, x.shape, [[0, 3, 6], None, None]))
        for mode in ("constant", "reflect", "replicate"):
            y = F.pad(split, (1,) * 6, mode).to_local()
            assert y.is_contiguous(memory_format=torch.channels_last_3d)

    on_ranks((2, 1, 1), body)


@pytest.mark.parametrize(
    ("amounts", "mode", "error"),
    [
        ((1, 1, 6, 0), "reflect", RuntimeError),
        ((0, 0, 0, 0, 7, 0), "circular", RuntimeError),
        ((0, 0, -6, -1), "constant", RuntimeError),
        ((1,), "constant", RuntimeError),
        ((1, 1), "mirror", NotImplementedError),
        ((1, 1), "reflect", NotImplementedError),
    ],
)
def test_what_torch_refuses_is_refused_with_its_words(amounts, mode, error):
    x = randn(1, 2, 6, 5, 4)
    with pytest.raises(error) as whole:
        F.pad(x, amounts, mode)
    message = str(whole.value).split("\n")[0]

    def body(mesh):
        split = shard(x, layout_at(mesh, x.shape, [[0, 3, 6], None, None]))
        with pytest.raises(error) as found:
            F.pad(split, amounts, mode)
        assert not isinstance(found.value, NotSupported)
        assert str(found.value).split("\n")[0] == message

    on_ranks((2, 1, 1), body)


@pytest.mark.parametrize(
    "amounts", [(0, 0, 0, 0, -4, 3), (0, 0, -4, 2, 0, 0)], ids=["split", "whole"]
)
def test_more_than_a_round_after_a_crop_is_refused(amounts):
    """torch checks the extent before the crop, and reads uninitialized memory."""

    def body(mesh):
        split = shard(
            randn(1, 2, 6, 5, 4), layout_at(mesh, (1, 2, 6, 5, 4), [[0, 3, 6], None, None])
        )
        with pytest.raises(UsageError, match="round more than once"):
            F.pad(split, amounts, "circular")

    on_ranks((2, 1, 1), body)


HELD_ALIKE = {
    "circular": lambda x: F.pad(x, (1, 1, 1, 0, 2, 1), "circular"),
    "reflect": lambda x: F.pad(x, (1, 1, 1, 0, 4, 1), "reflect"),
    "constant": lambda x: F.pad(x, (1, 1, -1, 0, 4, 1)),
    "rolled": lambda x: torch.roll(x, (2, 1), (2, 3)),
    "resized": lambda x: F.interpolate(x, size=(9, 3, 5), mode="trilinear"),
}


@pytest.mark.parametrize("call", HELD_ALIKE.values(), ids=HELD_ALIKE)
def test_of_tensors_that_ranks_hold_alike(call):
    """Two ranks hold each half: both get the true gradients."""
    x = randn(1, 2, 6, 4, 4)

    def gradients(leaf):
        y = call(leaf * leaf)
        (grad,) = torch.autograd.grad((y * y).sum(), leaf, create_graph=True)
        return grad, torch.autograd.grad((grad * grad).sum(), leaf)[0]

    def body(mesh):
        found = gradients(shard(x, layout_at(mesh, x.shape, [[0, 1, 6], None, None])))
        return [g.full_tensor().detach() for g in found]

    expected = gradients(x.clone().requires_grad_())
    for found in on_ranks((2, 2, 1), body):
        for mine, whole in zip(found, expected, strict=True):
            assert error(mine, whole.detach()) < 1e-12
