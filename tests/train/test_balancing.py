"""Tests of the search for parts, with ranks whose times are known functions of their parts."""

from __future__ import annotations

import pytest

from pydist import run_local
from pydist.comm import LocalTransport
from pydist.errors import UsageError
from pydist.train import balancing
from pydist.train.balancing import Round, find_parts, measure
from pydist.train.config import AdamConfig, Config, MeshConfig, SharesConfig
from pydist.train.parts import Axis, with_parts

AXIS = Axis("depth", 2, 64, 4)


def search(monkeypatch, times, rounds=8, config=None):
    """Returns the rounds of a search, and the chosen one."""

    def measure(config, world, axis, sizes, steps):
        busy = tuple(time(size) for time, size in zip(times, sizes, strict=True))
        return Round(sizes, busy, max(busy) + 1)

    done: list[Round] = []
    monkeypatch.setattr(balancing, "measure", measure)
    config = config or Config(mesh=MeshConfig(spatial=(2, 1, 1)))
    best = find_parts(config, LocalTransport(), AXIS, 1, rounds, done.append)
    return [each.sizes for each in done], best


@pytest.mark.parametrize(
    "times",
    [
        (lambda w: w, lambda w: w),
        (lambda w: w, lambda w: 1.01 * w),
        (lambda w: w, lambda w: 2 * w),
        (lambda w: 9 * w, lambda w: w),
        (lambda w: w, lambda w: 1000 * w),
        (lambda w: w, lambda w: 30 + w),  # a fixed cost, which one speed can't express
        (lambda w: w, lambda w: w if w < 20 else 3 * w),
        (lambda w: 40, lambda w: 2 * w),
    ],
)
def test_the_slowest_part_is_as_fast_as_it_can_be(monkeypatch, times):
    tried, best = search(monkeypatch, times)
    divisions = [(w, 64 - w) for w in range(4, 64, 4)]
    least = min(max(t(w) for t, w in zip(times, d, strict=True)) for d in divisions)
    assert max(best.busy) <= 1.02 * least
    assert tried[0] == (32, 32)
    assert len(set(tried)) == len(tried) <= 6


def test_the_search_begins_with_the_given_parts_and_ends_in_time(monkeypatch):
    shares = SharesConfig(depth=(3.0, 1.0))
    config = Config(mesh=MeshConfig(spatial=(2, 1, 1), shares=shares))
    tried, best = search(monkeypatch, (lambda w: w, lambda w: 2 * w), 1, config)
    assert tried == [(48, 16)]
    assert best.sizes == (48, 16)
    assert with_parts(config, AXIS, (44, 20)).mesh.shares.given == {"depth": (44.0, 20.0)}


def test_ranks_with_different_settings_do_not_measure():
    def body(world):
        mesh = MeshConfig(spatial=(2, 1, 1))
        config = Config(mesh=mesh, optimizer=AdamConfig(lr=0.001 * (1 + world.rank)))
        with pytest.raises(UsageError, match=r"configuration's optimizer.lr differs between the"):
            measure(config, world, AXIS, (32, 32), 1)

    run_local(body, 2)
