"""Thin layers whose channels are split over the spatial axes, with results that do not change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from pydist import ShardedTensor, parallelize
from pydist import mesh as mesh_module
from pydist.grid import Grid
from pydist.hardware import CPU, Interconnect, kept_file, load_hardware, this_machine
from pydist.mesh import Mesh
from pydist.ops.coarsening import idle_split
from pydist.ops.conv import split_channels
from pydist.plan import StepModel, Training, estimate_step, trace_network
from support.equivalence import Task, check_network, layout_at, on_ranks, randn

FAST = Interconnect(0.0, 1e15)


@pytest.fixture
def slow_flops(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Lets ranks compute so slowly that they divide every layer as far as they can."""
    monkeypatch.setenv("PYDIST_CACHE", str(tmp_path))
    costs = replace(CPU, exchange=0.0, within=FAST, flops={"float32": 1e6})
    replace(costs, machine=this_machine()).save(kept_file())
    monkeypatch.setattr(mesh_module, "_ranks_per_core", lambda *_: 1.0)


class Skip(nn.Module):
    """U-Net of two levels, the lower one with thin blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv3d(2, 4, 3, 2, 1), nn.InstanceNorm3d(4), nn.PReLU(4))
        self.low = nn.Sequential(
            nn.Conv3d(4, 12, 3, 2, 1), nn.GroupNorm(2, 12), nn.LeakyReLU(),
            nn.Conv3d(12, 12, 3, padding=1, groups=4), nn.Conv3d(12, 12, 3, padding=1),
        )  # fmt: skip
        self.up = nn.ConvTranspose3d(12, 4, 2, 2)
        self.last = nn.Conv3d(8, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        above = self.down(x)
        return self.last(torch.cat([self.up(self.low(above)), above], 1))


def classifier() -> nn.Module:
    return nn.Sequential(
        nn.Conv3d(2, 4, 3, 2, 1), nn.BatchNorm3d(4), nn.ReLU(), nn.MaxPool3d(2),
        nn.Conv3d(4, 12, 3, padding=1), nn.BatchNorm3d(12), nn.LeakyReLU(),
        nn.Conv3d(12, 7, 3, padding=1), nn.ReLU(), nn.Conv3d(7, 3, 1),
        nn.AvgPool3d(2), nn.Flatten(), nn.Linear(3, 3),
    )  # fmt: skip


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "classifier": (classifier, (2, 3)),
    "U-Net": (Skip, (2, 4, 4, 4, 4)),
}
MESHES = {"depth 4": ((4, 1, 1), 1), "depth 3, height 2": ((3, 2, 1), 1), "groups": ((3, 1, 1), 2)}


def noted(model: nn.Module, found: list[tuple[str, ...]]) -> nn.Module:
    """Returns the model, which notes the axes along which results of layers have their channels."""

    def note(_: nn.Module, __: object, result: object) -> None:
        if isinstance(result, ShardedTensor) and (split := result.layout.splits[1]) is not None:
            found.append(split.axes)

    for module in model.modules():
        if isinstance(module, nn.Conv3d | nn.ConvTranspose3d):
            module.register_forward_hook(note)
    return model


@pytest.mark.parametrize("form", ["sum", "scatter", "gather", "chosen"])
@pytest.mark.parametrize(("spatial", "data"), MESHES.values(), ids=MESHES)
@pytest.mark.parametrize(("make", "shape"), NETWORKS.values(), ids=NETWORKS)
@pytest.mark.usefixtures("slow_flops")
def test_the_result_is_that_of_one_device(make, shape, spatial, data, form, monkeypatch) -> None:
    if form != "chosen":
        monkeypatch.setattr(split_channels, "channel_form", lambda *_: form)
    torch.manual_seed(0)
    found: list[tuple[str, ...]] = []
    model = noted(make().double(), found)
    task = Task(model, randn(2, 2, 8, 8, 8), randn(*shape, seed=1), mse_loss)
    check_network(task, spatial, data=data)
    axes = tuple(a for a, n in zip(("depth", "height", "width"), spatial, strict=True) if n > 1)
    assert axes in found
    assert set(found) == {axes}


@pytest.mark.usefixtures("slow_flops")
def test_a_plan_names_the_layers_that_a_run_divides() -> None:
    network = classifier()
    found: list[str] = []

    def rank(mesh: Mesh) -> None:
        model = parallelize(classifier(), mesh)
        for path, layer in model.named_modules():
            if mesh.rank == 0 and isinstance(layer, nn.Conv3d):
                layer.register_forward_hook(partial(_note_path, found, path))
        model(torch.ones(1, 2, 8, 8, 8))

    on_ranks((4, 1, 1), rank)
    hardware = load_hardware("auto")
    model = StepModel(trace_network(network, (2, 8, 8, 8)), Training(), hardware)
    planned = estimate_step(model, Grid.of({"depth": 4})).on_channels
    assert list(planned) == found
    assert "4" in found
    assert not estimate_step(model, Grid.of({"channel": 4})).on_channels


def _note_path(found: list[str], path: str, _: nn.Module, args: Any, result: Any) -> None:
    if any(each.layout.splits[1] is not None for each in (*args, result)):
        found.append(path)


def test_a_whole_layer_is_divided_if_it_is_large() -> None:
    def rank(mesh: Mesh) -> list[bool]:
        layout = layout_at(mesh, (1, 8, 4, 4, 4), (None, None, None))
        shape = (1, 8, 4, 4, 4)
        return [idle_split(layout, shape, flops, 0) is not None for flops in (1e3, 1e12)]

    assert on_ranks((4, 1, 1), rank) == [[False, True]] * 4
    assert on_ranks((4, 1, 1), rank, keep_thin_blocks=True) == [[False, False]] * 4
    assert on_ranks((2, 1, 1), rank, axes={"channel": 2}) == [[False, False]] * 4


def test_fewer_channels_than_ranks_are_not_divided() -> None:
    def rank(mesh: Mesh) -> bool:
        layout = layout_at(mesh, (1, 8, 4, 4, 4), (None, None, None))
        return idle_split(layout, (1, 3, 4, 4, 4), 1e12, 0) is None

    assert all(on_ranks((4, 1, 1), rank))
