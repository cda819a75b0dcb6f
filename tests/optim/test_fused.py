"""Tests of fused optimizer steps against unfused steps."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import SGD, Adam

from pydist.optim.fused import match_parameter_formats, start_momentum


@pytest.mark.parametrize("fused", [False, True])
def test_an_overflow_in_the_first_step_leaves_no_trace_in_the_momentum(fused):
    """By then a fused step has allocated the momentum in reused memory."""
    torch.full((4096,), 1e30)
    parameter = nn.Parameter(torch.ones(4096))
    optimizer = SGD([parameter], 0.5, momentum=0.5, fused=fused)
    if fused:
        start_momentum(optimizer)
    scaler = GradScaler("cpu", init_scale=2.0**100)
    for factor in (1e30, 1.0, 1.0):
        scaler.scale((parameter * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert torch.equal(parameter, torch.full((4096,), 1 - 0.5 * 1 - 0.5 * 1.5))


@pytest.mark.parametrize("make", [Adam, lambda p, lr, fused: SGD(p, lr, 0.9, fused=fused)])
def test_a_state_that_was_loaded_belongs_to_the_same_elements(make):
    """Checkpoints hold the state contiguously, whatever the memory format of the parameters."""
    weight, *grads = torch.randn(3, 8, 4, 3, 3, 3, generator=torch.Generator().manual_seed(0))

    def trained(fused: bool) -> torch.Tensor:
        parameter = nn.Parameter(weight.contiguous(memory_format=torch.channels_last_3d))
        optimizer = make([parameter], lr=0.1, fused=fused)
        for grad in grads:
            parameter.grad = torch.empty_like(parameter).copy_(grad)
            optimizer.step()
            saved = copy.deepcopy(optimizer.state_dict())
            for name, value in saved["state"][0].items():
                saved["state"][0][name] = value.contiguous()
            optimizer = make([parameter], lr=0.1, fused=fused)
            optimizer.load_state_dict(saved)
            match_parameter_formats(optimizer)
        return parameter.detach()

    torch.testing.assert_close(trained(fused=True), trained(fused=False))
