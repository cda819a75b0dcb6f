"""docs/operators.md lists the behavior of every call."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pydist.comm import LocalTransport
from pydist.mesh import Mesh
from support.operators.cases import FAMILIES
from support.operators.runs import NARROW, cell, on_one_device
from support.operators.table import TORCH, all_texts, handled, names_in, page

PAGE = Path(__file__).parents[2] / "docs" / "operators.md"

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's deprecations


def on_this_processor(written: str) -> str:
    """Returns the page without what torch itself lacks here: bf16 of an LSTM without AVX-512."""
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return written
    lines = written.split("\n")
    (number,) = (i for i, line in enumerate(lines) if line.startswith("| `torch.lstm("))
    call, *cells = lines[number].removesuffix(" |").split(" | ")
    cells[2] = cells[5] = "·"
    lines[number] = f"{' | '.join([call, *cells])} |"
    return "\n".join(lines)


def test_the_page_is_what_is_found():
    written = PAGE.read_text()
    found = page()  # raises where a call differs from one device
    if TORCH not in written:
        pytest.skip(f"docs/operators.md was made with another version than {TORCH}")
    assert found == on_this_processor(written), (
        "docs/operators.md is out of date: regenerate it with "
        "PYTHONPATH=tests/lib python -m support.operators.table > docs/operators.md"
    )


def test_every_function_with_a_handler_is_in_it():
    """A new handler needs a call in tests/lib/support/operators/cases.py."""
    texts = [text for family in all_texts().values() for text in family]
    assert handled() - names_in(texts) == set()


@pytest.mark.parametrize("family", ["Pooling", "Normalization"])
def test_narrow_operands_under_autocast_have_torchs_dtypes(family):
    """tests/gpu/test_operators_gpu.py does this for all calls: autocast's rules vary by device."""
    for text in FAMILIES[family].strip().splitlines():
        expected = on_one_device(text, NARROW)
        assert "refused" not in cell(text, NARROW, expected, Mesh(LocalTransport())), text
