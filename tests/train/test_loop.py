"""Tests of training: a split run equals the one-rank run, and a resumed run an unbroken one."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace

import h5py
import pytest
import torch

from pydist.cli.main import main
from pydist.comm import run_local
from pydist.data import ShardDataset, UniverseOptions, generate_universes
from pydist.errors import (
    DataError,
    PydistError,
    UsageError,
)  # fmt: skip
from pydist.train import checkpoint
from pydist.train.config import Config, FactoryConfig, SharesConfig
from pydist.train.folder import TUNING_FILE
from pydist.train.metadata import load_trained
from support.training.runs import (
    alone,
    assert_same_bits,
    change,
    curve,
    events,
    in_stages,
    job,
    last_state,
    slow_run,
)


@pytest.fixture
def config(universes, tmp_path) -> Config:
    return slow_run(universes, tmp_path / "run")


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


def test_a_run_that_validates_every_0_epochs_validates_once(config, capsys):
    alone(change(config, train={"epochs": 2, "validate_every": 0}))
    assert [e["step"] for e in events(config, "validation")] == [events(config, "step")[-1]["step"]]
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "Epochs between validations; 0 validates once, after the last step." in shown


def test_batch_norms_by_the_input_are_validated_sample_by_sample(config, universes, tmp_path):
    """Two groups share three samples; each sample is normed by itself, as by the plain network."""
    factory = "support.networks.batch_normed:of_samples"
    config = replace(config, model=FactoryConfig(factory=factory, task="regression"))
    config = change(config, train={"epochs": 1})
    staged = change(
        config,
        mesh={"stages": 2, "data": 2, "cuts": ("2",)},
        output={"folder": tmp_path / "staged"},
    )
    one = change(config, output={"folder": tmp_path / "one"})
    found = run_local(job, 4, config, 2, (2, 1, 1))[0].validation
    for other in (in_stages(staged)[0].validation, alone(one).validation):
        torch.testing.assert_close(other.predicted, found.predicted, rtol=0, atol=1e-5)
    about, weights = load_trained(config.output.folder)
    plain = about.task(factory).network(about.manifest).eval()
    plain.load_state_dict(weights)
    data = ShardDataset(universes, "val", normalize="log1p")
    with torch.no_grad():
        expected = torch.cat([plain(data.read_block(i)[None]) for i in range(3)]).double()
    torch.testing.assert_close(found.predicted, expected, rtol=0, atol=1e-5)


def test_a_network_that_norms_one_value_of_a_sample_is_refused_before_the_first_step(config):
    factory = "support.networks.batch_normed:of_features"
    config = replace(config, model=FactoryConfig(factory=factory, task="regression"))
    with pytest.raises(UsageError, match="gets one value per channel of a sample"):
        run_local(job, 2, config, 2)
    assert not events(config, "step")


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
