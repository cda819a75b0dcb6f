"""Tests of what a run's folder holds already: files of others, and what earlier runs left."""

from __future__ import annotations

import os
import shutil

import pytest

from pydist.comm import run_local
from pydist.errors import (
    DiskError,
    UsageError,
)  # fmt: skip
from pydist.train.config import Config
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
    left = config.output.folder / "ckpt" / ".step-000007.tmp-00000000-1-1-01234567"
    left.mkdir(parents=True)
    os.utime(left, (0, 0))
    alone(change(config, train={"steps": 1}))
    assert f"removed {left}" in events(config, "notice")[0]["text"]
    assert not left.exists()
