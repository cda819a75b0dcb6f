"""The tables of networks: their rows, and those that no other test runs and that are quick."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("monai.networks.nets")
pytest.importorskip("dynamic_network_architectures")

from support.networks.libraries import CASES, verdict

PAGE = Path(__file__).parents[2] / "docs" / "monai.md"
pytestmark = pytest.mark.filterwarnings("ignore")  # of MONAI and torch
RUN = ("VoxelMorph, half resolution", "GlobalNet", "MaskedAutoEncoderViT", "NaViT", "Primus")


def rows() -> dict[str, str]:
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    return dict(line.strip("| ").split(" | ") for line in lines if "| split run |" not in line)


def test_the_page_has_all_networks():
    assert list(rows()) == list(CASES)


@pytest.mark.parametrize("name", RUN)
def test_a_row(name):
    assert verdict(name) == rows()[name]
