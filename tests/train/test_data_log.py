"""Tests of runs that wait for data: they say so once, and several threads give the same bits."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from pydist.comm import run_local
from pydist.data import ShardDataset
from pydist.errors import UsageError
from pydist.train import config_io, data_log
from pydist.train.config import Config
from support.training.runs import assert_same_bits, change, events, job, last_state


def notices(config: Config) -> list[str]:
    return [e["text"] for e in events(config, "notice") if "waiting" in e["text"]]


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes each read take half a second, and lowers the bound below which nothing is told."""
    monkeypatch.setattr(data_log, "_LEAST_WAITING", 0.2)
    original = ShardDataset.read_block

    def read(self: ShardDataset, *arguments: Any) -> Any:
        time.sleep(0.5)
        return original(self, *arguments)

    monkeypatch.setattr(ShardDataset, "read_block", read)


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize(
    ("data", "advice"),
    [
        ({}, 'data.store = "memory" reads files in the first epoch alone; data.readers = 4 may '),
        ({"readers": 2}, 'data.store = "memory" reads files in the first epoch alone'),
        ({"store": "memory"}, None),
        ({"store": "memory", "store_memory": "1kB"}, "data.store_memory and data.store_disk"),
    ],
)
def test_a_run_that_waits_for_data_says_so_once(
    config: Config, data: dict[str, Any], advice: str | None
) -> None:
    config = change(config, data=data, train={"epochs": 3, "validate_every": 0})
    run_local(job, 2, config, 1, (2, 1, 1))
    found = notices(config)
    if advice is None:  # from the second epoch on nothing is read
        assert not found
        return
    assert len(found) == 1
    assert advice in found[0]
    assert found[0].startswith("waiting for data took ")
    assert f"% of epoch {2 if 'store' in data else 1}: " in found[0]
    assert ("readers" in found[0]) == (not data)


def test_a_run_that_waits_little_says_nothing(config: Config) -> None:
    run_local(job, 1, config)
    assert not notices(config)


def test_several_readers_give_the_same_bits(config: Config, tmp_path: Path) -> None:
    several = change(config, data={"readers": 3}, output={"folder": tmp_path / "several"})
    for each in (config, several):
        run_local(job, 2, each, 1, (2, 1, 1))
    assert_same_bits(last_state(config)["model"], last_state(several)["model"])


def test_several_readers_with_a_store_are_refused(config: Config) -> None:
    wrong = change(config, data={"readers": 2, "store": "memory"})
    with pytest.raises(UsageError, match=r'data\.readers = 2 with data\.store = "memory"'):
        config_io.from_tables(config_io.to_dict(wrong), source="test")
