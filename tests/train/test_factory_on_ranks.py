"""Tests that a factory makes its network on each rank as on one: with its values and its draws."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pydist import Mesh, run_local
from pydist.comm import LocalTransport, Transport
from pydist.data.medical.generate import generate_ct
from pydist.data.medical.options import CTOptions
from pydist.plan import load_hardware
from pydist.train import config_io, run, state
from pydist.train.config import Config
from pydist.train.planning import model_of
from support.training.runs import alone, assert_same_bits, change, curve, job, last_state

NETS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, in_channels, classes):
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        rates = [x.item() for x in torch.linspace(0.5, 1, 2)]
        self.first = nn.Conv3d(in_channels, 4, 3, padding=1)
        self.norm = nn.BatchNorm3d(4, track_running_stats=False)
        self.a, self.b = (nn.Conv3d(4, 4, 3, padding=1) for _ in rates)
        self.b.weight = self.a.weight
        self.last = nn.Conv3d(4, classes, 1)
        self.scale = torch.tensor(rates[:1])
        with torch.no_grad():
            self.a.weight += 0.1 * torch.rand(self.a.weight.shape, generator=generator)

    def forward(self, x):
        x = self.norm(self.first(x))
        return self.last(torch.relu(self.b(torch.relu(self.a(x)))) * self.scale)

def make(in_channels, classes):
    return Net(in_channels, classes).to("cpu")
"""


@pytest.fixture
def config(tmp_path) -> Config:
    """Returns a run of one step."""
    (tmp_path / "volumes").mkdir()
    generate_ct(tmp_path / "volumes", CTOptions(count=4, shape=(8, 8, 8), validation=0.5))
    (tmp_path / "nets.py").write_text(NETS)
    text = f'model = {{factory = "{tmp_path}/nets.py:make", task = "segmentation"}}'
    return change(
        config_io.loads(text, "test.toml"),
        data={"path": tmp_path / "volumes"},
        train={"epochs": 1, "batch": 2},
        output={"folder": tmp_path / "run", "plot": False},
    )


def in_folder(config: Config, name: str) -> Config:
    return change(config, output={"folder": config.output.folder.with_name(name)})


def test_values_draws_shared_weights_and_tensors_of_a_factory(config, monkeypatch):
    built, place = [], run.place_network

    def placed(model: Any, *others: Any) -> Any:
        built.append(model.first.weight.detach().clone())
        return place(model, *others)

    monkeypatch.setattr(run, "place_network", placed)
    alone(config)
    run_local(job, 2, split := in_folder(config, "split"), 1, (2, 1, 1), timeout=60)
    assert curve(split) == pytest.approx(curve(config), rel=1e-4)
    assert len(built) == 3
    assert all(torch.equal(each, built[0]) for each in built)
    assert len(model_of(config, load_hardware("cpu"), 1 << 30).trace.calls) > 5


def test_a_network_is_planned_without_its_memory(config):
    path = Path(config.model.factory.partition(":")[0])
    path.write_text(
        "from torch import nn\n"
        "def make(in_channels, classes):\n"
        "    wide = 1 << 20  # 4 TiB of weights\n"
        "    convolution = nn.Conv3d(wide, wide, 1, bias=False)\n"
        "    layers = nn.Conv3d(in_channels, wide, 1), convolution, nn.Conv3d(wide, classes, 1)\n"
        "    return nn.Sequential(*layers)\n"
    )
    assert len(model_of(config, load_hardware("cpu"), 1 << 30).trace.calls) > 3


def test_the_check_of_validation_leaves_shared_modules_and_random_numbers_alone(config):
    network = (
        "import torch\n"
        "from torch import nn\n"
        "NORM = nn.BatchNorm3d(4, track_running_stats=False)\n"
        "class Scaled(nn.Module):\n"
        "    def forward(self, x):\n"
        "        return x * torch.rand(1)\n"
        "def make(in_channels, classes):\n"
        "    layers = nn.Conv3d(in_channels, 4, 1), NORM, Scaled(), nn.Conv3d(4, classes, 1)\n"
        "    return nn.Sequential(*layers)\n"
    )
    curves = []
    for validate_every in (1, 0):
        path = config.output.folder.with_name(f"norms{validate_every}.py")
        path.write_text(network)
        model = replace(config.model, factory=f"{path}:make")
        each = in_folder(replace(config, model=model), path.stem)
        alone(each := change(each, train={"validate_every": validate_every}))
        curves.append(curve(each))
    assert curves[0] == curves[1]


def test_preparing_the_network_draws_no_numbers_of_the_run(config):
    def prepare(network: torch.nn.Module) -> None:
        torch.rand(3)

    alone(config)
    prepared = in_folder(config, "prepared")
    run.train(prepared, Mesh(LocalTransport()), prepare=prepare)
    assert_same_bits(last_state(prepared)["ranks"], last_state(config)["ranks"])


def test_each_rank_goes_on_with_its_own_random_numbers(config, monkeypatch):
    own, loaded = threading.local(), {}
    monkeypatch.setattr(state, "random_state", lambda: {"rank": own.rank})
    monkeypatch.setattr(state, "set_random_state", lambda given: loaded.update({own.rank: given}))

    def body(world: Transport, data: int, spatial: tuple[int, int, int], **values: Any) -> None:
        own.rank = world.rank
        job(world, change(config, train=values), data, spatial)

    run_local(body, 2, 2, (1, 1, 1), timeout=60)
    for ranks, spatial, expected in ((2, (1, 1, 1), [0, 1]), (4, (2, 1, 1), [0, 0, 1, 1])):
        loaded.clear()
        run_local(body, ranks, 2, spatial, timeout=60)
        assert [loaded[rank]["rank"] for rank in range(ranks)] == expected
