"""Networks on samples that two ranks split on a device, against the same split on the CPU."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from pydist import ShardedTensor, distribute_tensor, layout_for_sample, parallelize
from pydist.backend import slab_tuning
from pydist.comm import Transport
from pydist.comm.transports.nccl.device_assignment import missing
from pydist.errors import NotSupported
from pydist.gradients.flags import Flags
from pydist.gradients.partitioned import GradientSet
from pydist.mesh import Mesh
from pydist.ops.conv import slab_kernels
from support.transports.device_contract import no_two_ranks, two_ranks

pytestmark = two_ranks(missing())

SHAPE = (2, 3, 12, 8, 8)


class Network(nn.Module):
    """Network with weights, global statistics, and poolings with all constants of their plans."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv3d(3, 4, 3, padding=1), nn.BatchNorm3d(4)
        self.head, self.unused = nn.Linear(4, 2), nn.Parameter(torch.ones(2))

    def forward(self, x):
        y = F.avg_pool3d(self.norm(self.conv(x)), 3, 1, 1)
        y, indices = F.max_pool3d(y, 2, return_indices=True)
        y = F.adaptive_avg_pool3d(F.max_unpool3d(y, indices, 2), (5, 3, 2))
        return self.head(y.mean((2, 3, 4)))


class Fused(nn.Module):
    """Network of fused layers: biases, ReLUs, a pool, a norm, a PReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv3d(3, 4, 3, padding=1), nn.LeakyReLU(0.1, inplace=True), nn.AvgPool3d(3, 2, 1),
            nn.InstanceNorm3d(4), nn.PReLU(), nn.BatchNorm3d(4), nn.PReLU(4),
            nn.Conv3d(4, 2, 3, padding=1), nn.ReLU(inplace=True),
        )  # fmt: skip
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, x):
        return self.layers(x).mean((2, 3, 4))


@pytest.mark.parametrize("kind", [Network, Fused])
def test_a_step_is_that_of_the_cpu(devices: Transport, kind: type[nn.Module]) -> None:
    mesh = Mesh(devices, 1, (2, 1, 1))
    generator = torch.Generator().manual_seed(0)
    network, x = kind().double(), torch.randn(SHAPE, generator=generator).double()
    for p in network.parameters():
        nn.init.normal_(p, generator=generator)

    def step(device: torch.device) -> list[torch.Tensor]:
        model = parallelize(copy.deepcopy(network).to(device), mesh)
        for _ in range(2):
            model.zero_grad()
            out = model(distribute_tensor(x.to(device), mesh))
            out.square().mean().backward()
        assert model.unused.grad is None
        used = [p.grad for p in model.parameters() if p is not model.unused]
        return [out.full_tensor().detach().cpu(), *(grad.cpu() for grad in used)]

    expected, found = step(torch.device("cpu")), step(devices.device)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


@pytest.mark.skipif(no_two_ranks() != "", reason=no_two_ranks())
def test_a_merged_norm_is_captured(devices: Transport) -> None:
    mesh = Mesh(devices, 1, (2, 1, 1))
    layout = layout_for_sample(mesh, SHAPE)
    x = torch.randn(layout.local_shape, device=devices.device)

    def step() -> torch.Tensor:
        return F.batch_norm(
            ShardedTensor.from_local(x, layout), None, None, training=True
        ).to_local()

    for _ in range(3):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        y = step()
    x.copy_(torch.randn_like(x) * (2 + devices.rank))
    graph.replay()
    torch.testing.assert_close(y, step())


def test_slabs_follow_torchs_setting_of_tf32(devices: Transport, monkeypatch, tmp_path) -> None:
    """It may change between passes, and be set for convolutions alone."""
    monkeypatch.setenv("PYDIST_TUNE", "1")
    monkeypatch.setenv("PYDIST_CACHE", str(tmp_path))
    monkeypatch.setattr(slab_tuning, "seconds_on", lambda problem, name, like: 1 + (name != "tf32"))
    used, run_slab = set(), slab_kernels.run_slab

    def noted(name: str, *rest: object) -> None:
        used.add(name)
        run_slab(name, *rest)

    monkeypatch.setattr(slab_kernels, "run_slab", noted)
    torch.manual_seed(0)
    conv = nn.Conv3d(8, 8, 3, padding=1)
    x = torch.randn(1, 8, 8, 8, 8)
    exact = copy.deepcopy(conv).double()(x.double()).detach()
    mesh = Mesh(devices, 1, (2, 1, 1))
    conv, x = conv.to(devices.device), distribute_tensor(x.to(devices.device), mesh)
    setting = torch.backends.cudnn.conv
    before = setting.fp32_precision
    try:
        for precision in ("ieee", "tf32", "ieee"):
            setting.fp32_precision = precision
            used.clear()
            found = conv(x).full_tensor().detach().cpu().double()
            error = float((found - exact).abs().max() / exact.abs().max())
            assert used == {"tf32"} if precision == "tf32" else "tf32" not in used
            assert error < (1e-2 if precision == "tf32" else 1e-5)
    finally:
        setting.fp32_precision = before


@pytest.mark.parametrize("order", [1.0, 2.0, float("inf")])
def test_norms_of_scattered_gradients_are_found_on_the_device(devices: Transport, order) -> None:
    whole = torch.randn(2, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    family = GradientSet(devices)
    family.add(whole[devices.rank].to(devices.device))
    family.add(whole[0, : 3 * devices.rank].to(devices.device))
    for member, expected in enumerate((whole, whole[0, :3])):
        norm = family.norm(member, order)
        assert norm.device == devices.device
        assert norm.item() == pytest.approx(torch.linalg.vector_norm(expected, order).item())


def test_a_captured_step_has_the_flags_of_the_step_before(devices: Transport) -> None:
    """The message is sent between the hosts, and adds nothing to the graph."""
    flags = Flags()
    own, proof = [int(devices.rank == 0), 0, 1], 7 - 14 * devices.rank
    everyones = [1, 0, 1], 7 * devices.size * (2 - devices.size)
    assert flags.exchange(devices, own, proof, captured=False) == everyones
    with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
        torch.zeros(1, device=devices.device)
        assert flags.exchange(devices, own, proof, captured=True) == everyones
        with pytest.raises(NotSupported, match="other gradients than the last one"):
            flags.exchange(devices, [1, 1, 1], proof, captured=True)
