"""Split layer, RMS and local response norms equal the one-device run."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pydist.errors import NotSupported, UsageError
from support.equivalence import check_function, error, layout_at, on_ranks, randn, shard, spatial_of
from support.equivalence.strategies import cuts

EMPTY = [[0, 2, 5], [0, 1, 4], [0, 0, 3]]
SHAPE = (2, 4, 5, 4, 3)


class Case(NamedTuple):
    x: Tensor
    points: list[list[int]]
    normalized: tuple[int, ...]
    affine: list[Tensor]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draws norms over the last one to all dims; up to three dims are split over 2 to 8 ranks."""
    extents = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3))
    shape = (draw(st.integers(1, 3)), draw(st.integers(1, 3)), *extents)
    normalized = shape[draw(st.integers(0, len(shape) - 1)) :]
    assume(math.prod(normalized) > 1)  # a norm of one value is pure rounding
    affine = [randn(*normalized, seed=seed) for seed in range(1, 1 + draw(st.integers(0, 2)))]
    return Case(randn(*shape) + 3, draw(cuts(extents)), normalized, affine)


@given(case=cases())
@settings(max_examples=15)
def test_layer_norm_to_second_order(case):
    check_function(
        lambda x, *affine: F.layer_norm(x, case.normalized, *affine, eps=0.01),
        case.x, case.affine, case.points, second_order=True,
    )  # fmt: skip


@given(case=cases())
@settings(max_examples=15)
def test_rms_norm_to_second_order(case):
    check_function(
        lambda x, *affine: F.rms_norm(x, case.normalized, *affine[:1]),
        case.x, case.affine[:1], case.points, second_order=True,
    )  # fmt: skip


CALLS = {
    "shift alone": lambda x, w, b: F.layer_norm(x, w.shape, None, b),
    "torch.layer_norm": lambda x, w, b: torch.layer_norm(x, w.shape, w, b, 0.1),
    "torch.rms_norm": lambda x, w, b: torch.rms_norm(x, w.shape, w, 0.1) + b,
}


@pytest.mark.parametrize("points", [EMPTY, [[0, 3, 5], None, None], [None] * 3])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_every_name(call, points):
    check_function(call, randn(*SHAPE), [randn(5, 4, 3, seed=1), randn(5, 4, 3, seed=2)], points)


@pytest.mark.parametrize("norm", [F.layer_norm, F.rms_norm])
@pytest.mark.parametrize("points", [EMPTY, [[0, 3, 5], None, None]])
def test_over_channels_behind_a_permutation(norm, points):
    """As in ConvNeXt, no exchange is needed."""
    check_function(
        lambda x, w: norm(x.permute(0, 2, 3, 4, 1), (4,), w).permute(0, 4, 1, 2, 3),
        randn(*SHAPE), [randn(4, seed=1)], points, second_order=True,
    )  # fmt: skip


def test_modules_over_split_dims():
    norms = [nn.LayerNorm([5, 4, 3]), nn.RMSNorm([5, 4, 3])]
    for norm in norms:
        with torch.no_grad():
            for seed, p in enumerate(norm.double().parameters()):
                p.copy_(randn(5, 4, 3, seed=seed))
    x = randn(*SHAPE)

    def body(mesh):
        split = shard(x, layout_at(mesh, SHAPE, EMPTY))
        return [norm(split).full_tensor().detach() for norm in norms]

    for found in on_ranks(spatial_of(EMPTY), body):
        for y, norm in zip(found, norms, strict=True):
            assert error(y, norm(x).detach()) < 1e-12


def test_checkpointed_with_empty_shards():
    def norm(x, w):
        return F.layer_norm(x * x, w.shape, w)

    check_function(
        lambda x, w: checkpoint(norm, x, w, use_reentrant=False),
        randn(*SHAPE), [randn(4, 3, seed=1)], EMPTY,
    )  # fmt: skip


