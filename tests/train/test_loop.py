"""Tests of training: a split run equals the one-rank run, and a resumed run an unbroken one."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import signal
from contextlib import nullcontext
from dataclasses import replace

import h5py
import pytest
import torch

from pydist.backend import conv_tuning
from pydist.comm import LocalTransport, run_local
from pydist.data import Manifest, UniverseOptions, generate_universes
from pydist.errors import (
    CheckpointError,
    DataError,
    DiskError,
    PydistError,
    Stopped,
    UsageError,
)  # fmt: skip
from pydist.train import checkpoint, log, metadata, report
from pydist.train.config import Config, SharesConfig
from pydist.train.folder import TUNING_FILE
from pydist.train.run import Result
from pydist.train.signals import ending_at_once
from support.training.runs import assert_same_bits, change, job, last_state, universe_run


def alone(config, listeners=()):
    """Runs training on one rank in this thread."""
    return job(LocalTransport(), config, listeners=listeners)


def events(config, kind: str) -> list[dict]:
    path = config.output.folder / "log.jsonl"
    return [event for event in log.read(path) if event["event"] == kind]


def curve(config) -> list[float]:
    return list(log.losses(config.output.folder / "log.jsonl").values())


def slow_run(universes, folder) -> Config:
    """Returns a run at a low rate.

    Adam's steps depend on the signs of gradients: at a high rate, errors of rounding grow in them.
    """
    return change(universe_run(universes, folder), optimizer={"lr": 1e-4})


@pytest.fixture
def config(universes, tmp_path) -> Config:
    return slow_run(universes, tmp_path / "run")


@pytest.fixture(scope="module")
def whole_run(universes, tmp_path_factory) -> tuple[Config, Result]:
    """Returns the same run after it has trained on one rank, and its result."""
    config = slow_run(universes, tmp_path_factory.mktemp("whole") / "run")
    return config, alone(config)


@pytest.mark.parametrize(
    ("data", "spatial", "channel", "shares"),
    [
        (2, (2, 1, 1), 1, {}), (1, (1, 2, 2), 1, {}), (3, (1, 1, 1), 1, {}),
        (2, (1, 1, 1), 3, {}),
        (1, (2, 1, 1), 2, {"depth": (5.0, 2.0), "channel": (1.0, 3.0)}),
        (2, (2, 1, 1), 1, {"data": (1.0, 2.0), "depth": (5.0, 2.0)}),
    ],
)  # fmt: skip
def test_split_training_is_that_of_one_rank(config, whole_run, data, spatial, channel, shares):
    """Training has dropout, a batch uneven for two groups, and unequal validation shares."""
    mesh = {"spatial": spatial, "channel": channel, "shares": SharesConfig(**shares)}
    config = change(config, mesh=mesh)
    whole, expected = whole_run
    results = run_local(job, data * channel * math.prod(spatial), config, data, spatial)
    assert curve(config) == pytest.approx(curve(whole), abs=5e-6)
    for result in results:
        assert result.steps == 4
        assert result.validation.samples == 3
        assert result.validation.loss == pytest.approx(expected.validation.loss, abs=1e-5)
        assert result.validation.mae == pytest.approx(expected.validation.mae, abs=1e-5)
        assert torch.equal(result.validation.predicted, results[0].validation.predicted)


@pytest.mark.parametrize(
    ("ranks", "data", "spatial", "model"),
    [
        (4, 2, (2, 1, 1), {}),
        (2, 2, (1, 1, 1), {"variant": "paper", "batch_norm": True}),
    ],
    ids=["split", "batch norm"],
)
def test_a_resumed_run_is_bit_identical_to_an_uninterrupted_one(
    config, tmp_path, ranks, data, spatial, model
):
    """The interruption is within an epoch, so the sampler's position counts."""
    config = change(config, model=model)
    through = change(config, output={"folder": tmp_path / "through"})
    run_local(job, ranks, through, data, spatial)
    run_local(job, ranks, change(config, train={"steps": 3}), data, spatial)
    run_local(job, ranks, config, data, spatial)
    assert [event["step"] for event in events(config, "start")] == [0, 3]
    assert curve(config) == curve(through)
    assert_same_bits(last_state(config), last_state(through))


