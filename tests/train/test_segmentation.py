"""Tests of segmentation runs: split, resumed, and their tables and pictures."""

from __future__ import annotations

import csv
import math
from dataclasses import replace
from pathlib import Path

import h5py
import pytest
import torch

from pydist.comm import run_local
from pydist.data import AugmentOptions
from pydist.data.medical.generate import generate_ct
from pydist.data.medical.options import CTOptions
from pydist.errors import CheckpointError, DataError, UsageError
from pydist.train import checkpoint, config_io
from pydist.train.config import (
    Config,
    CosmoFlowConfig,
    DataConfig,
    OutputConfig,
    TrainConfig,
    UNet3dConfig,
)
from pydist.train.metadata import load_trained
from support.data.volumes import labeled_volumes
from support.training.runs import alone, change, curve, events, job, last_state


@pytest.fixture
def segmentation(volumes, tmp_path) -> Config:
    """Returns a run of two epochs of two steps."""
    return Config(
        model=UNet3dConfig(features=4, levels=2),
        data=DataConfig(path=volumes, normalize="ct"),
        train=TrainConfig(epochs=2, batch=2, loss="dice_ce"),
        output=OutputConfig(folder=tmp_path / "run", plot=False),
    )


def weighing(config, **options) -> Config:
    return change(config, train=options)


@pytest.mark.parametrize(("data", "spatial"), [(1, (2, 1, 1)), (2, (1, 1, 2))])
def test_split_training_is_that_of_one_rank(segmentation, tmp_path, data, spatial):
    whole = change(segmentation, output={"folder": tmp_path / "whole"})
    expected = alone(whole)
    results = run_local(job, data * math.prod(spatial), segmentation, data, spatial)
    assert curve(segmentation) == pytest.approx(curve(whole), abs=5e-6)
    for result in results:
        found = result.validation
        assert found.samples == 3
        assert found.loss == pytest.approx(expected.validation.loss, abs=1e-4)
        assert torch.equal(found.dice.nan_to_num(2), results[0].validation.dice.nan_to_num(2))
        torch.testing.assert_close(
            found.dice, expected.validation.dice, rtol=0, atol=0.02, equal_nan=True
        )


@pytest.fixture(scope="session")
def partly_labeled(tmp_path_factory) -> Path:
    """Makes volumes with unlabeled voxels: all of one volume, parts of two others."""
    folder = tmp_path_factory.mktemp("partly")
    generate_ct(folder, CTOptions(count=7, shape=(16, 8, 8), validation=3 / 7))
    for number, depths in ((1, 16), (2, 8), (5, 11)):
        with h5py.File(folder / f"ct_{number:04}.hdf5", "r+") as file:
            file["segmentation"][:depths] = 255
    return folder


def test_class_weights_and_an_ignored_label_are_of_the_global_batch(
    segmentation, partly_labeled, tmp_path
):
    """A batch has 3 volumes over 2 groups, and validation has 3 volumes."""
    weighted = {"class_weights": (0.2, 1.0, 3.0), "ignore_label": 255, "batch": 3, "steps": 1}
    config = change(segmentation, data={"path": partly_labeled}, train=weighted)
    whole = change(config, output={"folder": tmp_path / "whole"})
    expected = alone(whole).validation
    found = run_local(job, 4, config, 2, (2, 1, 1))[0].validation
    assert curve(config) == pytest.approx(curve(whole), abs=5e-6)
    assert found.loss == pytest.approx(expected.loss, abs=1e-4)
    torch.testing.assert_close(found.dice, expected.dice, rtol=0, atol=0.02, equal_nan=True)
    unknown = change(config, train={"ignore_label": None})
    with pytest.raises(DataError, match=r"label 255 at voxel .*; ignore_label leaves such voxels"):
        alone(change(unknown, output={"folder": tmp_path / "unknown"}))


