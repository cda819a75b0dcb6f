"""What ranks must hold equally: differences are named, whenever they begin."""

from __future__ import annotations

import copy
import math
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from pydist import Mesh, distribute_tensor, parallelize
from pydist.comm import Transport, run_local
from pydist.errors import UsageError
from pydist.exchange.contents import REPEATED_SHARES, REPEATS, SHARES, WHOLE, Contents


class Noise(nn.Module):
    """Adds what it is given a function for, by the number of the forward."""

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
    """Steps of a network; `change(model, step)` comes before each."""
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


NUMBERS = {
    "product": lambda x, draw: draw() * x,
    "of few digits": lambda x, draw: x * round(draw(), 1),
    "integer": lambda x, draw: x.mul(int(100 * draw())),
    "negative": lambda x, draw: x * (-1 if draw() < 0.5 else -2),
    "alpha": lambda x, draw: x.add(x, alpha=draw()),
    "lerp": lambda x, draw: torch.lerp(x, x.square(), draw()),
    "clamp": lambda x, draw: x.clamp(max=draw()),
    "in place": lambda x, draw: x.mul_(draw()),
    "assigned": lambda x, draw: _assigned(x, draw()),
    "of NumPy": lambda x, draw: x * np.float32(draw()),
    "minus one or two": lambda x, draw: x.mul(-1 - (draw() < 0.5)),
    "not a number": lambda x, draw: x.clamp(max=math.nan if draw() < 0.5 else 1.0),
    "complex": lambda x, draw: (x * complex(1, draw())).abs(),
    "option of a function": lambda x, draw: F.leaky_relu(x, draw()),
    "dropout": lambda x, draw: F.dropout(x, draw()),
    "channel": lambda x, draw: x[:, int(8 * draw())],
    "call": lambda x, draw: torch.relu(x) if draw() < 0.5 else x,
    "another call": lambda x, draw: torch.sin(x) if draw() < 0.5 else torch.cos(x),
    "after a reduction": lambda x, draw: x.mean((2, 3, 4)) * round(draw(), 1),
    "of a block": lambda x, draw: (x * round(draw(), 1)).to_local(),
    "of the whole": lambda x, draw: (x * round(draw(), 1)).full_tensor(),
    "index in a tensor": lambda x, draw: x[:, torch.tensor(int(8 * draw()))],
    "index in an array": lambda x, draw: x[:, np.array(int(8 * draw()))],
    "index in an object": lambda x, draw: x[:, Index(int(8 * draw()))],
    "bounds in tensors": lambda x, draw: x[:, (i := torch.tensor(int(5 * draw()))) : i + 3],
    "assigned at a tensor": lambda x, draw: _assigned(x, 0, torch.tensor(int(8 * draw()))),
    "repeated by a tensor": lambda x, draw: x.repeat(1, torch.tensor(1 + (draw() < 0.5)), 1, 1, 1),
    "probability in a tensor": lambda x, draw: F.dropout(x, torch.tensor(draw())),
    "boolean of NumPy": lambda x, draw: x + x.tanh() * np.bool_(draw() < 0.5),
    "sign of zero": lambda x, draw: x.copysign(-0.0 if draw() < 0.5 else 0.0),
    "precision": lambda x, draw: x.to(torch.bfloat16).float() if draw() < 0.5 else x,
    "detach": lambda x, draw: x * (x.sin().detach() if draw() < 0.5 else x.sin()),
    "detach in place": lambda x, draw: x * (_detached(x.sin()) if draw() < 0.5 else x.sin()),
    "data": lambda x, draw: x * (x.sin().data if draw() < 0.5 else x.sin()),
    "within a backward pass": lambda x, draw: _looked_at(x, draw()),
}


class Index:
    def __init__(self, value: int) -> None:
        self._value = value

    def __index__(self) -> int:
        return self._value


def _detached(x):
    return x.detach_()


def _looked_at(x, number):
    """A hook that trains the convolution a second time."""
    shown = x * 1
    other = (x.detach().requires_grad_() * number).sum()
    shown.register_hook(lambda _: other.backward())
    return shown


def _assigned(x, number, channel=slice(1)):
    x = x * 1
    x[:, channel] = number
    return x


@pytest.mark.parametrize("use", NUMBERS.values(), ids=NUMBERS)
def test_numbers_that_are_drawn_are_noticed(use) -> None:
    def body(t: Transport, seed: int) -> None:
        mesh = Mesh(t, spatial=(2, 1, 1))
        model = parallelize(nn.Conv3d(1, 8, 3, padding=1), mesh)
        draws = random.Random(seed)
        for _ in range(3):
            use(model(torch.ones(1, 1, 6, 4, 4)), draws.random).square().mean().backward()

    with pytest.raises(UsageError, match="the ranks call different things"):
        run_local(lambda t: body(t, t.rank + 1), 2)
    run_local(lambda t: body(t, 5), 2)


