"""Forms of gradient reduction between two sample groups on a device, against the CPU's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pydist import parallelize
from pydist.comm import Transport
from pydist.comm.transports.nccl.device_assignment import missing
from pydist.gradients import DGC, Hierarchical, Narrow, PowerSGD, Torus
from pydist.gradients.forms.settings import Gradients
from pydist.mesh import Mesh
from support.training.forms import SHAPES, Parameters, random_gradients
from support.transports.device_contract import two_ranks

pytestmark = two_ranks(missing())

FORMS = [
    Narrow("bf16"), Narrow("fp16"), Torus(), Hierarchical(), PowerSGD(rank=2, start=1),
    DGC(density=0.05, warmup=2), DGC(density=0.05, clip_norm=20.0),
]  # fmt: skip


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_form_reduces_as_on_the_cpu(devices: Transport, form: Gradients) -> None:
    mesh = Mesh(devices, 2, (1, 1, 1))
    given = random_gradients()

    def reduced(device: torch.device) -> list[Tensor]:
        model = parallelize(Parameters(SHAPES).to(device), mesh, gradients=form)
        found = []
        for step in range(4):
            model.backward([each.to(device) for each in given(mesh.rank, step)])
            found += model.take()
        return [each.cpu() for each in found]

    expected, found = reduced(torch.device("cpu")), reduced(devices.device)
    assert len(found) == 4 * len(SHAPES)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)