def test_augmented_training_does_not_depend_on_the_split(segmentation, tmp_path):
    text = (
        'data = {augment = {crop = [8, 8, 8], flip = ["depth"], rotate = 0.5, noise = 0.1,'
        " probability = 1.0, blur = [0.5, 1.0], gamma = [0.7, 1.5], angle = 20.0}}"
    )
    augment = config_io.loads(text, "t").data.augment
    config = change(segmentation, data={"augment": augment}, train={"steps": 2})
    assert config_io.loads(config_io.dumps(config), "t") == config
    whole = change(config, output={"folder": tmp_path / "whole"})
    alone(whole)
    run_local(job, 4, config, 2, (2, 1, 1))
    assert curve(config) == pytest.approx(curve(whole), abs=5e-6)
    plain = change(whole, data={"augment": AugmentOptions()}, output={"folder": tmp_path / "p"})
    alone(plain)
    assert curve(plain) != pytest.approx(curve(whole), abs=1e-3)
    wrong = change(whole, data={"augment": replace(augment, crop=(8, 9, 8))})
    with pytest.raises(UsageError, match="network accepts multiples of"):
        alone(config_io.from_tables(config_io.to_dict(wrong), "t"))
    stored = change(config, data={"store": "memory"}, output={"folder": tmp_path / "stored"})
    run_local(job, 2, stored, 1, (2, 1, 1))
    assert curve(stored) == pytest.approx(curve(whole), abs=5e-6)


@pytest.mark.parametrize("loss", ["dice_ce", "cross_entropy"])
def test_groups_without_samples_enter_no_statistics(segmentation, tmp_path, loss):
    """With four samples in batches of three, the last batch leaves two of three groups empty."""
    config = change(
        segmentation,
        train={"batch": 3, "loss": loss},
        optimizer={"name": "sgd", "lr": 0.05},
        output={"folder": tmp_path / "whole"},
    )
    alone(config)
    split = change(config, output={"folder": tmp_path / "split"})
    run_local(job, 3, split, 3, (1, 1, 1))
    assert curve(split) == pytest.approx(curve(config), rel=1e-6)
    one, other = (last_state(each)["model"] for each in (config, split))
    for name in one:
        torch.testing.assert_close(other[name], one[name], rtol=1e-4, atol=1e-5)


def test_crops_of_unlike_volumes_are_validated_one_at_a_time(segmentation, tmp_path):
    shapes = [(8, 8, 8), (16, 8, 8), (8, 16, 8), (16, 16, 8)]
    files = [("train", shape) for shape in shapes] + [("val", shape) for shape in shapes[:3]]
    config = change(
        segmentation,
        data={
            "path": labeled_volumes(tmp_path / "data", files), "normalize": "none",
            "augment": AugmentOptions(crop=(8, 8, 8)),
        },
        train={"batch": 4, "epochs": 2},
    )  # fmt: skip
    run_local(job, 4, change(config, train={"epochs": 1}), 2, (1, 2, 1))
    found = run_local(job, 4, config, 2, (1, 2, 1))[0].validation
    assert found.samples == 3
    whole = change(config, output={"folder": tmp_path / "whole"})
    expected = alone(whole).validation
    assert found.loss == pytest.approx(expected.loss, abs=1e-4)
    torch.testing.assert_close(found.dice, expected.dice, rtol=0, atol=0.02, equal_nan=True)


def test_an_ignored_class_has_no_dice(segmentation):
    result = alone(change(segmentation, train={"ignore_label": 1, "steps": 1})).validation
    assert list(result.figures()["dice"]) == ["tumor"]
    header = (segmentation.output.folder / "dice.csv").read_text().splitlines()[0]
    assert header == "file,tumor"


def test_the_log_and_the_table_tell_the_dice_of_each_class(segmentation):
    result = run_local(job, 2, segmentation, 1, (2, 1, 1))[0].validation
    folder = segmentation.output.folder
    event = events(segmentation, "validation")[-1]
    assert event["samples"] == 3
    assert list(event["dice"]) == ["liver", "tumor"]
    assert list(event["pooled_dice"].values()) == pytest.approx(result.pooled.tolist(), nan_ok=True)
    with (folder / "dice.csv").open() as file:
        header, *rows = csv.reader(file)
    assert header == ["file", "liver", "tumor"]
    assert [row[0] for row in rows] == ["ct_0004.hdf5", "ct_0005.hdf5", "ct_0006.hdf5"]
    found = [[float(cell or "nan") for cell in row[1:]] for row in rows]
    torch.testing.assert_close(
        torch.tensor(found, dtype=torch.float64), result.dice, equal_nan=True
    )


