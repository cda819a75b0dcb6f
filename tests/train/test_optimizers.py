"""Tests that runs reach every optimizer and schedule, and that ranks train as one."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import nn

from pydist.comm import LocalTransport, run_local
from pydist.errors import UsageError
from pydist.models import CosmoFlow
from pydist.train import config_io
from pydist.train.config import (
    Config,
    CosmoFlowConfig,
    DataConfig,
    LarsConfig,
    OutputConfig,
    SgdConfig,
    TrainConfig,
)
from support.training.runs import change, curve, events, job

TABLES = {
    "lars": {"name": "lars", "lr": 0.5, "decay": "polynomial", "warmup_epochs": 1.0},
    "lamb": {"name": "lamb", "lr": 0.01, "weight_decay": 0.01, "decay": "cosine"},
    "nesterov": {"name": "sgd", "lr": 1e-3, "nesterov": True, "warmup_epochs": 0.5},
    "mlperf": {
        "name": "sgd", "lr": 1e-3, "form": "paper", "weight_decay": 0.02, "decay": "step",
        "decayed": ("head.fc[12].weight",), "milestones": ((1.0, 0.5), (2.0, 0.25)),
    },
}  # fmt: skip


@pytest.fixture
def config(universes, tmp_path) -> Config:
    return Config(
        model=CosmoFlowConfig(variant="mlperf", width=32, dropout=0.0),
        data=DataConfig(path=universes, normalize="log1p"),
        train=TrainConfig(epochs=3, batch=3, steps=4),
        output=OutputConfig(folder=tmp_path / "run", plot=False),
    )


def rates(config: Config) -> list[float]:
    return [event["lr"] for event in events(config, "step")]


@pytest.mark.parametrize(
    ("kind", "grid", "sharded"),
    [("lars", (1, (2, 1, 1)), "always"), ("lamb", (2, (1, 1, 1)), "always"),
     ("nesterov", (1, (2, 1, 1)), "never"), ("mlperf", (2, (1, 1, 1)), "always")], ids=str,
)  # fmt: skip
def test_ranks_train_as_one(config, tmp_path, kind, grid, sharded):
    alone = change(config, optimizer=TABLES[kind])
    job(LocalTransport(), alone)
    split = change(alone, output={"folder": tmp_path / "split"}, optimizer={"sharded": sharded})
    run_local(lambda world: job(world, split, *grid), 2)
    assert curve(split) == pytest.approx(curve(alone), rel=1e-4)
    assert rates(split) == rates(alone)


@pytest.mark.parametrize("kind", ["lars", "lamb"])
def test_a_run_resumes_with_the_same_steps(config, tmp_path, kind):
    whole = change(config, optimizer=TABLES[kind])
    job(LocalTransport(), whole)
    parts = change(whole, output={"folder": tmp_path / "parts"})
    job(LocalTransport(), change(parts, train={"steps": 2}))
    job(LocalTransport(), parts)
    assert curve(parts) == curve(whole)


@pytest.mark.parametrize(("scaling", "factor"), [("linear", 2), ("sqrt", 2**0.5)])
def test_rates_count_samples(config, tmp_path, scaling, factor):
    """At twice the batch, a rate for half the batch is larger, and follows the same samples."""
    table = {"lr": 1e-3, "lr_batch": 1, "warmup_epochs": 1.0, "decay_epochs": 2.0, "end_lr": 1e-5}
    table["lr_scaling"] = scaling
    seen = {}
    for batch in (1, 2):
        own = change(config, train={"batch": batch, "steps": None}, optimizer=table,
                     output={"folder": tmp_path / str(batch)})  # fmt: skip
        job(LocalTransport(), own)
        seen[batch] = rates(own)
    assert seen[2] == pytest.approx([factor * rate for rate in seen[1][::2]], rel=1e-12)
    assert max(seen[2]) == pytest.approx(factor * 1e-3, rel=1e-12)


def test_weight_decay_of_named_parameters():
    model = CosmoFlow(32, variant="mlperf")
    groups = SgdConfig(weight_decay=0.02, decayed=("head.fc[12].weight",)).groups(model)
    decayed, rest = groups
    assert [id(p) for p in decayed["params"]] == [
        id(model.head.fc1.weight),
        id(model.head.fc2.weight),
    ]
    assert rest["weight_decay"] == 0.0
    assert len(decayed["params"]) + len(rest["params"]) == len(list(model.parameters()))
    with pytest.raises(UsageError, match="fits no parameter; there are, for example"):
        SgdConfig(decayed=("head.dense1.weight",)).groups(model)


def test_settings_reach_the_optimizer():
    model = nn.Sequential(nn.Conv3d(1, 2, 3), nn.Linear(4, 2))
    table = LarsConfig(lr=0.5, lr_batch=8, weight_decay=0.1, trust_coefficient=0.02, form="torch")
    scaled = table.at(32)
    optimizer = scaled.optimizer(scaled.groups(model))
    weights, biases = optimizer.param_groups
    found = {name: weights[name] for name in ("lr", "weight_decay", "trust_coefficient", "form")}
    assert found == {"lr": 2.0, "weight_decay": 0.1, "trust_coefficient": 0.02, "form": "torch"}
    assert biases["weight_decay"] == 0.0
    inside = SgdConfig(lr=0.1, form="paper").optimizer(model.parameters())
    assert not any(group["adapt"] for group in inside.param_groups)
    assert math.isclose(inside.param_groups[0]["momentum"], 0.9)
    assert isinstance(SgdConfig(nesterov=True).optimizer(model.parameters()), torch.optim.SGD)
    assert json.dumps(scaled.end_lr) == json.dumps(table.end_lr * 4)


@pytest.mark.parametrize(("kind", "sharded"), [("lars", "auto"), ("nesterov", "always")])
def test_weights_in_slices_train_and_resume_as_whole_ones(config, tmp_path, kind, sharded):
    """Checkpoints are those of the whole network: a run goes on with whole weights on one rank."""
    whole = change(config, optimizer=TABLES[kind])
    job(LocalTransport(), whole)
    ranks, depth = (4, 2) if sharded == "always" else (2, 1)
    mesh = {"channel": 2, "sharded_weights": True, "spatial": (depth, 1, 1)}
    split = change(
        whole, output={"folder": tmp_path / "split"}, mesh=mesh, optimizer={"sharded": sharded}
    )
    first = change(split, train={"steps": 2})
    run_local(lambda world: job(world, first, spatial=(depth, 1, 1)), ranks)
    alone = {"channel": 1, "sharded_weights": False, "spatial": (1, 1, 1)}
    job(LocalTransport(), change(split, mesh=alone, train={"steps": 3}))
    run_local(lambda world: job(world, split, spatial=(depth, 1, 1)), ranks)
    assert curve(split) == pytest.approx(curve(whole), rel=1e-4)


@pytest.mark.parametrize(
    ("optimizer", "mesh", "message"),
    [
        ({"decay": "step"}, {}, "needs milestones, as in"),
        ({"milestones": ((1.0, 0.5),)}, {}, 'they are for decay = "step", and it is "linear"'),
        ({"decay": "step", "milestones": ((2.0, 0.5), (1.0, 0.1))}, {}, "ascending epochs"),
        ({"lr": 1e-3, "end_lr": 1e-2}, {}, r"optimizer\.end_lr = 0\.01 is above optimizer\.lr"),
        ({"name": "sgd", "nesterov": True, "momentum": 0.0}, {}, "needs optimizer.momentum > 0"),
        ({"name": "lars", "nesterov": True, "momentum": 0.0}, {}, "needs optimizer.momentum > 0"),
        ({}, {"sharded_weights": True}, "along mesh.channel, which is 1"),
        ({}, {"sharded_weights": True, "stages": 2}, "along mesh.channel, which is 1"),
    ],
)
def test_settings_that_do_not_suit_each_other_are_named_before_anything_starts(
    config, optimizer, mesh, message
):
    wrong = change(config, optimizer=optimizer, mesh=mesh)
    with pytest.raises(UsageError, match=message):
        config_io.from_tables(config_io.to_dict(wrong), "run.toml")
