"""Tests of the plan of a configuration: of the samples as training gets them."""

from __future__ import annotations

import pytest

from pydist import Mesh
from pydist.comm import LocalTransport
from pydist.data import AugmentOptions
from pydist.data.medical.generate import generate_ct
from pydist.data.medical.options import CTOptions
from pydist.errors import UsageError
from pydist.grid import Grid
from pydist.plan import estimate_step, load_hardware
from pydist.train import config_io, planning
from pydist.train.config import Config, DataConfig, MeshConfig, UNet3dConfig
from pydist.train.parts import axis_of
from pydist.train.planning import chooser, model_of

CROP = (16, 16, 32)


def test_the_step_of_crops_is_planned(tmp_path):
    def planned(shape, crop=None):
        folder = tmp_path / "x".join(map(str, shape))
        if not folder.exists():
            generate_ct(folder, CTOptions(count=2, shape=shape, validation=0.0))
        data = DataConfig(path=folder, normalize="ct", augment=AugmentOptions(crop=crop))
        mesh = MeshConfig(spatial=(1, 1, 2))
        config = Config(model=UNet3dConfig(features=4, levels=2), data=data, mesh=mesh)
        found = estimate_step(model_of(config, load_hardware("cpu"), 1 << 30), Grid.of({}))
        return found.step, found.memory, axis_of(config, 2).extent

    assert planned((64, 32, 64), CROP) == planned(CROP) != planned((64, 32, 64))
    with pytest.raises(UsageError, match=r"crop = \[16, 16, 30\]: the network accepts multiples"):
        planned(CROP, (16, 16, 30))
    with pytest.raises(UsageError, match=r"crop = \[32, 16, 32\]: a sample has 16 × 16 × 32 voxel"):
        planned(CROP, (32, 16, 32))


def test_a_mesh_is_chosen_of_those_that_the_run_accepts(tmp_path):
    generate_ct(tmp_path, CTOptions(count=2, shape=(16, 16, 16), validation=0.0))

    def chosen(**mesh):
        tables = {
            "model": {"name": "unet3d", "features": 4, "levels": 2},
            "data": {"path": str(tmp_path), "normalize": "ct"},
            "mesh": {"spatial": "auto", **mesh},
            "train": {
                "device": "cpu", "batch": 4, "batch_schedule": {"milestones": [[1.0, 2]]},
            },
        }  # fmt: skip
        return chooser(config_io.from_tables(tables, "run.toml"))(4).size(("data",))

    assert chosen() <= 2
    with pytest.raises(UsageError, match=r"milestones = \[\[1\.0, 2\]\] with 4 sample groups"):
        chosen(data=4)


def test_a_complete_run_shows_an_error_of_its_plan(monkeypatch):
    def fail(*_):
        raise ValueError("no such thing")

    monkeypatch.setattr(planning, "model_of", fail)
    events = [{"event": "step", "seconds": 0.5}] * 20
    line = planning.beside_measurement(Config(), Mesh(LocalTransport()), events)
    assert "measured 500 ms" in line
    assert line.endswith("no prediction: ValueError('no such thing')")
