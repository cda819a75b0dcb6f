"""Tests of runs on data sets with bad samples, and of the bytes in the log."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import pytest
import torch

from pydist.comm import run_local
from pydist.data import Manifest, ShardDataset
from pydist.data.convert import convert_dataset
from pydist.data.options import ConvertOptions
from pydist.errors import DataError, UsageError
from pydist.train import config_io, segmentation_report
from pydist.train.config import Config, DataConfig, OutputConfig, TrainConfig, UNet3dConfig
from pydist.train.metadata import load_trained
from support.data.damage import flip
from support.data.volumes import labeled_volumes
from support.training.runs import alone, change, events, job

BLOCK = 4 * 32**3 * 2
"""Bytes of a sample of int16 counts."""


@pytest.fixture(scope="module")
def damaged(universes: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes the same samples in chunks of HDF5; training sample 2 and validation sample 0 are bad.

    Both have a damaged chunk at their end, in the block of the last rank.
    """
    root = tmp_path_factory.mktemp("damaged")
    options = ConvertOptions("hdf5", chunks=(16, 32, 32), compression="gzip")
    manifest = convert_dataset(universes, root, options)
    for split, number in (("train", 2), ("val", 0)):
        flip(root / [f.path for f in manifest.files if f.split == split][number], -3000)
    return root


def without(root: Path, to: Path) -> Path:
    """Writes the manifest of the undamaged samples, sample 3 of the training set in place of 2."""
    manifest = Manifest.load(root)
    training = [f for f in manifest.files if f.split == "train"]
    training[2] = training[3]
    files = [*training, *[f for f in manifest.files if f.split == "val"][1:]]
    for file in files:
        if not (to / file.path).exists():
            (to / file.path).hardlink_to(root / file.path)
    (to / "again.hdf5").hardlink_to(root / training[2].path)
    files[2] = replace(files[2], path="again.hdf5")
    replace(manifest, files=tuple(files)).save(to)
    return to


def test_a_bad_sample_ends_the_run(config: Config, damaged: Path) -> None:
    with pytest.raises(DataError, match=r"univ_000002.*: 'full', sample 2 of 'train': damaged"):
        run_local(job, 1, change(config, data={"path": damaged}))


@pytest.mark.parametrize(("ranks", "data", "spatial"), [(1, 1, (1, 1, 1)), (4, 2, (2, 1, 1))])
def test_a_bad_sample_is_replaced_in_training_and_left_out_of_validation(
    config: Config,
    universes: Path,
    damaged: Path,
    tmp_path: Path,
    ranks: int,
    data: int,
    spatial: tuple[int, int, int],
) -> None:
    skipping = change(config, data={"path": damaged, "on_bad_sample": "skip"})
    skipping = change(skipping, output={"folder": tmp_path / "skipping"})
    (tmp_path / "good").mkdir()
    good = change(config, data={"path": without(universes, tmp_path / "good")})
    run_local(job, ranks, skipping, data, spatial)
    run_local(job, ranks, good, data, spatial)
    assert [e["loss"] for e in events(skipping, "step")] == [
        e["loss"] for e in events(good, "step")
    ]
    for one, other in zip(events(skipping, "validation"), events(good, "validation"), strict=True):
        assert one["samples"] == other["samples"] == 2
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-6)
    counts = [(e["split"], e["epoch"], e["skipped"]) for e in events(skipping, "data")]
    assert sorted(counts) == [("train", 0, 1), ("train", 1, 1), ("val", 0, 1), ("val", 1, 1)]
    notices = [e["text"] for e in events(skipping, "notice") if "skipped" in e["text"]]
    assert len(notices) == 2, "each sample is named once"
    assert notices[0].startswith("skipped train sample 2: ")
    assert "damaged" in notices[0]
    assert notices[1].startswith("skipped val sample 0: ")


