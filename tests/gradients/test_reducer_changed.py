"""Parameters that change after `parallelize`: converted, replaced, swapped, frozen."""

from __future__ import annotations

import contextlib
import operator

import pytest
import torch
from torch import nn
from torch.utils import swap_tensors  # before any model is parallelized

import pydist.gradients.buckets
from pydist import parallelize
from pydist.errors import NotSupported
from support.equivalence import on_ranks, randn
from support.equivalence.scripts import GRIDS, batch, check_script, gradients, network, step_of
from support.networks.small import SHAPE, check_use, gradients_of, loss_of, small

grids = pytest.mark.parametrize("grid", GRIDS, ids=str)


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

    check_script(script, grid)


@pytest.fixture
def swaps():
    """Modules swap tensors when they change their parameters."""
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

    check_script(script, grid)


@pytest.mark.parametrize("among", ["one model", "two models", "a plain one"])
def test_tensors_swapped_by_hand(among):
    """torch moves users' hooks with the tensor; existing handles still remove them."""

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
        swap_tensors(*pair)
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
    """As in a GAN in one module, first one part trains, then the other."""

    def script(ready, cut):
        model = ready(network())
        found = []
        for step in range(10):
            long = step in range(4, 9)  # long enough that its gradient is no longer sent
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


@pytest.mark.parametrize("how", ["set", "data", "mul"])
def test_a_frozen_bias_that_changes_before_backward_loses_no_other_gradient(how):
    """`set_` gives the bias a new node, which arrives first and unexpectedly."""

    def use(model, mesh):
        loss = loss_of(model, mesh)
        bias = model[0].bias
        bias.requires_grad_(False)
        with torch.no_grad():
            changed = (bias * 0.8).detach()
            if how == "set":
                bias.set_(changed)
            elif how == "data":
                bias.data = changed
            else:
                bias.mul_(0.8)
        loss.backward()
        return gradients_of(model)

    check_use(small, use, data=2)


GRADIENT_DTYPES = [(torch.float32, torch.float64), (torch.float64, torch.float32)]


@pytest.mark.parametrize("alone", [1, 1 << 30], ids=["alone", "together"])
@pytest.mark.parametrize(("dtype", "of_gradient"), GRADIENT_DTYPES)
def test_gradients_of_another_dtype(dtype, of_gradient, alone, monkeypatch):
    monkeypatch.setattr(pydist.gradients.buckets, "ALONE_BYTES", alone)

    def use(model, mesh):
        model.to(dtype)
        for parameter in model.parameters():
            parameter.grad_dtype = of_gradient
        for seed in range(2):
            loss_of(lambda x: model(x.to(dtype)), mesh, seed).backward()
        found = gradients_of(model)
        assert all(g.dtype == of_gradient for g in found)
        return found

    check_use(small, use, data=2, rtol=1e-4)


def test_a_gradient_dtype_that_is_set_between_passes():
    def use(model, mesh):
        loss_of(model, mesh).backward()
        model.zero_grad()
        model[0].weight.grad_dtype = torch.float32
        loss_of(model, mesh).backward()
        assert model[0].weight.grad.dtype == torch.float32
        return gradients_of(model)

    check_use(small, use, data=2, rtol=1e-4)


class Upcast(torch.autograd.Function):
    """Conversion whose gradient stays in the higher precision."""

    @staticmethod
    def forward(ctx, weight):
        return weight.double()

    @staticmethod
    def backward(ctx, grad):
        return grad


def test_a_gradient_of_any_dtype():
    """With `grad_dtype = None` torch keeps any dtype, for which no message has room."""

    def use(mesh):
        weight = nn.Parameter(torch.ones(3, dtype=torch.float32))
        weight.grad_dtype = None
        model, inputs = parallelize(small(), mesh), randn(*SHAPE)
        loss = (model(inputs) * Upcast.apply(weight)[0]).square().mean()
        with pytest.raises(NotSupported, match=r"has grad_dtype = None; possible"):
            loss.backward()
        model.zero_grad()
        weight.grad = None
        weight.grad_dtype = torch.float64
        (model(inputs) * Upcast.apply(weight)[0]).square().mean().backward()
        return weight.grad

    first, second = on_ranks((2, 1, 1), use)
    assert first.dtype == torch.float64
    assert torch.equal(first, second)
