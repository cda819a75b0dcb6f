"""Constants that plans pass to kernels: made once, on the device that uses them."""

from __future__ import annotations

import pytest
import torch

from pydist.comm import LocalTransport
from pydist.errors import NotSupported
from pydist.gradients.partitioned import GradientSet
from pydist.layout import layout_for_sample
from pydist.mesh import Mesh
from pydist.ops.constants import Constant
from pydist.ops.norm.norm_plan import plan_norm
from pydist.ops.pool.average import Averaging
from pydist.ops.pool.maximum import MaxPlan
from pydist.ops.windows import Window, plan_window

CPU, META = torch.device("cpu"), torch.device("meta")
SHAPE = (2, 3, 6, 4)
WINDOW = Window((3, 2), (2, 2), (1, 1), ((1, 1), (0, 0)))


@pytest.fixture
def layout():
    return layout_for_sample(Mesh(LocalTransport()), SHAPE, {2: "depth"})


def test_a_device_gets_one_copy():
    values = torch.arange(3)
    constant = Constant(values)
    assert constant.on(CPU) is values
    there = constant.on(META)
    assert there.device == META
    assert constant.on(META) is there


def test_scales_of_an_average(layout):
    halves = [torch.full((n,), 0.5, dtype=torch.float64) for n in (3, 2)]
    averaging = Averaging(WINDOW, halves)
    box = plan_window(layout, WINDOW, 3).out.box
    first, second = (averaging._scales(box, META) for _ in range(2))
    assert [scale.device for scale in first] == [META] * 3
    assert first[0] is second[0]
    on_host = averaging._scales(box, CPU)
    assert [scale.tolist() for scale in on_host] == [[1.0], [0.5] * 3, [0.5] * 2]
    assert on_host[1].data_ptr() == halves[0].data_ptr()


def test_indices_of_a_maximum(layout):
    plan = MaxPlan(plan_window(layout, WINDOW, 3))
    taps = torch.zeros((2, 3, 3, 2), dtype=torch.uint8, device=META)
    found = plan.indices(taps)
    assert (found.device, found.shape) == (META, taps.shape)


def test_counts_of_a_norm(layout):
    known = plan_norm(layout, (0, 2, 3), ("depth",)).known_counts
    assert known.on(META) is known.on(META)
    assert known.on(CPU).tolist() == [[2 * 6 * 4]]


def test_norms_of_gradients_travel_where_these_are():
    """This transport accepts host memory only, and its error names the given device."""
    family = GradientSet(LocalTransport())
    family.add(torch.empty(5, device=META))
    family.add(torch.empty(0, device=META))
    for order in (2.0, float("inf")):
        with pytest.raises(NotSupported, match="tensor on meta"):
            family.norm(0, order)
