"""Tests of complex tensors and parameters in stages, as of Fourier layers."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pydist.stages import pipeline
from support.equivalence import randn
from support.networks.small import initialized
from support.staged import ONE, TWO_GROUPS, on_stages


class Spectral(nn.Module):
    """Layer in Fourier space between two others."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv1d(1, 3, 3, padding=1), nn.Conv1d(3, 3, 3, padding=1)
        self.turn = nn.Linear(3, 3, dtype=torch.complex128)
        self.weight = nn.Parameter(torch.complex(randn(3, 3), randn(3, 3, seed=1)))

    def forward(self, x: Tensor) -> Tensor:
        waves = torch.fft.rfft(self.first(x))
        waves = torch.einsum("bif,io->bof", waves, self.weight).conj()
        turned = self.turn(waves.mT).mT
        y = torch.fft.irfft(turned, n=x.shape[2]) + waves.imag.mean(2, keepdim=True)
        return self.last(torch.tanh(y))


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
@pytest.mark.parametrize("meshes", [[ONE] * 2, [ONE] * 3, [ONE] * 6, [TWO_GROUPS] * 2], ids=str)
def test_training_of_a_spectral_layer(meshes, schedule):
    x, target = randn(4, 1, 8), randn(4, 3, 8, seed=1)
    torch.manual_seed(0)
    network = Spectral()
    initialized(network.first)
    initialized(network.last)
    alone = copy.deepcopy(network)
    optimizer = torch.optim.Adam(alone.parameters(), eps=1e-2)
    norms = []
    for _ in range(3):
        optimizer.zero_grad()
        F.mse_loss(alone(x), target).backward()
        norms.append(float(nn.utils.clip_grad_norm_(alone.parameters(), 0.1)))
        optimizer.step()

    def rank(stages):
        model = copy.deepcopy(network)
        made = pipeline(model, stages, x, micro_batches=2, balance="memory", schedule=schedule)
        mine = torch.optim.Adam(model.parameters(), eps=1e-2)
        groups = stages.mesh.data_size
        own = slice(stages.mesh.data_index, None, groups)
        for norm in norms:
            mine.zero_grad()
            made.step(x[own], target[own], F.mse_loss)
            assert float(made.clip_grad_norm_(0.1)) == pytest.approx(norm, rel=1e-6)
            mine.step()
        made.gather()
        for name, p in model.named_parameters():
            torch.testing.assert_close(p, alone.get_parameter(name), rtol=1e-9, atol=1e-11)
        state = made.optimizer_state(mine)["state"]
        assert len(state) == len(optimizer.state_dict()["state"])

    on_stages(meshes, rank)
