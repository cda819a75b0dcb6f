"""A training run on ranks whose devices may be unequal, against one device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pydist import Mesh, ShardedTensor, distribute_tensor, parallelize, run_local
from pydist.comm import Transport
from pydist.comm.transports.staged import StagedTransport
from pydist.optim import ShardedOptimizer, sharded
from support.equivalence import randn
from support.networks.small import initialized

X, TARGET = randn(6, 3, 6, 4, 4, seed=1), randn(6, 5, seed=2)


def network() -> nn.Module:
    """Returns a new network, equal at every call."""
    return initialized(nn.Sequential(
        nn.Conv3d(3, 6, 3, padding=1, bias=False), nn.BatchNorm3d(6), nn.ReLU(),
        nn.Conv3d(6, 4, 3), nn.Tanh(), nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(4, 5),
    ))  # fmt: skip


def on_devices(devices: Sequence[str], body: Callable[[Transport], Any]) -> list[Any]:
    """Runs `body(world)` on rank-threads with these devices, or kinds of devices to pretend."""

    def rank(host: Transport) -> Any:
        own = devices[host.rank]
        device = torch.device(own) if own.startswith("cuda") else None
        return body(StagedTransport(host, device, devices))

    return run_local(rank, len(devices), timeout=120)


def train(mesh: Mesh | None, *, slices: bool = False, steps: int = 3) -> list[Tensor]:
    """Returns the losses and the state of the network and its optimizer after some steps."""
    model: Any = network()
    x, target, device = X, TARGET, None
    if mesh is not None:
        device = mesh.world.device or torch.device("cpu")
        x, target = (t.chunk(mesh.data_size)[mesh.data_index].to(device) for t in (X, TARGET))
        x = distribute_tensor(x, mesh)
        model = parallelize(model.to(device), mesh, sharded_weights=slices)
    optimizer: Any = torch.optim.Adam(model.parameters(), 0.01)
    if mesh is not None:
        optimizer = sharded(optimizer, model)
        assert isinstance(optimizer, ShardedOptimizer)
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), target)
        loss.backward()
        found.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        optimizer.step()
    if mesh is not None:
        for p in model.parameters():
            own = (p.to_local() if isinstance(p, ShardedTensor) else p).detach().cpu()
            group = mesh.data if isinstance(p, ShardedTensor) else mesh.world
            assert all(torch.equal(own, row) for row in group.all_gather(own.contiguous()))
    values = optimizer.state_dict()["state"].values()
    found += [v for each in values for v in each.values() if isinstance(v, Tensor)]
    return [t.cpu() for t in (*found, *model.state_dict().values())]


def check(devices: Sequence[str], data: int, **options: Any) -> None:
    """Compares training on ranks with these devices with training on one device."""
    expected = train(None)

    def body(world: Transport) -> list[Tensor]:
        return train(Mesh(world, data, axes={"channel": world.size // data}), **options)

    for found in on_devices(devices, body):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
