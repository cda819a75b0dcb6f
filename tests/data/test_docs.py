"""Tests that the code in docs/data.md runs, and that its statements on options are true."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TEXT = (Path(__file__).parents[2] / "docs" / "data.md").read_text(encoding="utf-8")


def test_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, "docs/data.md", "exec"), {})


def test_every_entry_of_the_manifest_is_explained(universes: Path) -> None:
    entries = set(re.findall(r'^ "(\w+)":', (universes / "dataset.json").read_text(), re.MULTILINE))
    assert entries
    explained = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| `.*", TEXT, re.MULTILINE))))
    assert entries - explained == {"splits"}