@pytest.fixture
def tuned(monkeypatch, tmp_path):
    """Replaces measurements so that each run finds other kernels fastest."""
    monkeypatch.setenv("PYDIST_TUNE", "1")
    monkeypatch.setenv("PYDIST_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(conv_tuning, "_MEASURED_FLOPS", 0)
    seconds = iter(range(1, 1 << 20))

    def visit(self, name):
        return 1.0 / next(seconds)

    monkeypatch.setattr(conv_tuning.Visits, "__call__", visit)


def test_a_resumed_run_keeps_its_choices_of_kernels_and_another_can_take_them(
    tuned, config, tmp_path
):
    config = change(config, checkpoint={"every": 1})
    run_local(job, 2, change(config, train={"steps": 1}), 1, (2, 1, 1))
    first = json.loads((config.output.folder / TUNING_FILE).read_bytes())
    assert len(first) == 1  # one sample group
    assert first[0]
    run_local(job, 2, config, 1, (2, 1, 1))
    assert json.loads((config.output.folder / TUNING_FILE).read_bytes()) == first
    pinned = change(
        config,
        output={"folder": tmp_path / "pinned"},
        train={"tuning": config.output.folder / TUNING_FILE},
    )
    run_local(job, 2, pinned, 1, (2, 1, 1))
    assert curve(pinned) == curve(config)
    assert_same_bits(last_state(pinned), last_state(config))
    free = change(config, output={"folder": tmp_path / "free"})
    run_local(job, 2, free, 1, (2, 1, 1))
    assert json.loads((free.output.folder / TUNING_FILE).read_bytes()) != first
    said = [e["text"] for e in events(free, "notice")]
    assert said[0].startswith("autotuning the kernels of convolutions")
    assert any(re.match(r"autotuned \d+ convolutions in \d+\.\d s so far", text) for text in said)
    assert not list(events(pinned, "notice"))


def test_a_missing_tuning_file_is_named(config, tmp_path):
    config = change(config, train={"tuning": tmp_path / "no.json"})
    with pytest.raises(UsageError, match=r"the tuning file .*no\.json can't be used"):
        run_local(job, 2, config, 1, (2, 1, 1))


def test_a_shared_optimizer_step_is_the_unshared_one(config, tmp_path):
    """Gradients are clipped; any number of ranks can resume from its checkpoint."""
    config = change(config, train={"clip_norm": 0.5}, checkpoint={"every": 1})
    shared = change(config, optimizer={"sharded": "always"}, output={"folder": tmp_path / "shared"})
    run_local(job, 4, config, 2, (2, 1, 1))
    run_local(job, 4, change(shared, train={"steps": 2}), 2, (2, 1, 1))
    run_local(job, 4, shared, 2, (2, 1, 1))
    assert curve(shared) == pytest.approx(curve(config), rel=1e-6)
    run_local(job, 2, change(shared, train={"epochs": 3, "steps": 5}), 1, (1, 2, 1))
    alone(change(shared, optimizer={"sharded": "never"}, train={"epochs": 3}))
    assert len(curve(shared)) == 6


def test_a_shared_optimizer_step_without_clipping_keeps_every_bit(config, tmp_path):
    shared = change(config, optimizer={"sharded": "always"}, output={"folder": tmp_path / "shared"})
    run_local(job, 2, config, 1, (2, 1, 1))
    run_local(job, 2, shared, 1, (2, 1, 1))
    assert curve(shared) == curve(config)
    assert_same_bits(last_state(shared), last_state(config))


def test_a_checkpoint_goes_on_with_another_number_of_ranks(config, whole_run):
    run_local(job, 4, change(config, train={"steps": 1}), 2, (1, 1, 2))
    run_local(job, 2, change(config, train={"steps": 2}), 1, (2, 1, 1))
    run_local(job, 3, change(config, train={"steps": 3}), 3, (1, 1, 1))
    alone(config)
    assert curve(config) == pytest.approx(curve(whole_run[0]), abs=5e-6)


class Killed(BaseException):
    """Simulated kill of the process, which leaves the run's files as they are."""


def validations(config) -> dict[int, tuple]:
    """Returns the validation results by step; asserts that no step is validated twice."""
    found = [(e["step"], (e["epoch"], e["loss"], e["mae"])) for e in events(config, "validation")]
    assert len(found) == len(dict(found))
    return dict(found)


@pytest.mark.parametrize(("end", "step"), [("killed", 2), ("killed", 4), ("signal", 4)])
def test_a_validation_that_was_cut_off_is_done_on_resume(config, whole_run, end, step):
    """After the last checkpoint the final results are missing as well."""
    through = whole_run[0]

    def interrupt(event):
        if end == "signal" and event["event"] == "step" and event["step"] == step - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        if end == "killed" and event["event"] == "checkpoint" and event["step"] == step:
            raise Killed

    with pytest.raises((Stopped, Killed)):
        alone(config, [interrupt])
    assert step not in validations(config)
    alone(config)
    assert curve(config) == curve(through)
    assert_same_bits(last_state(config), last_state(through))
    assert validations(config) == validations(through)
    name = "predictions.csv"
    assert (config.output.folder / name).read_text() == (through.output.folder / name).read_text()
    assert not events(config, "notice")


def test_results_that_were_cut_off_are_written_on_resume_and_a_complete_run_says_so(
    config, monkeypatch
):
    with monkeypatch.context() as patch:
        patch.setattr(report, "write_predictions", kill)
        with pytest.raises(Killed):
            alone(config)
    table = config.output.folder / "predictions.csv"
    assert not table.exists()
    alone(config)
    assert len(table.read_text().splitlines()) == 4
    assert not events(config, "notice")
    table.unlink()
    result = run_local(job, 2, config, 2)[0]
    assert result.validation is None
    assert [e["step"] for e in events(config, "step")] == [1, 2, 3, 4]
    (notice,) = events(config, "notice")
    assert notice["text"].startswith("nothing left to do: step 4 of 4 is done")


def kill(*_) -> None:
    raise Killed


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_saves_and_stops_and_the_run_goes_on_from_there(config, whole_run, number):
    def interrupt(event):
        if event["event"] == "step" and event["step"] == 1:
            os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    with pytest.raises(Stopped, match=f"stopped by {number.name} after step 2, checkpoint saved"):
        alone(config, [interrupt])
    assert signal.getsignal(number) is before
    assert events(config, "end")[-1]["status"] == "stopped"
    assert [p.name for p in checkpoint.complete(config.output.folder / "ckpt")] == ["step-000002"]
    alone(config)
    assert curve(config) == curve(whole_run[0])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_before_and_after_its_steps_a_signal_ends_a_run_at_once(config, monkeypatch, number):
    def interrupt(event):
        if event["event"] == "start":
            os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    with ending_at_once():
        with pytest.raises(Stopped, match=f"stopped by {number.name} before or after training"):
            alone(config, [interrupt])
        assert not events(config, "step")
        with monkeypatch.context() as patch:
            patch.setattr(report, "write_predictions", lambda *_: os.kill(os.getpid(), number))
            with pytest.raises(Stopped):
                alone(config)
        assert alone(config).steps == 4
    assert signal.getsignal(number) is before


def test_a_signal_to_one_rank_stops_all_at_the_same_step(config, monkeypatch):
    """A rank that stopped alone would leave the others waiting."""
    from pydist.train import loop

    class Request(loop.StopRequest):
        def __init__(self):
            super().__init__()
            made.append(self)

    made = []
    monkeypatch.setattr(loop, "StopRequest", Request)

    def interrupt(event):
        if event["event"] == "step":
            made[1].signal = signal.SIGUSR1

    with pytest.raises(Stopped, match="checkpoint saved"):
        run_local(job, 3, config, 3, (1, 1, 1), [interrupt])
    assert len(events(config, "step")) == 2


def test_divergence_ends_the_run_with_one_line(config):
    config = change(config, optimizer={"lr": 1e30})
    with pytest.raises(
        PydistError, match=r"the loss is \S+ at step \d .*diverged at learning rate"
    ):
        alone(config)
    assert events(config, "end")[-1]["status"] == "failed"


def test_a_sample_with_nan_is_named(config, tmp_path):
    folder = tmp_path / "damaged"
    manifest = generate_universes(
        folder,
        UniverseOptions(count=2, width=32, box_width=32, validation=0.0, dtype="float32"),
    )
    with h5py.File(folder / manifest.files[1].path, "r+") as file:
        file["full"][0, 1, 2, 3] = math.nan
    config = change(config, data={"path": folder}, train={"batch": 2})
    with pytest.raises(DataError, match=r"nan at channel 0, voxel \(1, 2, 3\)") as caught:
        run_local(job, 2, config, 1, (2, 1, 1))
    assert str(folder / manifest.files[1].path) in str(caught.value)


def test_clipping_bounds_the_step_by_the_global_norm(config):
    """The second of two clipped SGD steps with momentum 0.9 is at most 1.9 clips long."""
    config = change(
        config,
        train={"clip_norm": 1e-3, "steps": 2},
        optimizer={"name": "sgd", "lr": 1.0},
        checkpoint={"every": 1},
    )
    run_local(job, 4, config, 2, (2, 1, 1))
    first, second = (
        checkpoint.read(path)["model"]
        for path in checkpoint.complete(config.output.folder / "ckpt")
    )
    squares = sum((second[name] - first[name]).double().square().sum() for name in first)
    assert 0.1e-3 < math.sqrt(squares) <= 1.9e-3 * 1.001


@pytest.mark.parametrize("amp", ["bf16", "fp16"])
def test_mixed_precision_trains_and_keeps_the_scale_in_the_checkpoint(config, tmp_path, amp):
    config = change(config, train={"batch": 1, "steps": 2, "validate_every": 0})
    plain = change(config, output={"folder": tmp_path / "plain"})
    alone(plain)
    config = change(config, train={"amp": amp})
    run_local(job, 2, config, 1, (2, 1, 1))
    assert curve(config) == pytest.approx(curve(plain), rel=0.1)
    assert curve(config) != curve(plain)
    assert ("scale" in last_state(config)["scaler"]) == (amp == "fp16")


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
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    with pytest.raises(
        CheckpointError, match=r"step-000002 is damaged.*previous one is .*step-000001"
    ):
        run_local(job, 2, config, 2, (1, 1, 1))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"train": {"batch": 2}}, UsageError, "the saved sampler has batch_size=3"),
        ({"train": {"seed": 1}}, UsageError, "the saved sampler has seed=0"),
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