def test_float32_far_from_zero_is_as_exact_as_on_one_device():
    x = (randn(2, 4, 24, 16, 16) + 1e4).float()
    exact = F.layer_norm(x.double(), x.shape[2:])
    allowed = 4 * (F.layer_norm(x, x.shape[2:]).double() - exact).abs().max()
    points = [[0, 2, 15, 24], None, [0, 3, 16]]

    def body(mesh):
        return F.layer_norm(shard(x, layout_at(mesh, x.shape, points)), x.shape[2:]).full_tensor()

    for y in on_ranks(spatial_of(points), body):
        assert (y.detach().double() - exact).abs().max() <= allowed


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("affine", [False, True])
def test_narrow_values_have_statistics_in_float32(affine, dtype, autocast):
    """This also holds under autocast on CPU, where torch leaves these calls alone."""
    x, over = (randn(*SHAPE) + 8).to(dtype), SHAPE[2:]
    weight = randn(*over, seed=1).to(dtype) if affine else None
    norms = (F.layer_norm, F.rms_norm)
    wide = None if weight is None else weight.double()
    # Without a given eps, RMS norm uses that of the compute dtype.
    exact = [norms[0](x.double(), over, wide), norms[1](x.double(), over, wide, 2.0**-23)]

    def body(mesh):
        split = shard(x, layout_at(mesh, SHAPE, [[0, 2, 5], None, None]))
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return [norm(split, over, weight).full_tensor().detach() for norm in norms]

    eps = torch.finfo(dtype).eps
    for found in on_ranks((2, 1, 1), body):
        for y, expected in zip(found, exact, strict=True):
            assert y.dtype == dtype
            torch.testing.assert_close(y.double(), expected, rtol=eps, atol=eps)


@pytest.mark.parametrize("shape", [(2, 5, 6), (2, 5, 6, 4), (2, 5, 6, 4, 3)])
@pytest.mark.parametrize("size", [2, 3])
def test_local_response_norm(shape, size):
    points = [[0, 0, 2, 6], *([None] * (len(shape) - 3))]
    check_function(
        lambda x: F.local_response_norm(x, size, alpha=0.5, k=2.0),
        randn(*shape), points=points, second_order=True,
    )  # fmt: skip


def test_local_response_norm_of_channels_last():
    x = randn(2, 5, 6, 4, 3)

    def body(mesh):
        split = shard(x, layout_at(mesh, x.shape, [[0, 3, 6], None, None]))
        split = split.contiguous(memory_format=torch.channels_last_3d)
        return nn.LocalResponseNorm(3)(split).full_tensor().detach()

    for y in on_ranks((2, 1, 1), body):
        assert error(y, F.local_response_norm(x, 3)) < 1e-12


@pytest.mark.parametrize("dim", [1, 3, (1, 3), (2, 3, 4)])
def test_vectors_of_unit_length(dim):
    check_function(lambda x: F.normalize(x, dim=dim), randn(*SHAPE), points=EMPTY)


def test_what_does_not_fit_is_named():
    def body(mesh):
        x = shard(randn(*SHAPE), layout_at(mesh, SHAPE, [[0, 2, 5], None, None]))
        with pytest.raises(UsageError, match=r"layer_norm over \(4, 2\) does not fit .*\(2, 4, 5"):
            F.layer_norm(x, (4, 2))
        with pytest.raises(UsageError, match=r"rms_norm over \(4, 3\) got parameters .* \(3,\)"):
            F.rms_norm(x, (4, 3), torch.ones(3).double())
        with pytest.raises(NotSupported, match="the input is plain"):
            F.layer_norm(randn(5), (5,), x[0, 0, :, 0, 0])

    on_ranks((2, 1, 1), body)


def test_local_response_norm_gathers_split_channels():
    points = [[0, 1, 4], [0, 5], [0, 3]]
    check_function(lambda x: F.local_response_norm(x, 3), randn(2, 4, 5, 3), (), points)


def test_of_a_channels_last_shard_one_voxel_thick():
    x = randn(2, 3, 4, 4, 4).to(memory_format=torch.channels_last_3d)
    points = [[0, 1, 4], None, None]
    check_function(lambda x: F.elu(F.layer_norm(x, x.shape[1:]), inplace=True), x, points=points)
