"""Tests of runs whose samples stay in memory: the same bits, no reads, figures in the log."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pydist.comm import run_local
from pydist.errors import UsageError
from pydist.train import config_io, log
from pydist.train.config import Config, DataConfig
from pydist.train.datasets import open_datasets, store_options
from pydist.train.tasks import task_of
from support.training.runs import assert_same_bits, change, events, in_stages, job, last_state

BLOCK = 4 * 32**3 * 2
"""Bytes of a sample of int16 counts."""


def figures(config: Config, split: str) -> list[dict]:
    return [event for event in events(config, "store") if event["split"] == split]


def curve(config: Config) -> list[tuple[float, float]]:
    return [(e["step"], e["loss"]) for e in events(config, "step", "validation")]


@pytest.mark.parametrize(
    ("ranks", "data", "spatial"), [(1, 1, (1, 1, 1)), (2, 2, (1, 1, 1)), (4, 2, (2, 1, 1))]
)
def test_a_run_has_the_same_bits_and_reads_each_file_once(config, tmp_path, ranks, data, spatial):
    """6 training samples in batches of 4: the second batch of an epoch is short; 3 to validate."""
    config = change(config, train={"batch": 4, "epochs": 3})
    stored = change(config, data={"store": "memory"}, output={"folder": tmp_path / "stored"})
    run_local(job, ranks, config, data, spatial)
    run_local(job, ranks, stored, data, spatial)
    assert curve(stored) == curve(config)
    assert not figures(config, "train")
    one, other = last_state(config), last_state(stored)
    assert one["about"] == other["about"]
    assert_same_bits(one["model"], other["model"])
    for split, samples in (("train", 6), ("val", 3)):
        first, *others = figures(stored, split)
        assert [e["epoch"] for e in (first, *others)] == [0, 1, 2]
        assert first["hit_rate"] == 0
        assert samples * BLOCK <= first["file_bytes"] <= samples * (BLOCK + ranks * 16)
        for event in others:
            assert event["hit_rate"] == 1
            assert event["file_bytes"] == 0
            assert samples * BLOCK <= event["held_bytes"] <= samples * (BLOCK + ranks * 128)
            assert event["received_bytes"] <= samples * (BLOCK + ranks * 128)
            assert event["most_held_bytes"] <= event["held_bytes"]


def test_a_run_resumes_amid_an_epoch_and_may_change_the_store(config, tmp_path):
    config = change(config, checkpoint={"every": 1}, train={"epochs": 3, "batch": 2})
    through = change(config, output={"folder": tmp_path / "through"})
    run_local(job, 2, through, 2)
    stored = change(config, data={"store": "memory", "store_memory": "1 MB"})
    run_local(job, 2, change(stored, train={"steps": 4}), 2)
    run_local(job, 2, stored, 2)
    losses = [log.losses(each.output.folder / "log.jsonl") for each in (stored, through)]
    assert losses[0] == losses[1]
    assert_same_bits(last_state(stored)["model"], last_state(through)["model"])
    resumed = figures(stored, "train")[-2:]
    assert [event["epoch"] for event in resumed] == [1, 2]
    assert resumed[0]["hit_rate"] == 0
    assert resumed[1]["hit_rate"] == pytest.approx(4 / 6), "those after the interruption"


def test_a_run_in_stages_has_the_same_bits(config, tmp_path):
    mesh = {"stages": 2, "micro_batches": 2, "data": 2}
    mesh["cuts"] = ("features.conv2",)  # those of measured times may differ between runs
    config = change(config, mesh=mesh, train={"batch": 4})
    stored = change(config, data={"store": "memory"}, output={"folder": tmp_path / "stored"})
    in_stages(config)
    in_stages(stored)
    assert curve(stored) == curve(config)
    assert_same_bits(last_state(stored)["model"], last_state(config)["model"])
    assert [event["hit_rate"] for event in figures(stored, "train")] == [0, 1]


def test_the_limits_are_divided_by_voxels(config, tmp_path):
    disk = {"store_disk": "900 kB", "store_folder": tmp_path}
    limited = change(config, data={"store": "memory", "store_memory": "9 MB", **disk})
    data = open_datasets(limited, task_of(limited))
    one, other = store_options(limited, *data)
    assert (one.memory, other.memory) == (6_000_000, 3_000_000)
    assert (one.disk, other.disk) == (600_000, 300_000)
    assert one.folder == other.folder == tmp_path
    assert [each.store for each in store_options(config, *data)] == ["off", "off"]
    unvalidated = change(limited, train={"validate_every": 0})
    one, other = store_options(unvalidated, *data)
    assert (one.memory, other.store) == (9_000_000, "off")


def test_samples_on_disk_are_read_by_the_next_run_too(config, tmp_path):
    """Preloaded, beyond a memory of two samples, and from the disk of an earlier run."""
    config = change(config, train={"batch": 4, "epochs": 2})
    run_local(job, 2, config, 2)
    spilled = {
        "store": "memory", "store_memory": "2 MB", "store_disk": "1 GB", "store_codec": "zstd",
        "store_folder": tmp_path / "spill", "store_reuse": True, "store_preload": True,
    }  # fmt: skip
    for number, first_reads in ((1, True), (2, False)):
        stored = change(config, data=spilled, output={"folder": tmp_path / f"stored{number}"})
        run_local(job, 2, stored, 2)
        assert curve(stored) == curve(config)
        assert_same_bits(last_state(stored)["model"], last_state(config)["model"])
        for split in ("train", "val"):
            first, *others = figures(stored, split)
            assert first["hit_rate"] == 1, "preloaded"
            assert (first["file_bytes"] > 0) == first_reads
            for event in others:
                assert (event["hit_rate"], event["file_bytes"]) == (1, 0)
        assert figures(stored, "train")[-1]["compression"] > 2
        told = [e["text"] for e in events(stored, "notice") if "in the store" in e["text"]]
        assert told[0].startswith("samples of 2 of 2 batches")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('store = "disk"', "data.store = 'disk': input should be 'off' or 'memory'"),
        ('store_memory = "4GB"', "data.store_memory = '4GB' with data.store = 'off': possible"),
        (
            'store = "memory"\nstore_memory = "4 apples"',
            "data.store_memory = '4 apples': a size is expected, such as \"4GB\", in B, kB, MB",
        ),
        ('store = "memory"\nstore_memory = 4', "data.store_memory = 4: input should be a valid st"),
        ('store_disk = "4GB"', "data.store_disk = '4GB' with data.store = 'off': possible"),
        (
            'store = "memory"\nstore_disk = "4GB"',
            "data.store_disk = '4GB' without data.store_folder, a folder on a disk",
        ),
        ('store_codec = "gzip"', "data.store_codec = 'gzip': input should be 'raw', 'zstd', "),
        ('stores = "memory"', 'data.stores is not a setting; did you mean "store"?'),
    ],
)
def test_wrong_settings_are_named(text, message):
    with pytest.raises(UsageError) as caught:
        config_io.loads(f"[data]\n{text}", "run.toml")
    assert message in str(caught.value)


def test_a_size_is_written_as_it_was_read():
    given = replace(Config(), data=DataConfig(store="memory", store_memory="1.5 GiB"))
    assert config_io.loads(config_io.dumps(given), "run.toml") == given
