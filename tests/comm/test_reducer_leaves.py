"""Any parameter that feeds or follows a sharded call is reduced, whoever owns it."""

from __future__ import annotations

import contextlib
import copy
import gc
import operator

import pytest
import torch
from equivalence import on_ranks, randn
from scripts import GRIDS, assert_same, check_script, copy_of
from torch import nn
from torch.nn.utils import parametrizations

import pydist.comm.gradients.buckets
from pydist import distribute_tensor, parallelize
from pydist.errors import NotSupported, UsageError

grids = pytest.mark.parametrize("grid", GRIDS, ids=str)


def network(width=4):
    return copy_of(
        nn.Sequential(
            nn.Conv3d(2, width, 3, padding=1), nn.Tanh(), nn.Conv3d(width, 3, 3, padding=1)
        )
    )


def batch(seed=0, channels=2):
    return randn(2, channels, 5, 4, 3, seed=seed)


def full(x):
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def gradients(*modules):
    return [p.grad for m in modules for p in m.parameters()]


def step_of(model, cut, seed=0):
    model.zero_grad()
    model(cut(batch(seed))).square().mean().backward()
    return [None if g is None else g.clone() for g in gradients(model)]


# -- a model whose parameters change after parallelize -----------------------------------------


def to_double(model):
    return model.double()


def to_float_and_back(model):
    return model.float().double()


def moved(model):
    return model.to("cpu", torch.float64).to(memory_format=torch.channels_last_3d)


def new_data(model):
    for p in model.parameters():
        p.data = p.data.clone() * 0.5
    return model