@pytest.mark.parametrize(
    ("ranks", "data", "spatial", "shown"), [(1, 1, (1, 1, 1), 1), (4, 2, (2, 1, 1), 2)]
)
def test_the_first_good_volume_is_drawn(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ranks: int,
    data: int,
    spatial: tuple[int, int, int],
    shown: int,
) -> None:
    """Volume 0 of the validation set is bad. Of two groups the first one has volumes 0 and 2."""
    pytest.importorskip("matplotlib")
    files = [("train", (8, 8, 8))] * 4 + [("val", (8, 8, 8))] * 3
    config = Config(
        model=UNet3dConfig(features=4, levels=1),
        data=DataConfig(labeled_volumes(tmp_path / "data", files, bad={4}), on_bad_sample="skip"),
        train=TrainConfig(epochs=1, batch=2),
        output=OutputConfig(folder=tmp_path / "run"),
    )
    drawn: list[tuple[int, Any]] = []

    def draw_on(self: segmentation_report.Slice, axes: Any, predicted: Any) -> None:
        drawn.append((self.number, predicted))

    monkeypatch.setattr(segmentation_report.Slice, "draw_on", draw_on)
    run_local(job, ranks, config, data, spatial)
    assert [event["status"] for event in events(config, "end")] == ["done"]
    assert [number for number, _ in drawn] == [shown, shown], "after the validation, and at the end"
    about, weights = load_trained(config.output.folder)
    plain = about.task().network(about.manifest).eval()
    plain.load_state_dict(weights)
    image = ShardDataset(tmp_path / "data", "val").read_block(shown)
    with torch.no_grad():
        expected = plain(image[None]).argmax(1)[0].numpy()
    for _, predicted in drawn:
        assert (predicted == expected).mean() > 0.99


def test_a_run_whose_first_training_sample_is_skipped_is_drawn(
    config: Config, universes: Path, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    root = tmp_path / "data"
    options = ConvertOptions("hdf5", chunks=(16, 32, 32), compression="gzip")
    first = root / convert_dataset(universes, root, options).files[0].path
    with h5py.File(first) as file:
        chunk = file["full"].id.get_chunk_info(0)  # of the channel that is drawn
    flip(first, chunk.byte_offset + chunk.size // 2)
    config = change(config, data={"path": root, "on_bad_sample": "skip"}, output={"plot": True})
    alone(config)
    assert [event["status"] for event in events(config, "end")] == ["done"]
    assert (config.output.folder / "result.png").read_bytes().startswith(b"\x89PNG")


def test_bytes_of_each_epoch_are_logged(config: Config) -> None:
    run_local(job, 2, change(config, data={"prefetch": 1}), 1, (2, 1, 1))
    read = {split: 0 for split in ("train", "val")}
    for event in events(config, "data"):
        read[event["split"]] += event["file_bytes"]
        assert event["skipped"] == 0
    ahead = 3 * BLOCK  # a batch of the next epoch
    assert 12 * BLOCK <= read["train"] <= 12 * BLOCK + ahead + 1000
    assert 6 * BLOCK <= read["val"] <= 6 * BLOCK + 1000


def test_a_run_whose_files_another_process_reads(config: Config, tmp_path: Path) -> None:
    other = change(config, data={"untrusted": True}, output={"folder": tmp_path / "other"})
    run_local(job, 1, config)
    run_local(job, 1, other)
    assert [e["loss"] for e in events(other, "step")] == [e["loss"] for e in events(config, "step")]
    assert events(other, "data")[0]["file_bytes"] >= 6 * BLOCK


def test_stages_can_not_skip(config: Config) -> None:
    staged = change(config, data={"on_bad_sample": "skip"}, mesh={"stages": 2})
    with pytest.raises(UsageError, match=r'on_bad_sample = "skip" with mesh\.stages'):
        config_io.from_tables(config_io.to_dict(staged), source="test")


@pytest.mark.parametrize("groups", [1, 2, 3])
def test_too_many_bad_samples_end_the_run(
    config: Config, damaged: Path, tmp_path: Path, groups: int
) -> None:
    """Each of several groups has at most one of them, which it may skip."""
    root = tmp_path / "worse"
    shutil.copytree(damaged, root)
    first, _, bad, *_ = (file.path for file in Manifest.load(root).files)
    shutil.copy(root / bad, root / first)
    config = change(config, data={"path": root, "on_bad_sample": "skip"})
    config = change(config, train={"epochs": 1, "batch": 6})
    with pytest.raises(DataError, match="2 of 6 samples are bad, 1 may be"):
        run_local(job, groups, config, groups)