def test_numbers_that_differ_are_named() -> None:
    def body(t: Transport) -> None:
        model = parallelize(nn.Conv3d(1, 1, 3, padding=1), Mesh(t, spatial=(2, 1, 1)))
        y = model(torch.ones(1, 1, 6, 4, 4))
        if t.rank == 1:
            y.abs()  # a call of its own
        (y.sin() * (0.5 + t.rank)).square().mean().backward()

    with pytest.raises(UsageError, match=r"mul\(0.5\) on rank 0 and mul\(1.5\) on rank 1"):
        run_local(body, 2)


def test_a_look_of_one_rank_before_a_gradient_penalty_is_no_difference() -> None:
    def body(t: Transport) -> None:
        mesh = Mesh(t, spatial=(2, 1, 1))
        conv = nn.Conv3d(2, 3, (3, 1, 1), padding=(2, 0, 0), dilation=(2, 1, 1))
        model = parallelize(conv.double(), mesh)
        x = distribute_tensor(torch.ones(1, 2, 1, 1, 1).double(), mesh).requires_grad_()
        y = model(x)
        if t.rank == 0:
            y.to_local()
        loss = y.square().sum()
        (g,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + g.square().sum()).backward()

    run_local(body, 2)


def test_a_look_of_one_rank_into_a_checkpointed_part_is_no_difference() -> None:
    """It is computed anew, and exchanges, in passes within a pass that start from shards."""

    def body(t: Transport) -> None:
        mesh = Mesh(t, spatial=(2, 1, 1))
        part = nn.Sequential(nn.Conv3d(2, 4, 3, padding=1), nn.InstanceNorm3d(4), nn.PReLU())
        model = parallelize(part.double(), mesh)
        if t.rank == 0:
            model[1].register_forward_hook(lambda _, __, y: y.to_local() is None or None)
        values = torch.randn(1, 2, 6, 4, 4, generator=torch.Generator().manual_seed(0))
        x = distribute_tensor(values.double(), mesh).requires_grad_()
        loss = checkpoint(model, x, use_reentrant=False).amax()
        (g,) = torch.autograd.grad(loss, x, create_graph=True)
        g.square().sum().backward()

    run_local(body, 2)


class Shifted(nn.Module):
    """Uses a number of the whole tensor."""

    def forward(self, x: Tensor) -> Tensor:
        return x + x.sum()


@pytest.mark.parametrize("looked_at", [0, 1, 2])
@pytest.mark.parametrize("size", [2, 3])
def test_a_look_of_one_rank_leaves_passes_of_pydist_s_own_alone(looked_at: int, size: int) -> None:
    """A local convolution's second derivative starts one, which comes past what was looked at."""
    part = nn.Sequential(Shifted(), nn.Conv3d(2, 2, 1), nn.PReLU()).double()
    head = nn.Conv3d(2, 2, 1).double()

    def body(t: Transport) -> None:
        mesh = Mesh(t, spatial=(t.size, 1, 1))
        model, last = (parallelize(copy.deepcopy(each), mesh) for each in (part, head))
        if t.rank == 0:
            model[looked_at].register_forward_hook(lambda _, __, y: y.to_local() is None or None)
        values = torch.randn(1, 2, 7, 4, 4, generator=torch.Generator().manual_seed(0))
        x = distribute_tensor(values.double(), mesh).requires_grad_()
        loss = last(checkpoint(model, x, use_reentrant=False)).std()
        gs = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        sum(g.square().sum() for g in gs).backward()

    run_local(body, size)


def _of_its_shard(loss, y):
    shard = y.to_local()
    torch.autograd.grad(shard.square().sum(), shard, retain_graph=True)


def _of_the_loss(loss, y):
    torch.autograd.grad(loss * 2, loss, retain_graph=True)


@pytest.mark.parametrize("look", [_of_its_shard, _of_the_loss])
@pytest.mark.parametrize("size", [2, 3])
def test_a_pass_of_one_rank_that_exchanges_nothing_is_no_difference(look, size: int) -> None:
    """Neither by itself nor by what the passes of all ranks find in the graph after it."""

    conv = nn.Conv3d(1, 2, 3, padding=1).double()

    def body(t: Transport, looking: int) -> Tensor:
        model = parallelize(copy.deepcopy(conv), Mesh(t, spatial=(size, 1, 1)))
        y = model(torch.ones(1, 1, 7, 4, 4).double())
        loss = y.full_tensor().square().mean() + y.mean()
        if t.rank == looking:
            look(loss, y)
        loss.backward()
        return model.weight.grad

    nobody = -1
    for rank_by_rank in zip(
        run_local(lambda t: body(t, 1), size),
        run_local(lambda t: body(t, nobody), size),
        strict=True,
    ):
        assert torch.equal(*rank_by_rank)