def assigned(model):
    state = {k: v.clone() * 2 for k, v in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    return model


def replaced(model):
    model[2].weight = nn.Parameter(model[2].weight.detach() * 2)
    return model


def evaluated(model):
    return model.eval()


@grids
@pytest.mark.parametrize(
    "change", [to_double, to_float_and_back, moved, new_data, assigned, replaced, evaluated]
)
def test_changes_after_parallelize(change, grid):
    def script(ready, cut):
        model = ready(network().float() if change is to_double else network())
        first = step_of(model, cut) if change is not to_double else []
        model = change(model)
        return [*first, *step_of(model, cut, 1), *step_of(model, cut, 2)]

    check_script(script, grid, 1e-6 if change is to_float_and_back else 1e-11)


@pytest.fixture
def swaps():
    """Modules swap tensors where they change their parameters."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


def loaded(model):
    model.load_state_dict({k: v.clone() * 2 for k, v in model.state_dict().items()})
    return model


@pytest.mark.parametrize("grid", GRIDS[1:3], ids=str)
@pytest.mark.usefixtures("swaps")
@pytest.mark.parametrize("change", [to_double, to_float_and_back, moved, loaded, assigned])
def test_swapped_parameters(change, grid):
    def script(ready, cut):
        model = ready(network().float() if change is to_double else network())
        parameters = list(model.parameters())
        first = step_of(model, cut) if change is not to_double else []
        model = change(model)
        assert change is assigned or all(map(operator.is_, parameters, model.parameters()))
        found = [*first, *step_of(model, cut, 1)]
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        optimizer.step()
        return [*found, *step_of(model, cut, 2), *model.parameters()]

    check_script(script, grid, 1e-6 if change is to_float_and_back else 1e-11)


@pytest.mark.parametrize("among", ["one model", "two models", "a plain one"])
def test_tensors_swapped_by_hand(among):
    """torch takes users' hooks along; handles that were given out go on to remove them."""

    def script(ready, cut):
        model, other = ready(network()), ready(network())
        pair = {
            "one model": (model[0].bias, nn.Parameter(model[0].bias.detach() * 3)),
            "two models": (model[0].weight, other[0].weight),
            "a plain one": (nn.Parameter(model[2].bias.detach() * 3), model[2].bias),
        }[among]
        seen = []
        handles = [
            hook
            for i, p in enumerate(pair)
            for hook in (
                p.register_hook(lambda g, i=i: seen.append(g * (i + 1))),
                p.register_post_accumulate_grad_hook(lambda p, i=i: seen.append(p.grad * (i + 3))),
            )
        ]
        found = [*step_of(model, cut), *step_of(other, cut, 1)]
        torch.utils.swap_tensors(*pair)
        found += [*step_of(model, cut, 2), *step_of(other, cut, 3)]
        sum(p.sum() for p in pair).backward()
        for handle in handles[1:3]:
            handle.remove()
        found += [*step_of(model, cut, 4), *step_of(other, cut, 5)]
        seen.sort(key=lambda each: (each.numel(), float(each.sum())))
        return [*found, *seen, *model.parameters(), *other.parameters()]

    check_script(script)


def test_a_swap_that_torch_refuses_changes_nothing():
    def script(ready, cut):
        model = ready(network())
        y = model(cut(batch()))
        held = model[0].weight.view(-1)
        with pytest.raises(RuntimeError, match="use_count"):
            torch.utils.swap_tensors(model[0].weight, nn.Parameter(model[0].weight.detach() * 2))
        y.square().mean().backward()
        return [held, *gradients(model), *step_of(model, cut, 1)]

    check_script(script)


def test_a_swap_between_no_sync_and_the_mean():
    def script(ready, cut):
        model = ready(network())
        with model.no_sync() if hasattr(model, "no_sync") else contextlib.nullcontext():
            model(cut(batch())).square().mean().backward()
        p = model[2].weight
        grad, fresh = p.grad, nn.Parameter(p.detach() * 2)
        torch.utils.swap_tensors(p, fresh)
        p.grad = grad
        del fresh
        model(cut(batch(1))).square().mean().backward()
        return gradients(model)

    check_script(script)


@grids
@pytest.mark.parametrize("how", ["eval", "parts", "train"])
def test_unfrozen_later(how, grid):
    def script(ready, cut):
        model = network()
        model[2].requires_grad_(False)
        model = ready(model)
        found = step_of(model, cut)
        model.requires_grad_(True)
        if how == "eval":
            model.eval()
        x = cut(batch())
        y = model[2](model[1](model[0](x))) if how == "parts" else model(x)
        model.zero_grad()
        y.square().mean().backward()
        return [*found, *gradients(model)]

    check_script(script, grid)


@pytest.mark.parametrize("grid", GRIDS[1:], ids=str)
@pytest.mark.parametrize("frozen", ["bias", "all"])
@pytest.mark.parametrize("accumulates", [False, True], ids=["afresh", "further"])
def test_frozen_between_forward_and_backward(frozen, accumulates, grid):
    """torch's backward still calls the hooks of such a parameter, and adds nothing to it."""

    def script(ready, cut):
        model = ready(network())
        first = step_of(model, cut)
        if not accumulates:
            model.zero_grad()
        x = cut(batch(1)).requires_grad_()
        y = model(x)
        for name, p in model.named_parameters():
            p.requires_grad_(frozen == "bias" and not name.endswith("bias"))
        y.square().mean().backward()
        found = [None if g is None else g.clone() for g in gradients(model)]
        model.requires_grad_(True)
        return [*first, *found, *step_of(model, cut, 2)]

    check_script(script, grid)


@pytest.mark.parametrize("paused", [False, True])
def test_frozen_before_a_backward_after_no_sync(paused):
    def script(ready, cut):
        model = ready(network())
        with model.no_sync() if hasattr(model, "no_sync") else contextlib.nullcontext():
            model(cut(batch())).square().mean().backward()
            if paused:
                y = model(cut(batch(1)))
                model[2].requires_grad_(False)
                y.square().mean().backward()
        y = model(cut(batch(2)))
        model[0].weight.requires_grad_(False)
        y.square().mean().backward()
        return gradients(model)

    check_script(script)


def test_frozen_in_turn():
    """As a GAN in one module: first one part trains, then the other."""

    def script(ready, cut):
        model = ready(network())
        found = []
        for step in range(10):
            long = step in range(4, 9)  # long enough to be sent no longer
            model[0].requires_grad_(step % 2 == 0 and not long)
            found += step_of(model, cut, step)
        return found

    check_script(script, (2, (2, 1, 1)))


def test_functional_call():
    def script(ready, cut):
        model = ready(network())
        own = {n: nn.Parameter(p.detach() * 2) for n, p in model.named_parameters()}
        scaled = {n: p * 3 for n, p in own.items()}
        torch.func.functional_call(model, own, (cut(batch()),)).square().mean().backward()
        torch.func.functional_call(model, scaled, (cut(batch(1)),)).sin().mean().backward()
        return [p.grad for p in own.values()] + gradients(model)

    check_script(script, (2, (2, 1, 1)))


# -- parameters in no model, in two, and computed ones ------------------------------------------


@grids
def test_a_plain_head(grid):
    def script(ready, cut):
        model = ready(network())
        head = copy_of(nn.Linear(3 * 5 * 4 * 3, 2), 1)
        for seed in (0, 1):
            y = full(model(cut(batch(seed)))).flatten(1)
            head(y).square().mean().backward()
        return gradients(model, head)

    check_script(script, grid)


@grids
def test_a_learned_criterion(grid):
    def script(ready, cut):
        model = ready(network())
        criterion = copy_of(nn.Conv3d(3, 2, 3, padding=1), 1)
        factor = nn.Parameter(randn(3, 1, 1, 1, seed=2))
        y = model(cut(batch()))
        loss = criterion(y * factor).square().mean() + factor.sum() ** 2
        loss.backward()
        again = torch.autograd.grad(
            criterion(model(cut(batch(1))) * factor).sin().mean(),
            [factor, *criterion.parameters()],
        )
        return [factor.grad, *gradients(model, criterion), *again]

    check_script(script, grid)


@pytest.mark.parametrize("alone", [1, 1 << 30])
def test_one_parameter_in_two_models(alone, monkeypatch):
    monkeypatch.setattr(pydist.comm.gradients.buckets, "ALONE_BYTES", alone)

    def script(ready, cut):
        one, two = network(), network()
        two[0].weight = one[0].weight
        one, two = ready(one), ready(two)
        x = cut(batch())
        (one(x).square().mean() + two(x).sin().mean()).backward()
        two(x).sin().mean().backward()
        return gradients(one, two)

    check_script(script, (2, (2, 1, 1)))


def test_two_models_that_train_in_turn():
    """A GAN: each step uses both and changes one; the other's gradients are not asked for."""

    def script(ready, cut):
        maker, judge = ready(network()), ready(copy_of(nn.Conv3d(3, 1, 3, padding=1), 1))
        makers = torch.optim.SGD(maker.parameters(), 0.1)
        judges = torch.optim.SGD(judge.parameters(), 0.1)
        for step in range(4):
            fake = maker(cut(batch(step)))
            judge.requires_grad_(True)
            judges.zero_grad()
            real = judge(cut(batch(step, 3))).sin().mean()
            (real - judge(fake.detach()).sin().mean()).backward()
            judges.step()
            judge.requires_grad_(step % 2 == 0)
            makers.zero_grad()
            judge(fake).sin().mean().backward()
            makers.step()
        return [*maker.parameters(), *judge.parameters()]

    for grid in GRIDS[:3]:
        check_script(script, grid)


class LowRank(nn.Module):
    """A frozen convolution with a trained product beside it (LoRA)."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv3d(2, 4, 3, padding=1)
        self.conv.requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.empty(4, 2)), nn.Parameter(torch.empty(2, 54))

    def forward(self, x):
        weight = self.conv.weight + (self.a @ self.b).view(4, 2, 3, 3, 3)
        return nn.functional.conv3d(x, weight, self.conv.bias, padding=1)


@grids
@pytest.mark.parametrize("late", [False, True], ids=["parallelized", "loose"])
@pytest.mark.parametrize("kind", ["weight norm", "spectral norm", "LoRA"])
def test_computed_weights(kind, late, grid):
    def script(ready, cut):
        module = LowRank() if kind == "LoRA" else nn.Conv3d(2, 4, 3, padding=1)
        module = copy_of(module)
        if kind == "weight norm":
            module = parametrizations.weight_norm(module)
        elif kind == "spectral norm":
            torch.manual_seed(0)
            module = parametrizations.spectral_norm(module).eval()
            with torch.no_grad():
                for buffer in module.buffers():
                    buffer.copy_(torch.linspace(1, 2, buffer.numel(), dtype=torch.float64))
        other = ready(network(2) if late else module)
        y = module(cut(batch()))
        if late:
            y = y + other(cut(batch())).mean((1, 2, 3, 4), keepdim=True)
        for _ in range(2):
            y.square().mean().backward(retain_graph=True)
        return gradients(module, other)

    check_script(script, grid)


def test_a_parameter_given_as_input():
    def script(ready, cut):
        volume = nn.Parameter(batch())
        model = ready(network())
        y = model(cut(volume))
        (y.square().mean() + volume.square().sum()).backward()
        return [volume.grad, *gradients(model)]

    check_script(script)


def test_no_model_at_all():
    def script(ready, cut):
        conv = copy_of(nn.Conv3d(2, 3, 3, padding=1))
        for seed in (0, 1):
            conv(cut(batch(seed))).square().mean().backward()
        return gradients(conv)

    check_script(script, (2, (2, 1, 1)))


def test_a_copy_of_the_model_and_a_model_that_is_gone():
    def script(ready, cut):
        model = ready(network())
        found = step_of(model, cut)
        twin = copy.deepcopy(model)
        del model
        gc.collect()
        found += step_of(twin, cut, 1)
        other = ready(network())
        return found + step_of(other, cut, 2) + step_of(twin, cut, 3)

    check_script(script, (2, (2, 1, 1)))


# -- refusals ------------------------------------------------------------------------------------


def test_unequal_values_are_named_on_all_ranks():
    def body(mesh):
        model = parallelize(network(), mesh)
        head = nn.Parameter(torch.tensor(1.0 + mesh.rank, dtype=torch.float64))
        with pytest.raises(UsageError, match=r"shape \[\] .* differs between rank 0 and rank 1"):
            (model(distribute_tensor(batch(), mesh)).full_tensor().sum() * head).backward()
        head.data.fill_(2)
        model.zero_grad()
        head.grad = None
        (model(distribute_tensor(batch(), mesh)).full_tensor().sum() * head).backward()
        return [head.grad, *gradients(model)]

    first, second = on_ranks((2, 1, 1), body)
    assert_same(second, first, 0, "rank 1")


def test_parameters_that_one_rank_alone_has_are_named():
    def body(mesh):
        model = parallelize(network(), mesh)
        factor = nn.Parameter(torch.ones(()).double())
        loss = model(distribute_tensor(batch(), mesh)).full_tensor().sum()
        with pytest.raises(UsageError, match=r"rank 0 has of shape \[\] .*, rank 1 has none"):
            (loss * factor if mesh.rank == 0 else loss).backward()

    on_ranks((1, 1, 1), body, data=2)


def test_a_parameter_frozen_on_one_rank_is_named():
    def body(mesh):
        model = parallelize(network(), mesh)
        model[2].bias.requires_grad_(False)
        model(distribute_tensor(batch(), mesh)).square().mean().backward()
        model[2].bias.requires_grad_(mesh.rank == 0)
        with pytest.raises(NotSupported, match=r"'2.bias' is frozen .* on some ranks"):
            model(distribute_tensor(batch(), mesh)).square().mean().backward()

    on_ranks((2, 1, 1), body)


def test_a_step_after_no_sync_alone_is_named():
    def body(mesh):
        model = parallelize(network(), mesh)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with model.no_sync():
            model(distribute_tensor(batch(), mesh)).square().mean().backward()
        with pytest.raises(NotSupported, match=r"'0.weight', .* accumulated under no_sync"):
            optimizer.step()

    on_ranks((2, 1, 1), body)


def test_a_step_of_a_plain_tensor_that_groups_would_part_over_is_named():
    def body(mesh):
        scale = torch.ones((), dtype=torch.float64, requires_grad=True)
        own = torch.full((), 1.0 + mesh.data_index, dtype=torch.float64, requires_grad=True)
        x = distribute_tensor(batch(mesh.data_index), mesh)
        (x * scale * own).square().mean().backward()
        torch.optim.SGD([own], 0.1).step()  # data of the group
        with pytest.raises(UsageError, match=r"plain tensor of shape \[\] .* torch.nn.Parameter"):
            torch.optim.SGD([scale], 0.1).step()

    on_ranks((2, 1, 1), body, data=2)


# -- no-ops --------------------------------------------------------------------------------------


def test_a_backward_of_one_rank_that_has_nothing_to_do_with_the_mesh():
    def body(mesh):
        model = parallelize(network(), mesh)
        x = distribute_tensor(batch(), mesh)
        if mesh.rank == 1:
            plain = nn.Linear(3, 2)
            plain(torch.ones(1, 3)).sum().backward()
            assert plain.weight.grad is not None
        model(x).square().mean().backward()
        return gradients(model)

    first, second = on_ranks((2, 1, 1), body)
    assert_same(second, first, 0, "rank 1")


def test_a_backward_that_reaches_inputs_only_belongs_to_its_group():
    def body(mesh):
        model = parallelize(network(), mesh).requires_grad_(False)
        if mesh.data_index == 0:
            x = distribute_tensor(batch(), mesh).detach().requires_grad_()
            model(x).square().mean().backward()
            assert x.grad is not None

    on_ranks((2, 1, 1), body, data=2)
