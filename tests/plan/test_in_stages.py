"""Tests of plans in stages: the formulas of the schedules, and the plan of one mesh as a case."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from pydist.grid import Grid
from pydist.hardware import PROFILES, Interconnect
from pydist.models import CosmoFlow, UNet3d
from pydist.plan import (
    Estimate,
    InStages,
    StepModel,
    Training,
    estimate_in_stages,
    estimate_step,
    plan_meshes,
    table,
    trace_network,
)  # fmt: skip

FREE = Interconnect(0.0, math.inf)
V100 = PROFILES["v100"]
# Calls take all the time, each as long as the others; messages take none.
EQUAL = replace(
    V100, flops={"float32": math.inf}, bandwidth=math.inf, call=3.0, exchange=0.0, within=FREE,
    between=FREE, is_asynchronous=False, exponential=0.0,
)  # fmt: skip
LAYERS = 16


@pytest.fixture(scope="module")
def equal() -> StepModel:
    layers = [nn.Conv3d(1, 1, 3, padding=1) for _ in range(LAYERS)]
    trace = trace_network(nn.Sequential(*layers), (1, 8, 8, 8), lambda output: output)
    return StepModel(trace, Training(batch=8), EQUAL)


def staged(model: StepModel, stages: int, count: int, schedule: str, **sizes: int) -> Estimate:
    found = estimate_in_stages(model, Grid.of(sizes), InStages(stages, count, schedule))
    assert found is not None
    return found


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("stages", "count"), [(2, 1), (2, 4), (4, 8)])
def test_s_minus_1_of_m_plus_s_minus_1_passes_are_idle(
    equal: StepModel, schedule: str, stages: int, count: int
) -> None:
    """Source: Huang et al., GPipe (NeurIPS 2019)."""
    found = staged(equal, stages, count, schedule)
    of_stage = LAYERS / stages * EQUAL.call
    assert found.step == pytest.approx((count + stages - 1) * of_stage)
    assert found.bubble == pytest.approx((stages - 1) / (count + stages - 1))


def test_zero_bubble_waits_less_and_1f1b_keeps_less(equal: StepModel) -> None:
    gpipe, ordered, filled = (
        staged(equal, 4, 8, schedule) for schedule in ("gpipe", "1f1b", "zero-bubble")
    )
    assert filled.step < ordered.step == pytest.approx(gpipe.step)
    # Of 8 micro-batches, the inputs of 4 layers; the first of 4 stages keeps those of 3 layers (the
    # network's input counts elsewhere) for 4 of them, and the second those of 4 layers for 3.
    block = 8**3 * 4
    assert gpipe.memory["activations"] == pytest.approx(8 * 4 * block)
    assert ordered.memory["activations"] == pytest.approx(4 * 3 * block)


def test_one_stage_with_one_micro_batch_is_the_mesh_itself() -> None:
    with torch.device("meta"):
        trace = trace_network(UNet3d(1, 2, features=16, levels=2), (1, 32, 32, 32))
    model = StepModel(trace, Training(batch=4), V100)
    grid = Grid.of({"data": 2, "depth": 2, "channel": 2})
    alone, found = estimate_step(model, grid), staged(model, 1, 1, "gpipe", **vars_of(grid))
    assert found.step == pytest.approx(alone.step)
    assert found.memory == pytest.approx(alone.memory)
    assert found.bubble == pytest.approx(0.0, abs=1e-9)


def vars_of(grid: Grid) -> dict[str, int]:
    return {axis: grid.size((axis,)) for axis in ("data", "channel", "depth", "height", "width")}


def test_messages_between_stages_delay_the_next_stage(equal: StepModel) -> None:
    slow = StepModel(equal.trace, equal.training, replace(EQUAL, within=Interconnect(7.0, 1e99)))
    # One forward and one backward message, neither of them hidden.
    assert staged(slow, 2, 1, "gpipe").step == pytest.approx(staged(equal, 2, 1, "gpipe").step + 14)


def test_more_stages_than_calls_have_no_plan(equal: StepModel) -> None:
    assert estimate_in_stages(equal, Grid.of({}), InStages(LAYERS + 1, 1, "gpipe")) is None


def test_each_stage_needs_less_memory_than_the_whole_network() -> None:
    with torch.device("meta"):
        trace = trace_network(CosmoFlow(64), (4, 64, 64, 64))
    model = StepModel(trace, Training(batch=8), V100)
    found = plan_meshes(model, 4, stages=(1, 2, 4))
    assert {each.ranks for each in found} == {4}
    whole = estimate_step(model, Grid.of({})).memory
    for each in found:
        if each.in_stages is not None:
            assert each.memory["parameters"] < whole["parameters"]
            assert each.in_stages.micro_batches <= 8 / each.grid.size(("data",))
    assert sum(each.in_stages is not None for each in found) == 5 + 1


@pytest.mark.parametrize("count", [1, 2, 8])
def test_gems_takes_the_time_of_its_paper_and_keeps_one_micro_batch(
    equal: StepModel, count: int
) -> None:
    """Source: Jain et al., GEMS (SC 2020); its MASTER has several pairs of micro-batches."""
    stages, block = 4, 8**3 * 4
    found = staged(equal, stages, count, "gems")
    forward = LAYERS / stages * EQUAL.call / 3
    expected = count * stages * 3 * forward - (count - 1) * (stages - 1) * forward
    assert found.step == pytest.approx(expected)
    assert found.memory["activations"] == pytest.approx(4 * block * 8 / count)
    # Each mesh has the weights of two stages.
    alone = staged(equal, stages, count, "1f1b")
    assert found.memory["parameters"] == pytest.approx(2 * alone.memory["parameters"])


def test_gems_sums_gradients_over_both_meshes_of_a_stage(equal: StepModel) -> None:
    link = Interconnect(7.0, math.inf)
    far = StepModel(equal.trace, equal.training, replace(EQUAL, within=link))
    near = staged(equal, 2, 2, "gems").seconds["gradients"]
    assert staged(far, 2, 2, "gems").seconds["gradients"] - near == pytest.approx(2 * link.latency)


@pytest.mark.parametrize("has_norm", [True, False])
def test_a_plan_has_gems_where_no_batch_norm_is(has_norm: bool) -> None:
    norm = nn.BatchNorm3d(4) if has_norm else nn.InstanceNorm3d(4)
    network = nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), norm, nn.Conv3d(4, 4, 3, padding=1))
    model = StepModel(trace_network(network, (1, 8, 8, 8)), Training(batch=2), V100)
    seen = set[str]()

    def noted(model: StepModel, grid: Grid, given: InStages) -> Estimate | None:
        seen.add(given.schedule)
        return estimate_in_stages(model, grid, given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(table, "estimate_in_stages", noted)
        plan_meshes(model, 2, stages=(2,))
    assert ("gems" in seen) is not has_norm
    assert {"1f1b", "gpipe", "zero-bubble"} <= seen


def test_ranks_of_other_stages_crowd_a_node(equal: StepModel) -> None:
    """Flops take all the time, four times as long where both ranks of a node work."""
    hardware = replace(
        EQUAL, flops={"float32": 1e9}, call=0.0, ranks_per_node=2, crowding={"flops": 4.0}
    )
    model = StepModel(equal.trace, Training(batch=8), hardware)
    alone = estimate_step(model, Grid.of({})).seconds["compute"]
    groups = estimate_step(model, Grid.of({"data": 2})).seconds["compute"]
    assert groups == pytest.approx(2 * alone, rel=0.05)  # half of the samples, and the optimizer
    assert staged(model, 2, 1, "1f1b").seconds["compute"] == pytest.approx(2 * alone, rel=0.05)
    assert staged(model, 2, 1, "gems").seconds["compute"] == pytest.approx(alone / 2, rel=0.05)
