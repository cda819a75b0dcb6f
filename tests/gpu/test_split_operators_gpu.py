"""Every call of the table of operators on a CUDA device, by two ranks that split its operands."""

from __future__ import annotations

import pytest

from pydist.comm import Transport
from pydist.comm.transports.nccl.device_assignment import missing
from pydist.mesh import Mesh
from support.operators.cases import FAMILIES
from support.operators.runs import cell, on_one_device
from support.transports.device_contract import two_ranks

pytestmark = [two_ranks(missing(), seconds=140), pytest.mark.usefixtures("exact")]

TEXTS = [text for family in FAMILIES.values() for text in family.strip().splitlines()]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["fp64", "bf16"])
@pytest.mark.parametrize("text", TEXTS)
def test_a_call_is_that_of_plain_torch(devices: Transport, text: str, kind: str) -> None:
    """A call is refused on CUDA only if it is refused on CPUs."""
    expected = on_one_device(text, kind, "cuda")
    if not expected:
        pytest.skip("torch has no such call on a device")
    mesh = Mesh(devices, 1, (2, 1, 1))
    if "refused" in cell(text, kind, expected, mesh, "cuda"):
        assert "refused" in cell(text, kind, on_one_device(text, kind), mesh)
