"""Tests of a task that implements all of the protocol in a user's file, and of its way back."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from pydist.cli.main import main
from pydist.comm import run_local
from pydist.data import UniverseOptions, generate_universes
from pydist.train import log
from pydist.train.config import Config, DataConfig, FactoryConfig, OutputConfig, TrainConfig
from support.training.runs import job

MINE = """
import json
from dataclasses import dataclass

import torch
from torch import nn

from pydist.train.tasks.base import Validation, measured_rows


def make(channels):
    return nn.Sequential(nn.Conv3d(channels, 4, 3, padding=1), nn.ReLU(),
                         nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(4, 2))


@dataclass(frozen=True)
class Errors(Validation):
    worst: float

    def figures(self):
        return {"loss": self.loss, "worst": self.worst}


class TwoValues:
    '''Predicts two of the four parameters of a universe, with an error of its own.'''

    multiple = None
    weighs_targets = False

    def __init__(self, model, train):
        self.model, self.train = model, train

    def check(self, data):
        assert data.num_targets == 4

    def network(self, manifest):
        return make(manifest.sample_shape[0])

    def expression(self, manifest):
        return f"mine.make({manifest.sample_shape[0]})"

    def criterion(self, batches):
        return lambda output, targets: (output - targets[:, :2]).abs().mean()

    def measure(self, output, batch):
        return (output.double() - batch.targets[:, :2].double()).abs()

    def judge(self, rows):
        rows = rows[measured_rows(rows)]
        return Errors(len(rows), float(rows.mean()), float(rows.max()))

    def write_results(self, folder, data, validation):
        (folder / "errors.json").write_text(json.dumps(validation.figures()))

    def draw_sample(self, path, data, validation):
        path.write_bytes(b"a sample")

    def draw(self, folder, curves, data, mesh):
        path = folder / "result.png"
        path.write_text(f"{len(next(iter(curves.values())))} steps")
        return path
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("own")
    (folder / "mine.py").write_text(MINE)
    generate_universes(folder / "universes", UniverseOptions(6, 8, 8, validation=0.5))
    return folder


def run_of(place: Path, name: str) -> Config:
    mine = place / "mine.py"
    return Config(
        model=FactoryConfig(factory=f"{mine}:make", task=f"{mine}:TwoValues"),
        data=DataConfig(place / "universes", "log1p"),
        train=TrainConfig(epochs=2, batch=3),
        output=OutputConfig(place / name),
    )


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_task_of_a_users_file_measures_judges_and_draws(place, ranks):
    folder = place / f"run-{ranks}"
    run_local(job, ranks, run_of(place, folder.name), 1, (ranks, 1, 1))
    events = list(log.read(folder / "log.jsonl"))
    last = [event for event in events if event["event"] == "validation"][-1]
    assert 0 < last["loss"] < last["worst"]
    assert (last["samples"], set(last) >= {"loss", "worst"}) == (3, True)
    steps = [event["loss"] for event in events if event["event"] == "step"]
    assert (folder / "result.png").read_text() == f"{len(steps)} steps"
    assert '"worst"' in (folder / "errors.json").read_text()
    pictures = [path.read_bytes() for path in (folder / "samples").glob("epoch-*.png")]
    assert pictures == [b"a sample"] * 2
    if ranks > 1:
        whole = list(log.read(place / "run-1/log.jsonl"))
        for name, key in (("step", "loss"), ("validation", "worst")):
            found, one = ([e[key] for e in each if e["event"] == name] for each in (events, whole))
            assert found == pytest.approx(one, rel=1e-5)


def test_its_network_predicts_and_is_exported_only_by_name(place, tmp_path, capfd):
    run_local(job, 1, run_of(place, "run"))
    run, table = str(place / "run"), tmp_path / "found.csv"
    command = ["predict", run, str(place / "universes"), "-o", str(table)]
    own = [f"--factory={place}/mine.py:make", f"--task={place}/mine.py:TwoValues"]
    assert main(command) == 2
    assert "if you trust it" in capfd.readouterr().err
    # It has another number of outputs than the data set has targets.
    assert main([*command, *own]) == 0, capfd.readouterr().err
    with table.open(newline="") as file:
        header, *rows = csv.reader(file)
    assert header[-2:] == ["predicted 0", "predicted 1"]
    assert [len(row) for row in rows] == [len(header)] * 3