def test_a_run_in_the_folder_of_its_data_is_refused(config, tmp_path):
    data = tmp_path / "link"
    data.symlink_to(config.data.path)
    before = sorted(config.data.path.rglob("*"))
    config = change(config, output={"folder": data})
    with pytest.raises(UsageError, match=r"output\.folder = .* is the data set's folder, data\."):
        run_local(job, 1, config)
    assert sorted(config.data.path.rglob("*")) == before


@pytest.mark.parametrize("name", ["config.toml", "log.jsonl", "predictions.csv", "result.png"])
def test_files_of_others_in_the_folder_stay_as_they_are(config, name):
    folder = config.output.folder
    folder.mkdir()
    (folder / name).write_text("by hand")
    with pytest.raises(UsageError, match=f"{name} exists, and .* is not the folder of a run"):
        run_local(job, 1, config)
    assert [path.name for path in folder.iterdir()] == [name]
    assert (folder / name).read_text() == "by hand"
    (folder / name).write_text("")  # an empty file, as by `touch`
    run_local(job, 1, config)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("log.jsonl", "it is no regular file, and a file is needed"),
        ("predictions.csv", "it is no regular file, and a file is needed"),
        ("ckpt/last", "it is no link, and a link to the last checkpoint is needed"),
    ],
)
def test_what_no_file_or_link_can_replace_is_named_before_anything_is_done(config, name, message):
    alone(change(config, train={"steps": 1}))
    path = config.output.folder / name
    path.unlink()
    if name == "ckpt/last":
        path.mkdir()
    else:
        os.mkfifo(path)
    before = sorted(config.output.folder.rglob("*"))
    with pytest.raises(DiskError, match=f"{name}: {message}"):
        alone(change(config, train={"steps": 2}))
    assert sorted(config.output.folder.rglob("*")) == before


