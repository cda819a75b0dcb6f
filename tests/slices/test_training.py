"""Training with sharded weights equals one device: outputs, gradients, parameters, state."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn

import pydist
from pydist import Mesh, ShardedTensor
from pydist.models import CosmoFlow
from support.equivalence import assert_equal, on_ranks, randn, whole_of

MESHES = {
    "channel 2": {"axes": {"channel": 2}},
    "channel 2, depth 2": {"spatial": (2, 1, 1), "axes": {"channel": 2}},
    "channel 2, data 2": {"data": 2, "axes": {"channel": 2}},
    "channel 2:1": {"axes": {"channel": 2}, "shares": {"channel": (2, 1)}},
    "channel 3, width 2": {"spatial": (1, 1, 2), "axes": {"channel": 3}},
}


def head(features: int) -> nn.Sequential:
    return nn.Sequential(
        nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(features, 7), nn.Tanh(), nn.Linear(7, 5)
    )


class Tied(nn.Module):
    """Two layers with one weight, which the second one also uses transposed, and a penalty."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(torch.tanh(self.first(x.mean((2, 3, 4)))))
        return torch.tanh(x) @ self.first.weight.t()


def frozen() -> nn.Module:
    layers = nn.Sequential(nn.Conv3d(6, 6, 3, padding=1), nn.ReLU(), nn.Conv3d(6, 8, 1), head(8))
    layers[0].weight.requires_grad_(False)
    layers[3][2].requires_grad_(False)
    return layers


def normed() -> nn.Module:
    return nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Conv3d(6, 8, 1)), nn.Tanh(),
        nn.utils.parametrizations.spectral_norm(nn.Conv3d(8, 6, 1)), nn.Tanh(),
        nn.utils.spectral_norm(nn.Conv3d(6, 6, 1)), nn.Tanh(), nn.Conv3d(6, 6, 1), head(6),
    )  # fmt: skip


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "convolutions": lambda: nn.Sequential(
        nn.Conv3d(6, 8, 3, padding=1, bias=False), nn.BatchNorm3d(8), nn.ReLU(),
        nn.Conv3d(8, 6, 3, padding=1, stride=2, bias=False), nn.GroupNorm(2, 6), nn.LeakyReLU(0.1),
        nn.ConvTranspose3d(6, 7, 2, 2), nn.Tanh(), nn.ConvTranspose3d(7, 6, 3, 1, 1), head(6),
    ),
    "groups": lambda: nn.Sequential(
        nn.Conv3d(6, 12, 3, padding=1, groups=6), nn.Tanh(), nn.Conv3d(12, 12, 1, groups=3),
        nn.Tanh(), nn.Conv3d(12, 6, 1, groups=2), nn.Tanh(),
        nn.ConvTranspose3d(6, 12, 2, 2, groups=3), nn.Tanh(),
        nn.ConvTranspose3d(12, 12, 3, 1, 1, groups=12), nn.Tanh(), nn.Conv3d(12, 6, 1), head(6),
    ),
    "tied": Tied,
    "frozen": frozen,
    "weight norm, spectral norm": normed,
}  # fmt: skip


