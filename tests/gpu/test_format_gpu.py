"""Memory formats on a device: layers keep the format of weights and input."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from pydist import parallelize
from pydist.backend.problem import onednn_has
from pydist.comm import LocalTransport
from pydist.layout import layout_for_sample
from pydist.mesh import Mesh
from pydist.tensor import ShardedTensor
from pydist.train.device import in_format

SHAPE = (2, 4, 16, 16, 16)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv3d(4, 8, 3, padding=1),
        nn.BatchNorm3d(8),
        nn.LeakyReLU(inplace=True),
        nn.AvgPool3d(3, 2, 1),
        nn.Conv3d(8, 16, 3, stride=2, padding=1),
        nn.PReLU(),
        nn.ConvTranspose3d(16, 8, 2, stride=2),
        nn.MaxPool3d(2),
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kept", [torch.channels_last_3d, torch.contiguous_format])
def test_every_layer_keeps_the_format(kept, dtype):
    if torch.cuda.get_device_name() == "simulated" and not onednn_has(dtype):
        pytest.skip(f"oneDNN, the simulated device's library, has no {dtype} on this processor")
    mesh, lying = Mesh(LocalTransport()), []
    model = network().cuda()
    in_format(model, kept)
    parallelize(model, mesh)
    for module in model:
        module.register_forward_hook(lambda _, __, y: lying.append(y.to_local()))
    x = torch.randn(SHAPE, device="cuda").contiguous(memory_format=kept)
    with torch.autocast("cuda", torch.bfloat16, enabled=dtype == torch.bfloat16):
        y = model(ShardedTensor.from_local(x, layout_for_sample(mesh, SHAPE)))
    y.float().square().mean().backward()
    assert [t.is_contiguous(memory_format=kept) for t in lying] == [True] * len(model)
    for parameter in model.parameters():
        assert parameter.grad.stride() == parameter.stride()