def test_a_copy_of_a_checkpoint_is_not_taken_for_a_later_one(config):
    alone(change(config, train={"steps": 1}))
    folder = config.output.folder / "ckpt"
    shutil.copytree(folder / "step-000001", folder / "step-000007")
    with pytest.raises(CheckpointError, match="step-000007 is damaged: it is a copy of that of st"):
        alone(change(config, train={"steps": 2}))


def test_a_run_goes_on_without_its_log_or_without_checkpoints(config):
    folder = config.output.folder
    run_local(job, 1, config)
    (folder / "log.jsonl").unlink()
    run_local(job, 1, config)  # from its checkpoints
    shutil.rmtree(folder / "ckpt")
    run_local(job, 1, config)  # from its log
    assert (folder / "config.toml").stat().st_size


def test_a_folder_in_the_place_of_a_result_is_refused_before_the_first_step(config):
    (config.output.folder / "predictions.csv").mkdir(parents=True)
    with pytest.raises(DiskError, match=r"predictions\.csv: it is a folder, and a file is needed"):
        alone(config)
    assert [path.name for path in config.output.folder.iterdir()] == ["predictions.csv"]


def test_what_an_interrupted_write_left_is_removed_and_told(config):
    left = config.output.folder / "ckpt" / f"step-000007.tmp-{'0' * 32}"
    left.mkdir(parents=True)
    os.utime(left, (0, 0))
    alone(change(config, train={"steps": 1}))
    assert f"removed {left}" in events(config, "notice")[0]["text"]
    assert not left.exists()


def test_wrong_width_and_missing_data_are_told_apart(config, tmp_path):
    with pytest.raises(UsageError, match=r"width is 64, but the samples .* are 32 × 32 × 32"):
        alone(change(config, model={"width": 64}))
    with pytest.raises(DataError, match="no such folder"):
        run_local(job, 2, change(config, data={"path": tmp_path / "nowhere"}), 2, (1, 1, 1))


def test_where_a_steps_time_goes_adds_up(config):
    run_local(job, 2, change(config, train={"steps": 2}), 1, (2, 1, 1))
    for event in events(config, "step"):
        assert {"compute", "halo", "gradients", "data"} <= event["parts"].keys()
        assert sum(event["parts"].values()) == pytest.approx(event["seconds"], rel=1e-6)
        assert event["samples_per_second"] == pytest.approx(3 / event["seconds"])


def test_ranks_with_different_settings_do_not_start(config):
    def body(world):
        mine = change(config, optimizer={"lr": 1e-3 * (1 + world.rank)})
        with pytest.raises(
            UsageError,
            match=r"configuration's optimizer.lr differs .* 0.001 on rank 0, 0.002 on rank 1",
        ):
            job(world, mine, 2)

    run_local(body, 2)
