"""Parts of an extent from curves of time: the slowest part is as fast as any division allows."""

from __future__ import annotations

from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pydist.balance import Curve, balance
from pydist.errors import UsageError
from pydist.partition import divide

SECONDS = st.floats(0, 10, allow_subnormal=False)
CURVES = st.dictionaries(st.integers(1, 20), SECONDS, min_size=1, max_size=4).map(
    lambda points: Curve(points.items())
)

# Seconds a sample of a 2-D U-Net by image edge, from the slides on layer-wise parallel U-Nets.
EDGES = (64, 128, 256, 512, 1024)
V100 = (0.0186, 0.0188, 0.0232, 0.0548, 0.1899)
K80 = (0.0316, 0.0533, 0.1069, 0.3005, 1.0024)


@given(st.lists(CURVES, min_size=1, max_size=3), st.integers(1, 12), st.integers(0, 2))
def test_no_division_has_a_faster_slowest_part(curves, units, least):
    if units < least * len(curves):
        with pytest.raises(UsageError, match=f"an extent of {units} can't be divided"):
            balance(curves, units, least)
        return

    def slowest(sizes):
        return max(curve(size) for curve, size in zip(curves, sizes, strict=True) if size)

    found = balance(curves, units, least).sizes
    assert sum(found) == units
    assert min(found) >= least
    every = product(range(least, units + 1), repeat=len(curves))
    assert slowest(found) == min(slowest(sizes) for sizes in every if sum(sizes) == units)


@given(CURVES)
def test_more_work_takes_no_less_time(curve):
    times = [curve(width / 4) for width in range(1, 120)]
    assert all(a <= b + 1e-9 for a, b in pairwise(times))
    assert times[0] >= 0


def test_curves_go_through_their_points():
    curve = Curve([(4, 2.0), (2, 1.0), (8, 10.0), (8, 6.0), (6, 1.5)])
    assert [curve(width) for width in (2, 3, 4, 5, 6, 7, 8)] == [1, 1.5, 2, 2, 2, 4, 6]
    assert [curve(width) for width in (1, 16)] == [0.5, 12]  # at the nearest width's speed
    fixed = Curve([(2, 5.0), (4, 6.0)])
    assert [fixed(width) for width in (1, 8)] == [4.5, 8]  # a cost of 4 s at any width
    assert [Curve([(3, 6.0)])(width) for width in (1, 3, 5)] == [2, 6, 10]


def test_parts_are_multiples():
    one = Curve([(1, 1.0)])
    three = Curve([(1, 3.0)])
    assert balance([one, three], 64, multiple=8).sizes == (48, 16)
    assert balance([one, three], 67, multiple=8).sizes == (51, 16)
    assert balance([one, Curve([(1, 1e9)])], 64, multiple=8).sizes == (56, 8)
    with pytest.raises(UsageError, match="an extent of 15 can't be divided into 2 parts of at le"):
        balance([one, three], 15, multiple=8)
    with pytest.raises(UsageError, match="can't be divided into 0 parts"):
        balance([], 15)


@pytest.mark.parametrize("points", [[], [(0, 1.0)], [(1, -1.0)], [(1, float("nan"))]])
def test_points_out_of_range_are_named(points):
    with pytest.raises(UsageError, match=r"expected widths > 0|needs the time at one width"):
        Curve(points)


@pytest.mark.parametrize("units", [2, 6, 20, 64, 256])
def test_curves_beat_one_number_per_device(units):
    """At each size one of the devices' ratios, 1.7 to 5.5, is wrong for another size."""
    sizes = [(edge // 64) ** 2 for edge in EDGES]
    devices = [Curve(zip(sizes, times, strict=True)) for times in (V100, K80)]

    def slowest(parts):
        return max(device(part) for device, part in zip(devices, parts, strict=True))

    best = slowest(balance(devices, units).sizes)
    by_one_number = [
        slowest(divide(units, (k80, v100)).sizes) for v100, k80 in zip(V100, K80, strict=True)
    ]
    assert best <= min(by_one_number)
    assert best < max(by_one_number) or units == 2
