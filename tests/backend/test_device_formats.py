"""Tests of the memory format of convolutions on devices, by their code path on the CPU."""

from __future__ import annotations

from functools import partial
from unittest import mock

import pytest
import torch
import torch.nn.functional as F

from pydist import Mesh, ShardedTensor
from pydist.backend import conv_tuning
from pydist.backend.conv import FORWARD
from pydist.backend.problem import ConvProblem
from pydist.comm import LocalTransport
from pydist.exchange.memory_formats import is_channels_last
from pydist.ops.conv import conv, conv_transpose
from support.equivalence import layout_at, on_ranks, randn, shard

SHAPE = (1, 8, 12, 8, 8)


@pytest.fixture
def as_on_a_device(tmp_path, monkeypatch):
    """Makes convolutions on the CPU take the code path of a device, which measures them."""
    monkeypatch.setenv("PYDIST_TUNE", "1")
    monkeypatch.setenv("PYDIST_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(conv_tuning, "_MEASURED_FLOPS", 0)
    of_device = partial(ConvProblem, device="cuda")
    for module in (conv, conv_transpose):
        monkeypatch.setattr(module, "ConvProblem", lambda *given: of_device(*given[:7]))


@pytest.mark.parametrize("lies", ["input", "weight", "nothing", "one shard"])
@pytest.mark.parametrize("padding", [1, 0], ids=["corrected", "gathered"])
@pytest.mark.parametrize("function", [F.conv3d, F.conv_transpose3d])
def test_a_device_keeps_the_memory_format_of_the_operands(as_on_a_device, function, padding, lies):
    """All ranks use one format, forward and backward, since halos are sent in it."""
    last = torch.channels_last_3d
    whole, kernel = randn(*SHAPE).float(), randn(8, 8, 3, 3, 3, seed=1).float()
    plain = kernel.clone().requires_grad_()
    expected = function(whole, plain, padding=padding)
    expected.square().sum().backward()

    def body(mesh):
        layout = layout_at(mesh, SHAPE, [[0, 6, 12], None, None])
        local = shard(whole, layout).to_local()
        if lies == "input" or (lies == "one shard" and mesh.rank == 0):
            local = local.contiguous(memory_format=last)
        weight = kernel.contiguous(memory_format=last) if lies == "weight" else kernel.clone()
        mine = weight.requires_grad_()
        y = function(ShardedTensor.from_local(local, layout), mine, padding=padding)
        y.square().sum().backward()
        (plan,) = (p for key, p in mesh.session.plans.items() if key[0].startswith("conv"))
        assert plan._chooser._chosen.channels_last == (lies in ("input", "weight"))
        torch.testing.assert_close(y.full_tensor(), expected)
        total = mine.grad.contiguous()
        mesh.world.all_reduce(total)
        torch.testing.assert_close(total / mesh.size, plain.grad, rtol=1e-4, atol=1e-2)

    on_ranks((2, 1, 1), body)


def test_a_device_is_given_the_weight_as_its_activations_lie(as_on_a_device):
    """Otherwise the library would copy it in every call."""
    seen = []
    forward = FORWARD["torch"]

    def watched(problem, x, weight, bias):
        seen.extend((x, weight))
        return forward(problem, x, weight, bias)

    mesh = Mesh(LocalTransport())
    weight = randn(16, 8, 3, 3, 3, seed=1).float().contiguous(memory_format=torch.channels_last_3d)
    with mock.patch.dict(FORWARD, torch=watched):
        F.conv3d(shard(randn(*SHAPE).float(), layout_at(mesh, SHAPE, [])), weight)
    assert all(map(is_channels_last, seen))
    assert seen[1].data_ptr() == weight.data_ptr()
