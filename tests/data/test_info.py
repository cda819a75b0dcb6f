"""Tests of the facts about a data set, against NumPy's own counts."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pydist.data import CTOptions, Manifest, ShardDataset, generate_ct
from pydist.data import info as module
from pydist.data.info import Facts, deep_facts, kept_facts, outline
from pydist.data.lock import FolderLock
from pydist.data.trust import FileTrust
from pydist.errors import DataError, UsageError
from support.data.damage import flip_bit


@pytest.fixture
def volumes(tmp_path: Path) -> Path:
    generate_ct(tmp_path, CTOptions(count=3, shape=(8, 9, 10), seed=2, validation=0.4))
    return tmp_path


def test_what_the_manifest_says(volumes: Path, universes: Path) -> None:
    found = outline(volumes)
    assert found["samples"] == {"train": 2, "val": 1}
    assert found["shapes"] == {"8 × 9 × 10": 3}
    assert found["classes"] == ["background", "liver", "tumor"]
    assert found["normalizations"] == ["none", "log1p", "window", "mean", "ct"]
    assert found["bytes"] == sum(p.stat().st_size for p in volumes.glob("*.hdf5"))
    assert outline(universes)["normalizations"][-1] == "standardize"
    json.dumps(found)
    with pytest.raises(DataError, match="no such folder"):
        outline(volumes / "none")


def test_ranges_and_labels_against_numpy(volumes: Path) -> None:
    told: list[tuple[int, int, str]] = []
    found = deep_facts(volumes, lambda *what: told.append(what))
    assert told[-1] == (3, 3, "ct_0002.hdf5")
    for split, facts in found.items():
        data = ShardDataset(volumes, split)
        samples = [data[i] for i in range(len(data))]
        values = np.concatenate([x.numpy().ravel() for x, _ in samples])
        labels, counts = np.unique([y.numpy() for _, y in samples], return_counts=True)
        assert (facts.low, facts.high) == ([values.min()], [values.max()])
        assert facts.labels == dict(zip(labels.tolist(), counts.tolist(), strict=True))
        assert (facts.files, facts.nan, facts.infinite, facts.faults) == (len(data), 0, 0, [])


def test_parts_of_a_sample_make_up_the_whole(
    public_universes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = deep_facts(public_universes)
    (public_universes / module.RESULTS).unlink()
    monkeypatch.setattr("pydist.data.indexed.SLAB_BYTES", 1)  # a plane at a time
    assert deep_facts(public_universes) == whole


def test_values_that_are_not_finite(write_samples: Callable[..., Path]) -> None:
    samples = [np.ones((2, 3, 4, 5), "float32") for _ in range(3)]
    samples[0][0, 1, 2] = np.nan
    samples[1][1, 0, 0, :2] = np.inf, -np.inf
    samples[2][0] = np.nan
    samples[2][1, 2, 3, 4] = -7
    facts = deep_facts(write_samples(samples))["train"]
    assert (facts.nan, facts.infinite) == (5 + 60, 2)
    assert (facts.low, facts.high) == ([1, -7], [1, 1])
    alone = Facts()
    alone.add(np.full((1, 2), math.nan))
    assert (alone.low, alone.high, alone.nan) == ([None], [None], 2)


def test_faults_are_listed_and_the_rest_is_read(volumes: Path) -> None:
    flip_bit(volumes / "ct_0000.hdf5", "volume")
    (volumes / "ct_0001.hdf5").unlink()
    found = deep_facts(volumes)
    (one, two) = found["train"].faults
    assert "ct_0000.hdf5: checksum" in one
    assert "ct_0001.hdf5: No such file" in two
    assert found["val"].faults == []
    assert found["val"].labels


def test_results_are_kept_until_a_file_changes(
    volumes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    real = module._read
    monkeypatch.setattr(
        module, "_read", lambda task: read.append(task[1].files[0].path) or real(task)
    )
    assert kept_facts(volumes) is None

    def stop(done: int, total: int, what: str) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        deep_facts(volumes, stop)
    assert kept_facts(volumes) is None
    found = deep_facts(volumes)
    assert read == ["ct_0000.hdf5", "ct_0001.hdf5", "ct_0002.hdf5"], "each file was read once"
    assert kept_facts(volumes) == found == deep_facts(volumes)
    assert len(read) == 3
    assert sorted(p.name for p in volumes.glob(".*")) == [module.RESULTS]
    (volumes / "ct_0002.hdf5").write_bytes((volumes / "ct_0001.hdf5").read_bytes())
    assert kept_facts(volumes) is None
    (fault,) = deep_facts(volumes)["val"].faults
    assert "checksum" in fault
    assert read[3:] == ["ct_0002.hdf5"]


def test_what_was_found_before_a_file_changed_is_not_kept(volumes: Path) -> None:
    def damage(done: int, total: int, what: str) -> None:
        if done == 3:  # all were read, and nothing is published yet
            (volumes / "ct_0000.hdf5").write_bytes(b"x")

    assert not any(facts.faults for facts in deep_facts(volumes, damage).values())
    assert kept_facts(volumes) is None
    assert len(deep_facts(volumes)["train"].faults) == 1


def test_a_fault_of_an_option_does_not_outlive_it(
    volumes: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    pool = tmp_path_factory.mktemp("pool")
    (volumes / "ct_0000.hdf5").rename(pool / "ct_0000.hdf5")
    (volumes / "ct_0000.hdf5").symlink_to(pool / "ct_0000.hdf5")
    trust = FileTrust((pool,))
    for _ in range(2):
        (fault,) = deep_facts(volumes)["train"].faults
        assert "outside allow_roots (none)" in fault
        assert kept_facts(volumes, trust) is None
        found = deep_facts(volumes, trust=trust)
        assert not any(facts.faults for facts in found.values())
        assert kept_facts(volumes, trust) == found
        assert kept_facts(volumes) is None


def test_a_file_with_a_fault_is_read_again(volumes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(module, "fault_of", lambda *_: "permission denied")
        faulty = deep_facts(volumes)
    assert kept_facts(volumes) == faulty
    found = deep_facts(volumes)
    assert not any(facts.faults for facts in found.values())
    assert kept_facts(volumes) == found


@pytest.mark.parametrize("text", ["{", "[]", '{"ct_0000.hdf5": 5}', '{"ct_0000.hdf5": [[], {}]}'])
def test_damaged_results_are_made_again(volumes: Path, text: str) -> None:
    found = deep_facts(volumes)
    (volumes / module.RESULTS).write_text(text)
    assert kept_facts(volumes) is None
    assert deep_facts(volumes) == found


def test_a_folder_that_is_being_written(volumes: Path) -> None:
    with FolderLock(volumes), pytest.raises(UsageError, match="process"):
        deep_facts(volumes)
    found = deep_facts(volumes)
    with FolderLock(volumes):
        assert deep_facts(volumes) == found  # nothing is left to read


def test_more_labels_than_classes_can_be(volumes: Path) -> None:
    facts = Facts()
    with pytest.raises(DataError, match="more than 1000 different labels"):
        facts.add_labels(np.arange(1001))


def test_in_several_processes(universes: Path) -> None:
    (universes / module.RESULTS).unlink(missing_ok=True)
    found = deep_facts(universes, workers=2)
    (universes / module.RESULTS).unlink()
    assert found == deep_facts(universes)
    assert sum(facts.files for facts in found.values()) == len(Manifest.load(universes).files)
