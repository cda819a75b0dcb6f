"""Gradients of weights that a zero-bubble schedule computes in passes of their own."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint

from pydist.errors import NotSupported
from pydist.stages.micro_batch import MicroBatch
from support.equivalence import Task, randn
from support.networks.small import initialized
from support.staged import DEEP, ONE, TWO_GROUPS, check_stages, on_stages, step_of

ZERO_BUBBLE = {"schedule": "zero-bubble"}


class Layers(nn.Module):
    """Layers of one to three spatial dims, linear ones, and a weight that two layers share."""

    def __init__(self, dims: int) -> None:
        super().__init__()
        conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
        up = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[dims - 1]
        self.first, self.same = conv(2, 4, 3, padding=1), conv(4, 4, 3, padding="same")
        self.grouped = conv(4, 4, 3, 2, 2, dilation=2, groups=2, bias=False)
        self.up = up(4, 4, 3, 2, 1, output_padding=1)
        self.linear, self.tied = nn.Linear(4, 4), conv(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu_(self.first(x))
        y = F.gelu(self.same(y)) + y
        y = F.leaky_relu_(self.up(self.grouped(y)))
        y = self.tied(F.gelu(self.tied(y)))
        return self.linear(y.flatten(2).transpose(1, 2)).square().mean(1)


def task_of(network: nn.Module, dims: int = 3) -> Task:
    x = randn(8, 2, *(6, 4, 4)[:dims], seed=1)
    return Task(initialized(network), x, randn(8, 4, seed=2), F.mse_loss)


def left_by(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns a list that gets the number of gradients which each pass over weights computes."""
    counts: list[int] = []
    finish = MicroBatch.finish_weights

    def counted(self: MicroBatch) -> None:
        counts.append(len(self.left or ()))
        finish(self)

    monkeypatch.setattr(MicroBatch, "finish_weights", counted)
    return counts


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_layers_leave_the_gradients_of_their_weights(monkeypatch, dims, recompute):
    counts = left_by(monkeypatch)
    options = {**ZERO_BUBBLE, "recompute": recompute}
    check_stages(task_of(Layers(dims), dims), [ONE] * 2, 4, order=[0, 1, 1, 0], **options)
    assert len(counts) == 4 * 4
    # Not that of the first layer; plain "same" padding and linear layers of cut tensors neither.
    assert sum(counts) >= 4 * 5


@pytest.mark.parametrize("meshes", [[DEEP, ONE], [DEEP, DEEP], [TWO_GROUPS] * 2], ids=str)
def test_split_stages_and_groups(monkeypatch, meshes):
    counts = left_by(monkeypatch)
    check_stages(task_of(Layers(3)), meshes, 2, **ZERO_BUBBLE)
    assert sum(counts) > 0


class Special(nn.Module):
    """Weights that are computed, frozen, used twice in different ways, or made by activations."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.normed = nn.Conv2d(2, 4, 3), spectral_norm(nn.Conv2d(4, 4, 1))
        self.frozen, self.shared = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)
        self.frozen.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.frozen(self.normed(self.first(x)))
        y = F.conv2d(self.shared(y), self.shared.weight.square())
        made = y.mean((0, 2, 3)).outer(y.mean((0, 2, 3)))[:, :, None, None]
        return F.conv2d(y, made).mean((2, 3))


def test_computed_weights_are_those_of_one_device():
    task = task_of(Special().eval(), 2)
    check_stages(task, [ONE] * 2, 4, cuts=["shared"], **ZERO_BUBBLE)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner = nn.Conv2d(2, 4, 3), nn.Conv2d(4, 4, 1)
        self.last = nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = checkpoint(self.inner, self.first(x), use_reentrant=False)
        return self.last(y).mean((2, 3))


def test_checkpointed_parts():
    check_stages(task_of(Checkpointed(), 2), [ONE] * 2, 4, cuts=["last"], **ZERO_BUBBLE)


class Changed(nn.Module):
    """A layer whose input is changed in place after it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 4, 3), nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        z = self.second(y)
        y += 1
        return (y + z).mean((2, 3))


def test_an_input_that_is_changed_in_place_is_refused():
    """As without stages: the gradient of the weight needs it."""
    task = task_of(Changed(), 2)

    def body(stages):
        with pytest.raises(NotSupported, match="changes in place"):
            step_of(task._replace(model=copy.deepcopy(task.model)), stages, micro_batches=2,
                    cuts=[], **ZERO_BUBBLE)  # fmt: skip

    on_stages([ONE], body)


def test_hooks_of_parameters_see_one_gradient_of_each_micro_batch():
    task = task_of(Layers(3))
    seen: dict[str, list[float]] = {}

    def body(stages):
        model = copy.deepcopy(task.model)
        for name, p in model.named_parameters():

            def note(grad: Tensor, name: str = name) -> None:
                seen.setdefault(name, []).append(float(grad.sum()))

            p.register_hook(note)
        step_of(task._replace(model=model), stages, micro_batches=4, cuts=["up"], **ZERO_BUBBLE)

    on_stages([ONE] * 2, body)
    assert seen.keys() == dict(task.model.named_parameters()).keys()
    assert all(len(each) == 4 for each in seen.values()), {k: len(v) for k, v in seen.items()}


def gradients_in_autocast(task: Task, cut: str, schedule: str) -> list[dict[str, Tensor]]:
    """Returns the gradients that each of two stages has after a step within autocast."""

    def body(stages):
        model = copy.deepcopy(task.model)
        with torch.autocast("cpu", torch.bfloat16):
            step_of(task._replace(model=model), stages, micro_batches=4, schedule=schedule,
                    cuts=[cut])  # fmt: skip
        return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    return on_stages([ONE] * 2, body)


def test_mixed_precision():
    """Weights that autocast converts are left too, and their gradients are those of 1F1B."""
    task = Task(Layers(2).float(), randn(8, 2, 6, 4).float(), randn(8, 4).float(), F.mse_loss)
    found = (gradients_in_autocast(task, "up", each) for each in ("zero-bubble", "1f1b"))
    for one, other in zip(*found, strict=True):
        assert one.keys() == other.keys()
        for name, grad in one.items():
            torch.testing.assert_close(grad, other[name], rtol=2e-2, atol=2e-3)


class Precise(nn.Module):
    """A linear layer in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return self.linear(x.float())


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_backward_is_outside_of_autocast(schedule):
    """A step within autocast has the gradients of a loss whose backward pass runs outside."""
    network = nn.Sequential(nn.Linear(4, 4), Precise(), Precise())
    task = Task(network, randn(8, 4).float(), randn(8, 4).float(), F.mse_loss)
    _, found = gradients_in_autocast(task, "1", schedule)
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.mse_loss(network(task.x), task.target)
    loss.backward()
    for name in ("1.linear.weight", "2.linear.weight"):
        expected = network.get_parameter(name).grad
        torch.testing.assert_close(found[name], expected, rtol=1e-5, atol=1e-6)
