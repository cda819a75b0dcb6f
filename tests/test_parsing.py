"""Tests of untrusted text: deep nesting, values of wrong types, and huge numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pydist.data.manifest import Manifest
from pydist.data.medical.layouts import find_cases
from pydist.errors import CheckpointError, DataError, UsageError
from pydist.parsing import DEPTH, byte_count, parse_json
from pydist.train import checkpoint, config_io


def nested(depth: int, kind: str = "list") -> str:
    return "[" * depth + "]" * depth if kind == "list" else '{"a":' * depth + "1" + "}" * depth


@pytest.mark.parametrize("kind", ["list", "dict"])
def test_json_is_read_to_a_depth_and_refused_beyond(kind: str) -> None:
    assert parse_json(nested(DEPTH, kind)) == json.loads(nested(DEPTH, kind))
    for depth in (DEPTH + 2, 900, 100_000):
        with pytest.raises(ValueError, match=f"nested too deeply; {DEPTH} levels are possible"):
            parse_json(nested(depth, kind))


@pytest.mark.parametrize("depth", [100, 500, 100_000])
def test_every_file_of_ours_says_so_in_one_line(tmp_path: Path, depth: int) -> None:
    text = nested(depth)
    with pytest.raises(UsageError, match=r"run\.toml is not valid TOML: nested too deeply"):
        config_io.loads(f"[train]\nx = {text}", "run.toml")
    with pytest.raises(UsageError, match=r"run\.toml is not valid TOML: nested too deeply"):
        config_io.loads(f"[{'.'.join('a' * min(depth, 2000))}]", "run.toml")
    (tmp_path / "dataset.json").write_text(f'{{"format": "pydist-dataset", "x": {text}}}')
    with pytest.raises(DataError, match="not JSON: nested too deeply"):
        Manifest.load(tmp_path)
    (tmp_path / "imagesTr").mkdir()
    with pytest.raises(DataError, match="not JSON: nested too deeply"):
        find_cases(tmp_path)
    step = tmp_path / "step-000001"
    step.mkdir()
    (step / "manifest.json").write_text(text)
    with pytest.raises(
        CheckpointError, match=r"is damaged: manifest.json is not JSON: nested too deeply"
    ):
        checkpoint.read(step)


@pytest.mark.parametrize(
    "change",
    [
        {"files": [{"path": "a", "split": "train", "bytes": 1e400, "crc32": ""}]},
        {"files": 3},
        {"files": [[]]},
        {"origin": [1]},
        {"sample_shape": [1, 2]},
        {"sample_shape": {"a": 1}},
        {"log1p_mean": [10**400]},
        {"intensity": [3]},
        {"target_names": 5},
    ],
)
def test_a_manifest_of_other_kinds_of_values_is_refused(
    tmp_path: Path, change: dict[str, object]
) -> None:
    good = Manifest((1, 2, 2, 2), "CDHW", "int16", ())
    record = {**json.loads(good.dumps()), **change}
    with pytest.raises(DataError, match="damaged"):
        Manifest.loads(json.dumps(record), "dataset.json")


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("4GB", 4 * 10**9), ("1 B", 1), ("1.5 kB", 1500), (" 20 KiB ", 20 << 10),
        ("0.5MiB", 1 << 19), ("3TB", 3 * 10**12), ("2 TiB", 2 << 40), ("1.0000000001GB", 10**9),
    ],
)  # fmt: skip
def test_sizes(text: str, nbytes: int) -> None:
    assert byte_count(text) == nbytes


@pytest.mark.parametrize(
    "text", ["", "4", "GB", "4 gb", "4GiBB", "-1GB", "1e3GB", "0GB", "0.5B", "9" * 30 + "TB", "٤GB"]
)
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="a size is"):
        byte_count(text)
