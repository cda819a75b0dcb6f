"""Tests of the table of meshes: the legal ones, their order, and profiles in files."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch

from pydist import Mesh
from pydist.comm import Transport, run_local
from pydist.errors import UsageError
from pydist.grid import AXES, OTHER_AXES, SPATIAL_AXES, Grid
from pydist.hardware import CPU, PROFILES, load_hardware
from pydist.models import CosmoFlow, UNet2d
from pydist.plan import StepModel, Training, legal_meshes, plan_meshes, trace_network


@pytest.mark.parametrize("ranks", [1, 4, 6])
def test_the_legal_meshes_are_those_that_init_accepts(ranks: int) -> None:
    def accepted(world: Transport) -> set[Grid]:
        found = set()
        divisors = [n for n in range(1, ranks + 2) if n == ranks + 1 or ranks % n == 0]
        for shape in itertools.product(divisors, repeat=len(AXES)):
            sizes = dict(zip(AXES, shape, strict=True))
            try:
                mesh = Mesh(
                    world, sizes["data"], [sizes[axis] for axis in SPATIAL_AXES],
                    axes={axis: sizes[axis] for axis in OTHER_AXES},
                )  # fmt: skip
            except UsageError:
                continue
            found.add(mesh.grid)
        return found

    planned = list(legal_meshes(ranks))
    assert len(planned) == len({*planned})
    assert {*planned} == run_local(accepted, ranks)[0]


def test_images_are_not_cut_along_depth() -> None:
    with torch.device("meta"):
        network = UNet2d(in_channels=1, classes=2, features=4, levels=2)
        trace = trace_network(network, (1, 16, 16), lambda scores: scores.mean())
    found = [each.grid for each in plan_meshes(StepModel(trace, Training(), PROFILES["v100"]), 4)]
    assert {(grid.size(("depth",)), grid.size(("data",))) for grid in found} == {(1, 1)}
    assert len({grid.size(("height",)) for grid in found}) == 3


@pytest.fixture(scope="module")
def model() -> StepModel:
    with torch.device("meta"):
        trace = trace_network(CosmoFlow(64), (4, 64, 64, 64))
    return StepModel(trace, Training(batch=8), PROFILES["a100"])


def test_meshes_that_fit_come_first_and_the_fastest_of_them(model: StepModel) -> None:
    everything = plan_meshes(model, 16)
    assert len(everything) == 70 - 1  # 16 = 2⁴ over five axes; 8 samples are too few for data 16
    steps = [each.step for each in everything]
    assert steps == sorted(steps)
    peaks = sorted(each.peak for each in everything)
    limit = int(peaks[len(peaks) // 2])
    tight = plan_meshes(model, 16, limit)
    fits = [each.peak <= limit for each in tight]
    assert fits == sorted(fits, reverse=True)
    assert 0 < sum(fits) < len(fits)
    few = [each.step for each in tight[: sum(fits)]]
    assert few == sorted(few)


@pytest.mark.parametrize(("passes", "most"), [(1, 8), (3, 2), (8, 1), (9, 1)])
def test_a_pass_has_a_sample_for_each_group(model: StepModel, passes: int, most: int) -> None:
    fewer = StepModel(model.trace, Training(batch=8, passes=passes), model.hardware)
    found = {each.grid.size(("data",)) for each in plan_meshes(fewer, 8)}
    assert found == {n for n in (1, 2, 4, 8) if n <= most}


def test_a_profile_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    CPU.save(path)
    assert load_hardware(str(path)) == CPU
    assert load_hardware("h100") is PROFILES["h100"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"call": -1.0}, "its numbers must be finite and not negative"),
        ({"call": "fast"}, "its numbers must be finite and not negative"),
        ({"speed": 1.0}, "expected name, source"),
        ({"within": {"latency": 1.0}}, "bandwidth"),
        ({"within": {"latency": 1.0, "bandwidth": 0}}, "within.bandwidth must be more than 0"),
        ({"between": [1.0, 2.0]}, "between must be a table"),
        ({"flops": [1e12]}, "flops must be a table"),
        ({"flops": {"bfloat16": 1e12}}, "flops has no float32"),
        ({"flops": {"float32": 1e12, "bfloat16": 0}}, "flops.bfloat16 must be more than 0"),
        ({"crowding": [1.0]}, "crowding must be a table"),
        ({"crowding": {"flops": 0.0}}, "crowding.flops must be more than 0"),
        ({"reading": 0}, "reading must be more than 0"),
        ({"bandwidth": 0.0}, "bandwidth must be more than 0"),
        ({"optimizing": 0}, "optimizing must be more than 0"),
        ({"ranks_per_node": 0}, "ranks_per_node must be more than 0"),
    ],
)
def test_a_wrong_profile_is_refused(change: dict, message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    CPU.save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UsageError, match=message):
        load_hardware(str(path))
    with pytest.raises(UsageError, match="possible are auto, cpu, v100, a100, h100, or a file"):
        load_hardware("k80")
