"""Tests of checkpoints that a run can't go on from: damaged, of another run, or not writable."""

from __future__ import annotations

import shutil
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import h5py
import pytest

from pydist.comm import run_local
from pydist.data import Manifest
from pydist.errors import (
    CheckpointError,
    DiskError,
    UsageError,
)  # fmt: skip
from pydist.train import checkpoint, metadata
from pydist.train.config import Config
from support.data.damage import flip
from support.training.runs import (
    alone,
    change,
    events,
    job,
    slow_run,
)


@pytest.fixture
def config(universes, tmp_path) -> Config:
    return slow_run(universes, tmp_path / "run")


def test_resume_never_and_must(config):
    config = change(config, train={"steps": 1})
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        alone(change(config, checkpoint={"resume": "must"}))
    alone(config)
    with pytest.raises(UsageError, match=r"the last is step-000001.*choose another output\.folder"):
        alone(change(config, checkpoint={"resume": "never"}))
    alone(change(config, checkpoint={"resume": "must"}))


def test_a_damaged_checkpoint_is_refused_on_all_ranks_and_the_previous_offered(config):
    alone(change(config, checkpoint={"every": 1}, train={"steps": 2}))
    path = config.output.folder / "ckpt" / "step-000002" / "optimizer.safetensors"
    flip(path, -1)
    with pytest.raises(
        CheckpointError, match=r"step-000002 is damaged.*previous one is .*step-000001"
    ):
        run_local(job, 2, config, 2, (1, 1, 1))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"train": {"batch": 2}}, CheckpointError, "train.batch is 3 there and 2 here; set it"),
        ({"train": {"seed": 1}}, CheckpointError, "train.seed is 0 there and 1 here; set it"),
        ({"model": {"variant": "paper"}}, CheckpointError, "does not match this run"),
        ({"model": {"dropout": 0.25}}, CheckpointError, "model.dropout is None there and 0.25"),
        ({"model": {"statistics": "rank"}}, CheckpointError, "model.statistics is 'global' there"),
        (
            {"data": {"normalize": "mean"}},
            CheckpointError,
            "data.normalize is 'log1p' there and 'mean' here",
        ),
        ({"train": {"clip_norm": 1.0}}, CheckpointError, "train.clip_norm is None there and 1.0"),
        (
            {"model": {"variant": "paper"}},
            CheckpointError,
            "model.variant is 'mlperf' there and 'paper' here",
        ),
        (
            {"train": {"amp": "fp16"}},
            CheckpointError,
            "train.amp is 'off' there and 'fp16' here",
        ),
        (
            {"optimizer": {"name": "sgd"}},
            CheckpointError,
            "optimizer.name is 'adam' there and 'sgd' here",
        ),
        ({"optimizer": {"lr": 0.1}}, CheckpointError, "optimizer.lr is 0.0001 there and 0.1 here"),
        (
            {"optimizer": {"warmup_epochs": 1.0}},
            CheckpointError,
            "optimizer.warmup_epochs is 0.0 there and 1.0 here",
        ),
    ],
)
def test_a_checkpoint_of_another_run_is_refused_and_nothing_is_changed(
    whole_run, changes, error, message
):
    config, _ = whole_run
    before = (config.output.folder / "config.toml").read_bytes()
    with pytest.raises(error, match=message):
        alone(change(config, **changes))
    assert (config.output.folder / "config.toml").read_bytes() == before


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("files", None, r"dataset.json: samples .*\(SHA-256\) is '[0-9a-f]{64}' there and"),
        ("log1p_mean", (0.5,) * 4, r"dataset.json: log1p_mean is \[.*\] there and \[0.5, 0.5,"),
        ("target_names", tuple("abcd"), "dataset.json: target_names is .* there and"),
    ],
)
def test_a_run_does_not_go_on_with_other_data(config, tmp_path, key, value, message):
    root = tmp_path / "data"
    shutil.copytree(config.data.path, root)
    config = change(config, data={"path": root})
    alone(change(config, train={"steps": 1}))
    manifest = Manifest.load(root)
    replace(manifest, **{key: manifest.files[::-1] if value is None else value}).save(root)
    with pytest.raises(CheckpointError, match=message):
        alone(config)


def test_a_checkpoint_loads_where_h5py_is_serial(config, tmp_path, monkeypatch):
    """A run with MPI-IO on a cluster; how data are read does not matter for its network."""
    monkeypatch.setattr(h5py, "get_config", lambda: SimpleNamespace(mpi=False))
    alone(change(config, train={"steps": 1}))
    parts = checkpoint.read(checkpoint.complete(config.output.folder / "ckpt")[-1])
    about = parts["about"]
    about["config"] = about["config"].replace("mpi_io = false", "mpi_io = true")
    checkpoint.write(tmp_path / "copied", parts.pop("step"), parts)
    found, _ = metadata.load_trained(tmp_path / "copied")
    assert found.config.model == config.model
    assert found.config.data.mpi_io
    wanted = change(config, model={"variant": "paper"}, data={"normalize": "mean"})
    assert metadata.differences(about, metadata.CheckpointMetadata(wanted, found.manifest).dump()
    ).startswith("model.variant is 'mlperf' there and 'paper' here; data.normalize is")  # fmt: skip
    with pytest.raises(UsageError, match="needs h5py built with the site's MPI"):
        alone(change(config, data={"mpi_io": True}))


@pytest.mark.parametrize(
    ("first", "then", "message"),
    [
        ({"name": "sgd"}, {"name": "sgd", "momentum": 0.5}, "optimizer.momentum is 0.9 there"),
        ({"name": "sgd"}, {"name": "sgd", "momentum": 0.0}, "optimizer.momentum is 0.9 there"),
        ({"name": "sgd"}, {"name": "sgd", "sharded": "always"}, None),
        ({}, {"sharded": "always"}, None),
    ],
)
def test_settings_that_do_not_count_for_an_optimizer_may_change(config, first, then, message):
    alone(change(config, train={"steps": 1}, optimizer=first))
    again = change(config, train={"steps": 2}, optimizer=then)
    with nullcontext() if message is None else pytest.raises(CheckpointError, match=message):
        alone(again)


def test_an_older_checkpoint_shows_its_optimizer_by_the_state(config, monkeypatch):
    message = "the optimizer has .*betas.* there and .*momentum.* here"
    with monkeypatch.context() as patch:
        patch.setattr(metadata, "_effective", lambda optimizer: {})
        alone(change(config, train={"steps": 1}))
    with pytest.raises(CheckpointError, match=message):
        alone(change(config, optimizer={"name": "sgd"}))


def test_a_checkpoint_that_can_not_be_written_stops_or_warns(config):
    config.output.folder.mkdir()
    (config.output.folder / "ckpt").write_text("in the way")
    config = change(config, train={"steps": 1})
    with pytest.raises(DiskError, match="ckpt: it is a file, and a folder is needed"):
        run_local(job, 2, config, 2, (1, 1, 1))
    assert not events(config, "step")  # refused before the first
    alone(change(config, checkpoint={"on_error": "warn"}))
    assert "continuing without a checkpoint" in events(config, "notice")[0]["text"]


def test_a_copy_of_a_checkpoint_is_not_taken_for_a_later_one(config):
    alone(change(config, train={"steps": 1}))
    folder = config.output.folder / "ckpt"
    shutil.copytree(folder / "step-000001", folder / "step-000007")
    with pytest.raises(CheckpointError, match="step-000007 is damaged: it is a copy of that of st"):
        alone(change(config, train={"steps": 2}))