def test_several_volumes_in_a_file_have_a_row_each(segmentation, tmp_path):
    files = [("train", (24, 8, 8)), ("val", (24, 8, 8)), ("val", (24, 8, 8))]
    data = {"path": labeled_volumes(tmp_path / "data", files, parts=3), "normalize": "none"}
    config = change(segmentation, data=data, train={"epochs": 1})
    dice = alone(config).validation.dice
    _, *rows = (config.output.folder / "dice.csv").read_text().splitlines()
    assert [row.split(",")[0] for row in rows] == ["1.h5"] * 3 + ["2.h5"] * 3
    found = [[float(cell or "nan") for cell in row.split(",")[1:]] for row in rows]
    torch.testing.assert_close(torch.tensor(found, dtype=torch.float64), dice, equal_nan=True)


def test_a_resumed_run_is_bit_identical(segmentation, tmp_path):
    segmentation = change(segmentation, checkpoint={"every": 1})
    through = change(segmentation, output={"folder": tmp_path / "through"})
    run_local(job, 2, through, 1, (2, 1, 1))
    run_local(job, 2, change(segmentation, train={"steps": 1}), 1, (2, 1, 1))
    run_local(job, 2, segmentation, 1, (2, 1, 1))
    assert curve(segmentation) == curve(through)


def test_the_picture_is_drawn_with_and_without_a_validation_set(segmentation, tmp_path):
    drawn = change(segmentation, output={"plot": True}, train={"epochs": 1})
    run_local(job, 2, drawn, 1, (1, 2, 1))
    first = (drawn.output.folder / "result.png").read_bytes()
    run_local(job, 2, drawn, 1, (1, 2, 1))  # complete: nothing new to draw
    assert (drawn.output.folder / "result.png").read_bytes() == first
    generate_ct(tmp_path / "data", CTOptions(count=2, shape=(8, 8, 8), validation=0))
    without = change(
        drawn, data={"path": tmp_path / "data"}, output={"folder": tmp_path / "without"}
    )
    alone(without)
    for config in (drawn, without):
        picture = (config.output.folder / "result.png").read_bytes()
        assert picture.startswith(b"\x89PNG")
        assert len(picture) > 15_000


def test_network_data_and_loss_must_fit_together(segmentation, universes):
    cosmoflow = Config(model=CosmoFlowConfig(width=32), output=segmentation.output)
    for config, message in (
        (change(segmentation, train={"loss": "mse"}), "possible with model.name = 'unet3d' are"),
        (change(cosmoflow, train={"loss": "dice"}), "model.name = 'cosmoflow' are auto, mse"),
        (change(cosmoflow, data={"path": segmentation.data.path}), 'choose model.name = "unet3d"'),
        # Universes also lack the statistics of the CT normalization.
        (change(segmentation, data={"path": universes}), 'choose model.name = "cosmoflow"'),
        (change(segmentation, model={"levels": 4}), "needs multiples of 16: convert"),
        (change(segmentation, model={"features": 3}), "features is even"),
        (weighing(segmentation, class_weights=(1.0, 2.0)), "has 2 weights; .* has 3 classes"),
        (weighing(segmentation, class_weights=(0.0, 0.0, 1e-300)), "one must be 1e-6 or more"),
        (weighing(segmentation, class_weights=(1.0,) * 3, loss="dice"), "in the cross-entropy"),
        (weighing(cosmoflow, class_weights=(1.0,)), "class_weights is for segmentation"),
        (weighing(cosmoflow, ignore_label=0), "ignore_label is for segmentation"),
    ):
        with pytest.raises(UsageError, match=message) as caught:
            alone(config)
        assert "\n" not in str(caught.value)


def test_a_checkpoint_says_what_its_network_is(segmentation, tmp_path):
    alone(change(segmentation, train={"steps": 1}))
    folder = segmentation.output.folder
    for path in (folder, folder / "ckpt", folder / "ckpt" / "last"):
        metadata, weights = load_trained(path)
        assert metadata.config.model == segmentation.model
        assert metadata.config.data.normalize == "ct"
        assert str(tmp_path) not in "".join(metadata.dump().values())
        assert metadata.manifest.class_names == ("background", "liver", "tumor")
        metadata.task().network(metadata.manifest).load_state_dict(weights)
    with pytest.raises(CheckpointError, match="no checkpoint here, nor in its folder ckpt"):
        load_trained(tmp_path)
    old = checkpoint.write(tmp_path / "old", 1, {"model": weights})
    with pytest.raises(CheckpointError, match=r"a loop of its user.s own has written it"):
        load_trained(old)
