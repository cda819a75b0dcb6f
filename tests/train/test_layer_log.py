"""Tests of the norms and trust ratios in the log of a run."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pydist.comm import LocalTransport, run_local
from pydist.optim import LAMB, LARS, trust_ratios
from pydist.train import config_io
from pydist.train.config import StageConfig
from support.training.runs import change, events, in_stages, job

LARS_TABLE = {"name": "lars", "lr": 0.5, "weight_decay": 5e-4, "log_every": 2}


@pytest.mark.parametrize("kind", [LARS, LAMB])
def test_norms_and_ratios_are_those_of_the_step(kind):
    """Of LARS by its formula; of both, the weight moves by rate times ratio times direction."""
    torch.manual_seed(0)
    model = nn.Linear(5, 3).double()
    before = model.weight.detach().clone()
    model(torch.rand(4, 5).double()).square().mean().backward()
    optimizer = kind(model.parameters(), 0.3, weight_decay=0.0)
    optimizer.recorded = {}
    optimizer.step()
    found = trust_ratios(optimizer, model.named_parameters())
    assert list(found) == ["weight"]  # the bias is excluded
    weight, direction, ratio = found["weight"]
    assert weight == pytest.approx(float(before.norm()), rel=1e-12)
    assert 0.3 * ratio * direction == pytest.approx(
        float((model.weight.detach() - before).norm()), rel=1e-9
    )
    if kind is LARS:
        assert direction == pytest.approx(float(model.weight.grad.norm()), rel=1e-12)
        assert ratio == pytest.approx(0.001 * weight / direction, rel=1e-12)


@pytest.mark.parametrize(
    ("optimizer", "mesh", "ranks"),
    [
        ({"sharded": "always"}, {"spatial": (2, 1, 1)}, 2),
        ({"sharded": "never"}, {"spatial": (2, 1, 1)}, 2),
        ({}, {"channel": 2, "sharded_weights": True}, 2),
        ({"name": "lamb", "lr": 0.01, "sharded": "always", "log_every": 2}, {}, 2),
    ],
    ids=["partitioned", "whole", "slices", "lamb"],
)
def test_ranks_log_the_norms_of_whole_layers(config, tmp_path, optimizer, mesh, ranks):
    table = {**LARS_TABLE, **optimizer}
    alone = change(config, optimizer={k: v for k, v in table.items() if k != "sharded"})
    job(LocalTransport(), alone)
    split = change(config, optimizer=table, mesh=mesh, output={"folder": tmp_path / "split"})
    data = 2 if not mesh else 1
    run_local(job, ranks, split, data, split.mesh.spatial)
    assert [event["step"] for event in events(split, "layers")] == [2, 4]
    for found, expected in zip(events(split, "layers"), events(alone, "layers"), strict=True):
        assert found["layers"].keys() == expected["layers"].keys()
        assert all(name.endswith("weight") for name in found["layers"])
        for name, row in expected["layers"].items():
            assert found["layers"][name] == pytest.approx(row, rel=2e-3)


def test_stages_log_the_layers_of_all(config, tmp_path):
    alone = change(config, optimizer=LARS_TABLE)
    job(LocalTransport(), alone)
    staged = change(
        alone, mesh={"stages": (StageConfig(), StageConfig())}, output={"folder": tmp_path / "s"}
    )
    in_stages(staged)
    for found, expected in zip(events(staged, "layers"), events(alone, "layers"), strict=True):
        assert list(found["layers"]) == list(expected["layers"])
        for name, row in expected["layers"].items():
            assert found["layers"][name] == pytest.approx(row, rel=2e-3)


def test_nothing_is_logged_unless_wanted_and_a_run_goes_on_with_other_entries(config):
    quiet = change(config, optimizer={**LARS_TABLE, "log_every": 0}, checkpoint={"every": 1})
    job(LocalTransport(), change(quiet, train={"steps": 2}))
    assert events(quiet, "layers") == []
    job(LocalTransport(), change(quiet, optimizer={"log_every": 1}))
    assert [event["step"] for event in events(quiet, "layers")] == [3, 4]


def test_other_optimizers_have_no_trust_ratios(config):
    tables = config_io.to_dict(config)
    tables["optimizer"]["log_every"] = 1
    with pytest.raises(Exception, match=r"optimizer\.log_every is not a setting"):
        config_io.from_tables(tables, "run.toml")
