"""Tests of LARS with loss scaling: all ranks that share a step skip it together, or none does.

The trust ratio hides a factor of the gradient. So all runs have a loss scale of 65,536 and weight
decay, and are compared with the formula in plain torch on the unscaled gradient.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp import GradScaler

from pydist import Mesh, distribute_tensor, parallelize
from pydist.exchange.own_slice import is_sharded_weight
from pydist.gradients.partitioned import PartitionedGradient
from pydist.optim import LARS, sharded
from pydist.stages import pipeline
from support.equivalence import on_ranks, randn, whole_of
from support.networks.small import initialized
from support.staged import DEEP, ONE, on_stages

SCALE = 65536.0
LR, MOMENTUM, DECAY, TRUST = 1.0, 0.9, 0.01, 0.02
STEPS, SKIPPED = 4, 1
X, TARGET = randn(4, 2, 6, 4, 3), randn(4, 3, seed=1)


class _Head(nn.Module):
    """The mean over voxels, as a plain tensor."""

    def forward(self, x: Any) -> Any:
        return x.mean((2, 3, 4))


def network() -> nn.Module:
    return initialized(
        nn.Sequential(nn.Conv3d(2, 8, 3, padding=1), nn.Tanh(), nn.Conv3d(8, 3, 1), _Head())
    )


def formula(scale: float = 1.0) -> dict[str, Tensor]:
    """Trains in plain torch by the paper's formula; `scale` is left in the gradient."""
    model = network()
    velocities = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for step in range(STEPS):
        if step == SKIPPED:
            continue
        model.zero_grad()
        (F.mse_loss(model(X), TARGET) * scale).backward()
        with torch.no_grad():
            for name, p in model.named_parameters():
                g, ratio = p.grad, 1.0
                if p.dim() > 1:
                    ratio = TRUST * p.norm() / (g.norm() + DECAY * p.norm())
                    g = g + DECAY * p
                velocities[name] = MOMENTUM * velocities[name] + LR * ratio * g
                p.sub_(velocities[name])
    return {name: p.detach() for name, p in model.named_parameters()}


def lars(model: nn.Module) -> LARS:
    return LARS(model.parameters(), LR, MOMENTUM, DECAY, TRUST)


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, tensor in expected.items():
        assert float((found[name] - tensor).abs().max()) <= 1e-11 * float(tensor.abs().max()), name


def test_a_forgotten_unscale_would_be_seen_here():
    for name, tensor in formula().items():
        if tensor.dim() > 1:
            change = (formula(SCALE)[name] - tensor).norm()
            assert change > 1e-4 * tensor.norm()


@pytest.mark.parametrize("where", [0, 1])
@pytest.mark.parametrize("unscales", [False, True], ids=["step", "unscale"])
@pytest.mark.parametrize(
    ("data", "spatial", "channel", "kind"),
    [
        (2, (1, 1, 1), 1, "whole"), (2, (1, 1, 1), 1, "partitioned"),
        (1, (2, 1, 1), 1, "whole"), (1, (2, 1, 1), 1, "partitioned"),
        (1, (1, 1, 1), 2, "whole"), (1, (1, 1, 1), 2, "slices"), (2, (1, 1, 1), 2, "slices"),
    ],
)  # fmt: skip
def test_an_overflow_on_one_rank_skips_the_step_on_all(
    data, spatial, channel, kind, unscales, where
):
    """Where ranks have parts of a gradient, the overflow is in one rank's part alone; else it is
    in what one rank adds to the mean."""

    def body(mesh: Mesh) -> tuple[list[float], dict[str, Tensor]]:
        model = parallelize(network(), mesh, sharded_weights=kind == "slices")
        optimizer: Any = lars(model)
        if kind == "partitioned":
            optimizer = sharded(optimizer, model, "always")
        scaler, scales = GradScaler("cpu", init_scale=SCALE, growth_interval=100), []
        rows = slice(4 * mesh.data_index // data, 4 * (mesh.data_index + 1) // data)
        for step in range(STEPS):
            y = model(distribute_tensor(X[rows], mesh))
            loss = F.mse_loss(whole_of(y), TARGET[rows])
            if step == SKIPPED and kind == "whole" and mesh.rank == where:
                loss = loss + model[0].bias[0] * torch.inf
            scaler.scale(loss).backward()
            # The groups' copies of a slice have equal gradients, after the reduction.
            part = mesh.coords["channel"] if kind == "slices" else mesh.rank
            if step == SKIPPED and part == where:
                for own in overflowing(model, kind):
                    own.fill_(torch.inf)
            if unscales:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
            optimizer.zero_grad()
        found = {}
        for name, p in model.named_parameters():
            found[name] = whole_of(p.detach()).clone()
        return scales, found

    expected = formula()
    for scales, found in on_ranks(spatial, body, data, axes={"channel": channel}):
        assert scales == [SCALE, SCALE / 2, SCALE / 2, SCALE / 2]
        assert_close(found, expected)


def overflowing(model: nn.Module, kind: str) -> list[Tensor]:
    """Returns this rank's own parts of gradients."""
    if kind == "slices":
        found = [p.to_local().grad for p in model.parameters() if is_sharded_weight(p)]
        assert found
        return found
    grads = [p.grad for p in model.parameters()]
    return [g.piece for g in grads if isinstance(g, PartitionedGradient)]


@pytest.mark.parametrize("where", ["0", "2"])
@pytest.mark.parametrize("meshes", [(ONE, ONE), (DEEP, ONE)], ids=str)
def test_an_overflow_in_one_stage_skips_the_step_in_all(meshes, where):
    def rank(stages):
        model = network()
        made = pipeline(model, stages, X[:1], micro_batches=2, cuts=["2"])
        optimizer = lars(model)
        overflows = iter(step == SKIPPED for step in range(STEPS))
        scaler, scales = GradScaler("cpu", init_scale=SCALE, growth_interval=100), []
        for _ in range(STEPS):
            made.step(X, TARGET, lambda y, t: scaler.scale(F.mse_loss(y, t)))
            grad = model[int(where)].bias.grad
            if next(overflows) and grad is not None:
                grad.fill_(torch.inf)
            made.unscale_(scaler, optimizer)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
            optimizer.zero_grad()
        made.gather()
        return scales, {name: p.detach().clone() for name, p in model.named_parameters()}

    expected = formula()
    for scales, found in on_stages(list(meshes), rank):
        assert scales == [SCALE, SCALE / 2, SCALE / 2, SCALE / 2]
        assert_close(found, expected)
