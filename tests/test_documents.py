"""Tests of the documentation: the index lists every decision, and all named paths exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import pydist

ROOT = Path(__file__).parents[1]
DECISIONS = sorted((ROOT / "docs/adr").glob("0*.md"))
PAGES = sorted((ROOT / "docs").rglob("*.md"))
TOP = ("pydist", "csrc", "tests", "benchmarks", "tools", "docs", "cmake", "examples")


def test_every_decision_is_listed_with_its_title() -> None:
    listed = re.findall(
        r"^- \[(\d{4})\]\((.+)\) (.+)$", (ROOT / "docs/adr/README.md").read_text(), re.MULTILINE
    )
    titles = []
    for page in DECISIONS:
        number, _, title = page.read_text().splitlines()[0].removeprefix("# ").partition(". ")
        titles.append((f"{int(number):04}", page.name, title))
    assert listed == titles


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT / "docs")))
def test_paths_in_the_text_exist(page: Path) -> None:
    named = re.findall(r"`([\w./-]+/[\w./-]+)`", page.read_text())
    paths = [path for path in named if path.split("/")[0] in TOP]
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_every_public_name_is_in_the_api_reference() -> None:
    pages = "".join(page.read_text() for page in (ROOT / "docs/api").glob("*.md"))
    shown = set(re.findall(r"^::: (\S+)$", pages, re.MULTILINE))
    homes = {name: pydist._HOMES.get(name, "pydist") for name in pydist.__all__}
    places = {
        name: {f"pydist.{name}", home, home.rpartition(".")[0]} for name, home in homes.items()
    }
    assert [name for name, any_of in places.items() if not shown & any_of] == []


def test_the_recipe_for_a_kernel_names_all_files_of_its_example() -> None:
    recipe = (ROOT / "docs/extending.md").read_text().partition("## A kernel")[2]
    named = set(re.findall(r"`(\w+\.\w+)`", recipe.partition("Outside of `csrc`")[0]))
    assert named == {path.name for path in (ROOT / "csrc/ops/random").iterdir()}
