"""Operands that must be equal on all ranks: differences are named, whenever they begin."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pydist import Mesh, distribute_tensor, parallelize
from pydist.comm import Transport, run_local
from pydist.errors import UsageError
from pydist.exchange.contents import REPEATED_SHARES, REPEATS, SHARES, WHOLE, Contents


class Noise(nn.Module):
    """Module that adds `noise(n)` in the n-th forward."""

    def __init__(self, noise) -> None:
        super().__init__()
        self.noise, self.forwards = noise, 0

    def forward(self, x: Tensor) -> Tensor:
        self.forwards += 1
        return x + self.noise(self.forwards)


class LayerScale(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(channels, 1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


def train(t: Transport, noise, steps: int = 6, data: int = 1, change=None, reached=None) -> None:
    """Trains a network for some steps and calls `change(model, step)` before each."""
    mesh = Mesh(t, data=data, spatial=(t.size // data, 1, 1))
    torch.manual_seed(0)
    scales = [LayerScale(4) for _ in range(3)]
    model = nn.Sequential(
        nn.Conv3d(1, 4, 3, padding=1), *scales, Noise(noise), nn.AdaptiveAvgPool3d(1),
        nn.Flatten(), nn.Linear(4, 5000),
    )  # fmt: skip
    parallelize(model, mesh)
    for step in range(1, steps + 1):
        if reached is not None:
            reached[t.rank] = step
        if change is not None:
            change(model, step)
        x = torch.ones(1, 1, 6, 4, 4)
        model(x).square().mean().backward()
        model.zero_grad()


def zero(_: int) -> Tensor:
    return torch.zeros(4, 1, 1, 1)


def test_noise_of_a_shape_that_was_compared_before_is_noticed() -> None:
    def body(t: Transport) -> None:
        generator = torch.Generator().manual_seed(t.rank)
        train(t, lambda _: torch.randn(4, 1, 1, 1, generator=generator))

    named = r"shape \(4, 1, 1, 1\) \(float32\) in module 4 differs between the ranks 0 and 1"
    with pytest.raises(UsageError, match=f"{named}.*the first that compares it"):
        run_local(body, 2)


@pytest.mark.parametrize("library", ["python", "numpy"])
def test_random_numbers_of_other_libraries_are_noticed(library: str) -> None:
    def body(t: Transport) -> None:
        numbers = random.Random(t.rank), np.random.default_rng(t.rank)
        draw = numbers[0].random if library == "python" else numbers[1].standard_normal
        train(t, lambda _: torch.tensor(draw()))

    with pytest.raises(UsageError, match=r"in module 4 differs between the ranks 0 and 1"):
        run_local(body, 2)


def test_constants_are_not_compared() -> None:
    """One rank may compute with constants alone, for example to print a value."""

    def body(t: Transport) -> None:
        model = parallelize(nn.Conv3d(1, 1, 3, padding=1), Mesh(t, spatial=(2, 1, 1)))
        for _ in range(3):
            y = model(torch.ones(1, 1, 6, 4, 4))
            if t.rank == 1:
                _ = (y * 0.1 > 1e-5, y + 1.5, y.clamp(max=float("inf")), y[:, torch.tensor(0)])
                _ = (y.detach().abs(), y.data * 2, y.to(torch.bfloat16), y.clone(), y.cpu())
                with torch.no_grad():
                    y.exp()
            y.square().mean().backward()

    run_local(body, 2)


def test_what_differs_from_the_fourth_step_on_is_named_with_the_step() -> None:
    reached: dict[int, int] = {}

    def body(t: Transport) -> None:
        train(t, lambda n: zero(n) + (t.rank if n >= 4 else 0), reached=reached)

    since = "equal in training forward 3, different in 4 at the latest"
    with pytest.raises(UsageError, match=since):
        run_local(body, 2)
    assert set(reached.values()) == {4}  # no optimizer uses it


def test_one_element_of_a_large_operand_is_seen_within_fifty_steps() -> None:
    def body(t: Transport) -> None:
        def noise(n: int) -> Tensor:
            values = torch.zeros(8, 4, 6, 4, 4)
            values[5, 2, 3, 1, 1] = float(t.rank and n >= 4)
            return values

        mesh = Mesh(t, spatial=(t.size, 1, 1))
        model = parallelize(nn.Sequential(nn.Conv3d(1, 4, 1), Noise(noise)), mesh)
        for step in range(1, 54):
            reached[t.rank] = step
            model(torch.ones(8, 1, 6, 4, 4)).sum().backward()

    reached: dict[int, int] = {}
    with pytest.raises(UsageError, match="this part of it equal in training forward"):
        run_local(body, 2)
    assert 4 <= min(reached.values()) <= 4 + SHARES


def test_a_turn_of_shares_covers_a_tensor_of_any_strides() -> None:
    plain = torch.arange(3 * 50 * 7 * 5.0).view(3, 50, 7, 5)
    for tensor in (plain, plain.permute(0, 2, 3, 1), plain[:, ::2], plain.transpose(0, 3)[:, 1:]):
        sums: dict[int, set[int]] = {}
        for changed in (False, True):
            if changed:
                tensor[tensor.shape[0] - 1, 3, 2, 2] += 1
            contents = Contents()
            for _ in range(SHARES + 1):
                contents.add(tensor, 0, "operand")
                contents.take()
                sums.setdefault(contents.turn, set()).add(contents._compared[0].checksum.value())
                contents.turn += 1
        assert max(len(each) for turn, each in sums.items() if turn) == 2


def test_steps_decided_by_a_loss_of_each_rank_are_named() -> None:
    def body(t: Transport) -> None:
        model = parallelize(nn.Conv3d(1, 2, 3, padding=1), Mesh(t, data=2))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(3):
            loss = model(torch.full((1, 1, 6, 4, 4), 1.0 + t.rank)).square().mean()
            loss.backward()
            for group in optimizer.param_groups:
                group["lr"] = 0.1 / loss.item()
            optimizer.step()

    with pytest.raises(UsageError, match=r"parameter .* differs .* rates by a loss of all"):
        run_local(body, 2)


@pytest.mark.parametrize(("size", "data"), [(2, 1), (2, 2), (4, 2)])
def test_weights_loaded_on_one_rank_are_noticed(size: int, data: int) -> None:
    def body(t: Transport) -> None:
        def load(model: nn.Module, step: int) -> None:
            if step == 3 and t.rank == 0:
                model.load_state_dict({k: 1.5 * v for k, v in model.state_dict().items()})

        train(t, zero, change=load, data=data)

    with pytest.raises(UsageError, match=r"parameter .* differs .* load or change the model on"):
        run_local(body, size)


def test_weights_of_a_frozen_network_and_in_evaluation_are_compared() -> None:
    def body(t: Transport, frozen: bool) -> None:
        mesh = Mesh(t, spatial=(t.size, 1, 1))
        model = nn.Sequential(nn.Conv3d(1, 2, 3, padding=1)).requires_grad_(not frozen)
        parallelize(model, mesh).eval()
        for step in range(4):
            if step == 2 and t.rank == 1:
                model[0].weight.data[0, 0, 1, 1, 1] += 1
            with torch.no_grad():
                model(torch.ones(1, 1, 6, 4, 4))

    for frozen in (False, True):
        with pytest.raises(UsageError, match=r"differs between the ranks 0 and 1"):
            run_local(body, 2, frozen)


def test_data_groups_may_hold_different_operands_and_go_at_their_own_pace() -> None:
    def body(t: Transport) -> None:
        mesh = Mesh(t, data=2, spatial=(2, 1, 1))
        group = mesh.data_index
        model = parallelize(nn.Sequential(nn.Conv3d(1, 2, 3, padding=1)), mesh)
        for step in range(4):
            x = torch.full((1, 1, 6, 4, 4), float(group + step))
            (model(x) + torch.full((2, 1, 1, 1), float(group))).sum().backward()
            with torch.no_grad():
                for _ in range(group):
                    model(distribute_tensor(x, mesh)).sum()

    run_local(body, 4)


def small_operand(x: Tensor, model: nn.Module, differs: bool) -> None:
    x + torch.full((4, 1, 1, 1), float(differs))


def one_of_several_large_operands(x: Tensor, model: nn.Module, differs: bool) -> None:
    for number in range(5):
        values = torch.zeros(2, 4, 8, 6, 6)
        values[1, 1, 4, 1, 1] = float(differs and number == 3)
        x * values


def weight_of_a_part(x: Tensor, model: nn.Module, differs: bool) -> None:
    model[1].weight.data[31, 15, 2, 2, 2] = float(differs)
    with torch.no_grad():
        model[1](model[0](x))


def training_without_backward(x: Tensor, model: nn.Module, differs: bool) -> None:
    model[1].weight.data[1, 0, 0, 0, 0] = float(differs)
    model(x)


@pytest.mark.parametrize(
    "step",
    [
        small_operand,
        one_of_several_large_operands,
        weight_of_a_part,
        training_without_backward,
    ],
)
def test_what_is_used_without_a_backward_is_compared_within_fifty_steps(step) -> None:
    def body(t: Transport) -> None:
        mesh = Mesh(t, spatial=(t.size, 1, 1))
        x = distribute_tensor(torch.ones(2, 4, 8, 6, 6), mesh)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv3d(4, 16, 1), nn.Conv3d(16, 32, 3, padding=1))
        parallelize(model, mesh)
        for number in range(1, 54):
            reached[t.rank] = number
            step(x, model, t.rank == 1 and number >= 4)

    reached: dict[int, int] = {}
    with pytest.raises(UsageError, match="differs between the ranks 0 and 1"):
        run_local(body, 2)
    assert 4 <= min(reached.values()) <= 4 + 50


def test_shares_of_operands_that_recur_follow_each_other() -> None:
    """With several operands of a kind per step, each is fully summed within 50 steps."""
    for number in (1, 2, 3, 4, 8, 12, 24):
        contents, seen = Contents(), [set[int]() for _ in range(number)]
        for _ in range(50):
            for operand in seen:
                before = len(contents)
                contents.add(torch.zeros(2000), 0, "operand")
                operand |= {each.share for each in contents._fresh[before:]}
                if contents.repeats >= REPEATS - 1:
                    contents.take()
                    contents.turn += REPEATED_SHARES
        assert all(len(operand - {WHOLE}) == SHARES for operand in seen), number


def test_replaced_parameters_that_one_rank_keeps() -> None:
    def body(t: Transport) -> None:
        mesh = Mesh(t, spatial=(2, 1, 1))
        torch.manual_seed(0)
        model = parallelize(nn.Conv3d(1, 2, 3, padding=1), mesh)
        kept = model.weight if mesh.rank == 0 else None
        model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
        with torch.no_grad():
            for _ in range(3):
                model(torch.ones(1, 1, 4, 3, 2))
        assert kept is not model.weight

    run_local(body, 2)
