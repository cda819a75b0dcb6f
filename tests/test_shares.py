"""Tests of unequal parts: division of an extent by shares, and meshes with shares."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import pydist
from pydist import Mesh, run_local
from pydist.errors import UsageError
from pydist.partition import divide
from support.equivalence import FP64_BOUND, error


@pytest.mark.parametrize(
    ("extent", "shares", "sizes"),
    [
        (60, (34, 33, 33), (20, 20, 20)),
        (64, (50, 50, 1), (32, 31, 1)),
        (120, (98, 1, 1), (118, 1, 1)),
        (60, (70, 25, 5), (42, 15, 3)),
        (7, (1, 1), (4, 3)),
        (3, (100, 1, 1), (1, 1, 1)),
    ],
)
def test_known_divisions(extent, shares, sizes):
    assert divide(extent, shares).sizes == sizes


@given(st.integers(0, 500), st.lists(st.floats(0.01, 100), min_size=1, max_size=8), st.data())
def test_parts_are_within_one_of_their_quota(extent, shares, data):
    multiple = data.draw(st.integers(1, 8))
    least = data.draw(st.integers(0, extent // multiple // len(shares)))
    sizes = divide(extent, shares, least, multiple).sizes
    rest = extent % multiple
    assert sum(sizes) == extent
    assert min(sizes) >= least * multiple
    assert sum(n % multiple != 0 for n in sizes) <= (rest > 0)
    units = [n // multiple for n in sizes]
    quotas = [extent // multiple * share / sum(shares) for share in shares]
    if min(quotas) >= least:  # the smallest part is not forced
        assert all(abs(n - q) < 1 + 1e-9 for n, q in zip(units, quotas, strict=True))


@pytest.mark.parametrize("shares", [(), (1, 0), (1, -1), (1, float("inf")), (1, float("nan"))])
def test_shares_that_are_not_positive_are_refused(shares):
    with pytest.raises(UsageError, match="expected positive numbers, one per part"):
        divide(8, shares)


def test_an_extent_that_is_too_small_is_refused():
    with pytest.raises(UsageError, match="can't be divided into 3 parts of at least 4"):
        divide(11, (1, 1, 1), least=2, multiple=2)


@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ((2, 1), r"shares=\(2, 1\): expected parts by axis"),
        ({"time": (1, 1)}, "shares of 'time': expected one of data, channel, depth"),
        ({"data": (1, 1)}, "shares of data .*: expected 1 positive numbers"),
        ({"depth": (1, 1, 1)}, "shares of depth .*: expected 2 positive numbers"),
        ({"depth": (1, 0)}, "shares of depth .*: expected 2 positive numbers"),
        ({"depth": "ab"}, "shares of depth 'ab': expected 2 positive numbers"),
        ({"depth": {1: 1, 2: 1}}, "shares of depth .*: expected 2 positive numbers"),
        ({"depth": (10**400, 1)}, "shares of depth .*: expected 2 positive numbers"),
        ({"depth": 3}, "shares of depth 3: expected 2 positive numbers"),
        ({"depth": (1, float("nan"))}, "shares of depth .*: expected 2 positive numbers"),
    ],
)
def test_shares_of_a_mesh_that_do_not_fit_are_named(shares, message):
    def split(world: pydist.comm.Transport) -> None:
        with pytest.raises(UsageError, match=message):
            Mesh(world, 1, (2, 1, 1), shares=shares)

    run_local(split, 2)


@pytest.mark.parametrize("axis", ["depth", "channel"])
def test_ranks_with_different_shares_are_named(axis):
    def split(world: pydist.comm.Transport) -> None:
        shares = {axis: (3, 1) if world.rank else (1, 3)}
        with pytest.raises(UsageError, match=r"the mesh differs between the ranks.*on rank 1"):
            Mesh(world, 1, (2, 1, 1), axes={"channel": 2}, shares=shares)

    run_local(split, 4)


def test_large_shares_have_a_finite_sum():
    assert divide(8, (1e308, 1e308)).sizes == (4, 4)


def test_training_with_unequal_parts_is_that_of_one_device():
    torch.manual_seed(0)
    whole = nn.Sequential(
        nn.Conv3d(2, 7, 3, padding=1, bias=False), nn.BatchNorm3d(7), nn.ReLU(True),
        nn.MaxPool3d(2), nn.Conv3d(7, 5, 3, padding=1), nn.PReLU(5), nn.Conv3d(5, 4, 3, 2, 1),
        nn.Flatten(), nn.Linear(4 * 2 * 2 * 2, 3),
    ).double()  # fmt: skip
    x = torch.randn(2, 2, 8, 6, 6, dtype=torch.float64)

    def train(model: nn.Module, x: Tensor) -> list[Tensor]:
        model(x).sin().square().mean().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    def split(world: pydist.comm.Transport) -> tuple[tuple[int, ...], list[Tensor]]:
        shares = {"depth": (3, 1), "channel": (5, 2)}
        mesh = Mesh(world, 1, (2, 1, 1), axes={"channel": 2}, shares=shares)
        cut = pydist.distribute_tensor(x, mesh)
        model = pydist.parallelize(copy.deepcopy(whole), mesh)
        return tuple(model[0](cut).to_local().shape), train(model, cut)

    expected = train(copy.deepcopy(whole), x)
    for rank, (shape, found) in enumerate(run_local(split, 4)):
        assert shape == (2, (5, 2)[rank // 2], (6, 2)[rank % 2], 6, 6)
        for mine, other in zip(found, expected, strict=True):
            assert error(mine, other) < 4 * FP64_BOUND