def test_a_look_of_one_rank_within_a_pass_is_no_part_of_what_the_pass_returns() -> None:
    def body(t: Transport) -> None:
        mesh = Mesh(t, spatial=(2, 1, 1))
        model = parallelize(nn.Conv3d(1, 1, 3, padding=1).double(), mesh)
        x = distribute_tensor(torch.ones(1, 1, 6, 4, 4).double(), mesh).requires_grad_()
        y = model(x)
        shard = (x * 2).to_local()
        looked_at, looks = shard.square().sum(), []
        if t.rank == 1:
            y.register_hook(lambda _: looks.extend(torch.autograd.grad(looked_at, shard)))
        (g,) = torch.autograd.grad(y.square().mean(), x)
        model(x + g).square().mean().backward()
        assert len(looks) == t.rank

    run_local(body, 2)


def test_plain_results_of_a_pass_that_exchanges_nothing_carry_its_numbers() -> None:
    def body(t: Transport, factor: int) -> None:
        mesh = Mesh(t, spatial=(2, 1, 1))
        model = parallelize(nn.Conv3d(1, 1, 1).double(), mesh)
        x = distribute_tensor(torch.arange(96.0).reshape(1, 1, 6, 4, 4).double(), mesh)
        shard = (model(x) * factor).to_local()
        (g,) = torch.autograd.grad(shard.square().sum(), shard, create_graph=True)
        g.square().sum().backward()

    with pytest.raises(UsageError, match="the ranks call different things"):
        run_local(lambda t: body(t, t.rank + 1), 2)
    run_local(lambda t: body(t, 2), 2)


def test_what_a_pass_that_exchanges_nothing_returns_carries_its_numbers() -> None:
    def body(t: Transport, factor: int) -> None:
        mesh = Mesh(t, spatial=(2, 1, 1))
        values = torch.arange(96.0).reshape(1, 1, 6, 4, 4)
        x = distribute_tensor(values, mesh).requires_grad_()
        shard = (x * factor).to_local()
        (g,) = torch.autograd.grad(shard.square().sum(), x)
        parallelize(nn.Conv3d(1, 1, 3), mesh)(x + g).mean().backward()

    with pytest.raises(UsageError, match="the ranks call different things"):
        run_local(lambda t: body(t, t.rank + 1), 2)
    run_local(lambda t: body(t, 2), 2)


def test_numbers_are_noticed_by_autograd_grad() -> None:
    def body(t: Transport) -> None:
        model = parallelize(nn.Conv3d(1, 1, 3, padding=1), Mesh(t, spatial=(3, 1, 1)))
        loss = (model(torch.ones(1, 1, 7, 4, 4)) * (2 - t.rank % 2)).square().mean()
        torch.autograd.grad(loss, list(model.parameters()))

    with pytest.raises(UsageError, match=r"mul\(2\) on rank 0 and mul\(1\) on rank 1"):
        run_local(body, 3)


def test_numbers_without_training_are_noticed_by_the_next_batch() -> None:
    def body(t: Transport) -> None:
        model = parallelize(nn.Conv3d(1, 1, 3, padding=1), Mesh(t, spatial=(2, 1, 1)))
        for _ in range(2):
            (model(torch.ones(1, 1, 6, 4, 4)) * (0.5 + t.rank)).mean()

    with torch.no_grad(), pytest.raises(UsageError, match=r"mul\(0.5\) on rank 0"):
        run_local(body, 2)


def test_sample_groups_may_have_numbers_of_their_own() -> None:
    def body(t: Transport) -> None:
        mesh = Mesh(t, data=2, spatial=(2, 1, 1))
        model = parallelize(nn.Sequential(nn.Conv3d(1, 2, 3), nn.BatchNorm3d(2)), mesh)
        for _ in range(2):
            x = distribute_tensor(torch.ones(1, 1, 6, 4, 4), mesh) * (1.5 + mesh.data_index)
            model(x).square().mean().backward()

    run_local(body, 4)


def test_constants_are_not_compared() -> None:
    """So that one rank may compute with them alone, as it looks at something."""

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
    """Also with several of one kind in a step each of them is summed whole in 50 steps."""
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