def train(
    model: nn.Module,
    x: Tensor,
    steps: int = 4,
    made: Callable[..., torch.optim.Optimizer] = torch.optim.Adam,
) -> dict[str, Tensor]:
    """Returns outputs, gradients, norms, parameters and the optimizer's state of some steps."""
    optimizer = made(model.parameters(), 1e-3, weight_decay=0.1)
    found: dict[str, Tensor] = {}
    for step in range(steps):
        optimizer.zero_grad()
        y = model(x)
        penalty = sum(p.square().sum() for p in model.parameters())
        (y.sin().square().mean() + 1e-3 * penalty).backward()
        if step in (0, steps - 1):
            found |= {
                f"gradient {n}, {step}": whole_of(p.grad).detach().clone()
                for n, p in model.named_parameters()
                if p.grad is not None
            }
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        found[f"norm {step}"] = whole_of(norm).detach().clone()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        found["output"] = whole_of(model(x))
    found |= {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for number, values in optimizer.state_dict()["state"].items():
        found |= {f"state {number} {k}": v for k, v in values.items() if isinstance(v, Tensor)}
    return found


def compare(
    network: nn.Module, x: Tensor, mesh: Mapping[str, object], sharded: int | None = None
) -> None:
    """Compares training on a mesh with training on one device.

    Args:
        network: the network.
        x: the global batch.
        mesh: options of the mesh.
        sharded: number of weights that are expected in slices.
    """

    def split(mesh: Mesh) -> dict[str, Tensor]:
        model = pydist.parallelize(copy.deepcopy(network), mesh, sharded_weights=True)
        count = sum(isinstance(p, ShardedTensor) for p in model.parameters())
        assert sharded is None or count == sharded
        rows = x.chunk(mesh.data_size)[mesh.data_index]
        found = train(model, pydist.distribute_tensor(rows, mesh))
        if mesh.data_size > 1:
            del found["output"]  # that of the group's samples
        return found

    expected = train(copy.deepcopy(network), x)
    if mesh.get("data", 1) != 1:
        del expected["output"]
    for found in on_ranks(mesh.get("spatial", (1, 1, 1)), split, **without(mesh, "spatial")):
        assert_equal(found, expected)


def without(options: Mapping[str, object], name: str) -> dict[str, object]:
    return {key: value for key, value in options.items() if key != name}


@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
@pytest.mark.parametrize("make", NETWORKS.values(), ids=NETWORKS)
def test_training_is_that_of_one_device(make, mesh):
    torch.manual_seed(0)
    compare(make().double(), randn(2, 6, 8, 6, 6), mesh)


def test_weights_that_stay_whole():
    """Computed weights, weights of too few channels, and those that another module uses."""
    torch.manual_seed(0)
    compare(normed().double(), randn(2, 6, 4, 4, 4), MESHES["channel 2"], sharded=3)
    few = nn.Sequential(nn.Conv3d(6, 2, 1), nn.Conv3d(2, 6, 1, groups=2), head(6)).double()
    compare(few, randn(2, 6, 4, 4, 4), MESHES["channel 3, width 2"], sharded=2)


@pytest.mark.parametrize("mesh", list(MESHES.values())[:3], ids=list(MESHES)[:3])
def test_cosmoflow(mesh):
    """Convolutions are split in space where the mesh is, and all layers by channels."""
    torch.manual_seed(0)
    network = CosmoFlow(32, 2, variant="mlperf", dropout=0.0).double()
    compare(network, 0.1 * randn(2, 2, 32, 32, 32), mesh, sharded=6)


def test_a_gathered_input_needs_no_sum_of_its_gradient():
    """The adjoint of the gathering adds the ranks' parts of dL/dx."""
    torch.manual_seed(0)
    layers = nn.Conv3d(4, 8, 3, padding=1), nn.ReLU(), nn.Conv3d(8, 6, 3, padding=1)
    network, x = nn.Sequential(*layers, nn.Conv3d(6, 4, 1)), torch.randn(1, 4, 4, 4, 4)

    def body(mesh: Mesh) -> list[int]:
        group, sizes = mesh.group(("channel",)), []
        send = group.all_reduce

        def counting(tensor: Tensor, *args: str) -> None:
            sizes.append(tensor.numel())
            send(tensor, *args)

        group.all_reduce = counting
        model = pydist.parallelize(copy.deepcopy(network), mesh, sharded_weights=True)
        y = model(pydist.distribute_tensor(x, mesh).requires_grad_())
        assert sizes == []
        y.square().mean().backward()
        return [size for size in sizes if size > 100]  # without flags

    found = on_ranks((1, 1, 1), body, axes={"channel": 2})
    assert found == [[x.numel()]] * 2  # of the input, which all ranks hold


class Branches(nn.Module):
    """A branch of a plain table, plain layers between sharded ones, and a plain head."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.table = nn.Conv3d(6, 4, 3, padding=1), nn.Linear(3, 4)
        self.middle, self.head = nn.Conv1d(4, 6, 3, padding=1), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        rows = torch.tanh(self.table(torch.linspace(0, 1, 6, dtype=x.dtype).view(2, 3)))
        x = torch.tanh(self.conv(x)).mean((3, 4))
        x = whole_of(x)
        x = torch.tanh(self.middle(x * rows.mean(0)[:, None])).mean(2)
        return self.head(x)


@pytest.mark.parametrize("mesh", MESHES.values(), ids=MESHES)
def test_plain_inputs(mesh):
    torch.manual_seed(0)
    compare(Branches().double(), randn(2, 6, 8, 6, 6), mesh, sharded=4)


@pytest.mark.parametrize(
    "average", [get_ema_multi_avg_fn(0.7), get_swa_multi_avg_fn()], ids=["ema", "swa"]
)
@pytest.mark.parametrize("mesh", ["channel 2", "channel 2:1"])
def test_averages_of_sharded_weights(mesh: str, average: Any) -> None:
    """Also of biases, which stay whole."""

    def averaged(network: nn.Module) -> list[Tensor]:
        found = AveragedModel(network, multi_avg_fn=average)
        for step in range(3):
            with torch.no_grad():
                for weight in network.parameters():
                    weight.mul_(1.5 + step)
            found.update_parameters(network)
        return [whole_of(weight).detach().clone() for weight in found.parameters()]

    network = nn.Sequential(nn.Conv3d(6, 8, 3), nn.Tanh(), nn.Conv3d(8, 6, 1)).double()
    expected = averaged(copy.deepcopy(network))

    def job(mesh: Mesh) -> None:
        found = averaged(pydist.parallelize(copy.deepcopy(network), mesh, sharded_weights=True))
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)

    on_ranks(body=job, **{"spatial": (1, 1, 1), **MESHES[mesh]})
