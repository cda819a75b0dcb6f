"""Tests that the code in docs/data.md and docs/packs.md runs, and that options are explained."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import fsspec
import pytest

from pydist.packs import PackFileSystem, PackOptions

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "data.md").read_text(encoding="utf-8")
PACKS = (DOCS / "packs.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", ["data.md", "packs.md"])
def test_code_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    fsspec.register_implementation("pydist", PackFileSystem, clobber=True)  # as if installed
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text("utf-8"), re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, f"docs/{page}", "exec"), {})


def test_every_option_of_packs_is_explained_with_its_default() -> None:
    table = dict(re.findall(r"^\| `(\w+)` \| \"?(\w*)\"? ?\|", PACKS, re.MULTILINE))
    defaults = {
        field.name: "" if field.default in (None, ()) else str(field.default)
        for field in dataclasses.fields(PackOptions)
    }
    assert table == defaults


def test_every_entry_of_the_manifest_is_explained(universes: Path) -> None:
    entries = set(re.findall(r'^ "(\w+)":', (universes / "dataset.json").read_text(), re.MULTILINE))
    assert entries
    explained = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| `.*", TEXT, re.MULTILINE))))
    assert entries - explained == {"splits"}
