"""Every call of the table of operators on a CUDA device, by one rank's handlers."""

from __future__ import annotations

import pytest

from pydist.comm import LocalTransport
from pydist.mesh import Mesh
from support.operators.cases import FAMILIES
from support.operators.runs import NARROW, cell, on_one_device

pytestmark = pytest.mark.usefixtures("exact")

TEXTS = [text for family in FAMILIES.values() for text in family.strip().splitlines()]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["fp64", "bf16", NARROW])
@pytest.mark.parametrize("text", TEXTS)
def test_a_call_is_that_of_plain_torch(text, kind):
    """A call is refused on CUDA only if it is refused on the CPU."""
    expected = on_one_device(text, kind, "cuda")
    if not expected:
        pytest.skip("torch has no such call on a device")
    mesh = Mesh(LocalTransport())
    said = cell(text, kind, expected, mesh, "cuda")
    if "refused" in said:
        assert "refused" in cell(text, kind, on_one_device(text, kind), mesh)
