"""Hooks on parameters see the mean, and an exception in a backward does not affect later ones."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.autograd.graph import register_multi_grad_hook

from pydist import distribute_tensor, parallelize
from pydist.errors import NotSupported, UsageError
from pydist.optim import sharded
from support.equivalence import assert_same, on_ranks, randn
from support.equivalence.scripts import GRIDS, batch, check_script, gradients, network, on_mesh

grids = pytest.mark.parametrize("grid", GRIDS, ids=str)
before_or_after = pytest.mark.parametrize("early", [True, False], ids=["before", "after"])


def backward(model, cut, seed=0, **options):
    model(cut(batch(seed))).square().mean().backward(**options)


def with_hooks(ready, early, add):
    """Returns a network with hooks from `add(model)`, before or after it is parallelized."""
    model = network()
    if early:
        add(model)
    model = ready(model)
    if not early:
        add(model)
    return model


# -- hooks on tensors ---------------------------------------------------------------------------


def clamped(grad):
    return grad.clamp(-1e-3, 1e-3)


@grids
@before_or_after
def test_clamp_sign_and_norm(early, grid):
    def script(ready, cut):
        seen = []

        def add(model):
            model[0].weight.register_hook(clamped)
            model[0].bias.register_hook(torch.sign)
            model[2].weight.register_hook(lambda g: g / g.norm())
            model[2].weight.register_hook(lambda g: seen.append(g.norm()))

        model = with_hooks(ready, early, add)
        for seed in range(3):  # accumulated: each hook sees one backward's gradient
            backward(model, cut, seed)
        return [*gradients(model), *seen]

    check_script(script, grid)


@before_or_after
def test_handles_remove_hooks(early):
    def script(ready, cut):
        handles = []

        def add(model):
            for p in model.parameters():
                handles.append(p.register_hook(lambda g: g * 0))
                p.register_hook(lambda g: g * 2)

        model = with_hooks(ready, early, add)
        for handle in handles:
            handle.remove()
        backward(model, cut)
        return gradients(model)

    check_script(script)


def test_hooks_when_gradients_are_asked_for_or_have_a_graph():
    def script(ready, cut):
        model = ready(network())
        model[0].weight.register_hook(clamped)
        loss = model(cut(batch())).square().mean()
        (asked,) = torch.autograd.grad(loss, model[0].weight, create_graph=True)
        backward(model, cut, 1)
        asked.square().sum().backward()
        return [asked, *gradients(model)]

    check_script(script, (2, (2, 1, 1)))


def test_multi_grad_hooks():
    def script(ready, cut):
        model, seen = ready(network()), []
        parameters = list(model.parameters())
        register_multi_grad_hook(parameters, lambda gs: seen.append(sum(g.sum() for g in gs)))
        register_multi_grad_hook(parameters, lambda g: seen.append(g * 0 + 1), mode="any")
        for seed in (0, 1):
            backward(model, cut, seed)
        return [torch.stack([s.sum() / s.numel() if s.dim() else s for s in seen]).sort()[0]]

    check_script(script, (2, (2, 1, 1)))


def test_hooks_wait_while_gradients_accumulate():
    """Hooks see the gradients of `no_sync` once, in the backward that reduces them."""

    def script(ready, cut):
        model, seen = ready(network()), []
        model[0].weight.register_hook(lambda g: seen.append(g.clone()) or g * 3)
        backward(model, cut)
        if hasattr(model, "no_sync"):
            with model.no_sync():
                backward(model, cut, 1)
                backward(model, cut, 2)
            assert len(seen) == 1
            backward(model, cut, 3)
            return [seen[1], *gradients(model)]
        for seed in (1, 2, 3):
            backward(model, cut, seed)
        return [sum(seen[1:]), *gradients(model)]

    check_script(script, (2, (2, 1, 1)))


# -- hooks after accumulation -------------------------------------------------------------------


@grids
@before_or_after
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam])
def test_optimizers_in_backward(make, early, grid):
    def script(ready, cut):
        def add(model):
            optimizers = {p: make([p], 0.01) for p in model.parameters()}

            def step(p):
                optimizers[p].step()
                optimizers[p].zero_grad()

            for p in model.parameters():
                p.register_post_accumulate_grad_hook(step)

        model = with_hooks(ready, early, add)
        for seed in range(3):
            backward(model, cut, seed)
        assert all(p.grad is None for p in model.parameters())
        return list(model.parameters())

    check_script(script, grid)


def test_hooks_on_parameters_that_were_never_broadcast():
    def script(ready, cut):
        model, factor, seen = ready(network()), nn.Parameter(randn(3, 1, 1, 1)), []
        factor.register_hook(lambda g: g.sign())
        factor.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
        for seed in (0, 1):
            (model(cut(batch(seed))) * factor).square().mean().backward()
        return [factor.grad, *seen, *gradients(model)]

    check_script(script, (2, (2, 1, 1)))


def test_hooks_follow_a_parameter_to_another_dtype():
    def script(ready, cut):
        model, seen = ready(network().float()), []
        model[0].weight.register_hook(lambda g: seen.append(g.clone()) or g.sign())
        handle = model[0].weight.register_hook(lambda g: g * 0)
        model.double()
        handle.remove()
        for seed in (0, 1):
            backward(model, cut, seed)
        return [*seen, *gradients(model)]

    check_script(script, (2, (2, 1, 1)))


# -- hooks on one rank alone, hooks that raise --------------------------------------------------


@pytest.mark.parametrize("only", [0, 3])
def test_hooks_on_one_rank_change_nothing_elsewhere(only):
    def expected(ready, cut):
        model = ready(network())
        for seed in (0, 1, 2):
            backward(model, cut, seed)
        return gradients(model)

    whole = expected(lambda m: m, lambda x: x)

    def body(mesh):
        seen = []

        def script(ready, cut):
            model = ready(network())
            if mesh.rank == only:
                for p in model.parameters():
                    p.register_hook(lambda g: seen.append(g.clone()))
                    p.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
            for seed in (0, 1, 2):
                backward(model, cut, seed)
            return gradients(model)

        found = on_mesh(script, mesh)
        assert len(seen) == (24 if mesh.rank == only else 0)
        return found

    for rank, found in enumerate(on_ranks((2, 1, 1), body, data=2)):
        assert_same(found, whole, where=f"rank {rank}")


FORWARDS = ["same graph", "evaluation", "none", "training"]


def test_a_hook_that_looks_on_one_rank_leaves_equal_bits():
    """Gradients accumulate; base + (sum - base) may differ from sum in the last bits."""

    def body(mesh):
        model = parallelize(network(), mesh)
        if mesh.rank == 0:
            for parameter in model.parameters():
                parameter.register_hook(lambda _: None)
        for seed in range(4):
            model(batch(seed)).square().mean().backward()
        for grad in gradients(model):
            rows = mesh.world.all_gather(grad.flatten())
            assert torch.equal(rows, rows[:1].expand_as(rows))

    on_ranks((3, 1, 1), body)


@grids
@pytest.mark.parametrize("where", [0, 2])
@pytest.mark.parametrize("forward", FORWARDS)
def test_after_a_backward_that_raised(forward, where, grid):
    def script(ready, cut):
        model = ready(network())
        backward(model, cut, 3)
        loss = model(cut(batch())).square().mean()
        handle = model[where].register_forward_hook(
            lambda _, args, y: y.register_hook(lambda g: {}["boom"]) and None
        )
        failing = model(cut(batch())).square().mean() + loss
        handle.remove()
        with pytest.raises(KeyError):
            failing.backward(retain_graph=True)
        model.zero_grad(set_to_none=forward != "none")
        if forward == "none":
            sum(p.square().sum() for p in model.parameters()).backward()
        elif forward == "same graph":
            loss.backward()
        else:
            backward(model.train(forward == "training"), cut, 1)
        return gradients(model)

    check_script(script, grid)


@pytest.mark.parametrize("after", [False, True])
def test_a_hook_that_raises(after):
    """All gradients are final by then, and the next backward is unaffected."""

    def script(ready, cut):
        model = ready(network())

        def fail(_):
            raise ArithmeticError

        weight = model[2].weight
        add = weight.register_post_accumulate_grad_hook if after else weight.register_hook
        handle = add(fail)
        with pytest.raises(ArithmeticError):
            backward(model, cut)
        handle.remove()
        model.zero_grad()
        for seed in (1, 2):
            backward(model, cut, seed)
        return gradients(model)

    check_script(script, (2, (2, 1, 1)))


def test_a_hook_that_raises_on_one_rank_where_it_is_caught():
    def body(mesh):
        model = parallelize(network(), mesh)
        x = distribute_tensor(batch(), mesh)
        for attempt in range(3):
            model.zero_grad()
            handle = None
            if mesh.rank == 1 and attempt < 2:
                handle = model[2].weight.register_hook(lambda _: {}["boom"])
            try:
                model(x).square().mean().backward()
            except KeyError:
                assert handle is not None
            if handle is not None:
                handle.remove()
        return gradients(model)

    whole = network()
    backward(whole, lambda x: x)
    for rank, found in enumerate(on_ranks((2, 1, 1), body)):
        assert_same(found, gradients(whole), where=f"rank {rank}")


def test_a_hook_that_returns_something_else_is_named():
    def body(mesh):
        model = parallelize(network(), mesh)
        model[0].weight.register_hook(lambda g: g.sum())
        with pytest.raises(
            UsageError, match=r"'0.weight' returned shape \[\]; .*\[4, 2, 3, 3, 3\]"
        ):
            model(distribute_tensor(batch(), mesh)).square().mean().backward()

    on_ranks((2, 1, 1), body)


@before_or_after
def test_hooks_on_partitioned_gradients_are_refused(early):
    def body(mesh):
        model = parallelize(network(), mesh)
        optimizer = torch.optim.Adam(model.parameters())
        refused = pytest.raises(NotSupported, match=r"hooks on the parameter '2.weight', whose")
        if early:
            model[2].weight.register_hook(clamped)
            with refused:
                sharded(optimizer, model, "always")
        else:
            sharded(optimizer, model, "always")
            with refused:
                model[2].weight.register_post_accumulate_grad_hook(clamped)
        model(distribute_tensor(batch(), mesh)).square().mean().backward()

    on_ranks((2, 1, 1), body)


@grids
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_a_gradient_with_a_graph_keeps_it_when_hooks_change_what_is_added(grid):
    """As in torch, which adds in place: `.grad` stays the same tensor."""

    def script(ready, cut):
        model = ready(network())
        backward(model, cut, create_graph=True)
        before = gradients(model)
        model[0].weight.register_hook(lambda g: 2 * g)
        backward(model, cut, 1)
        assert all(a is b for a, b in zip(gradients(model), before, strict=True))
        second = torch.autograd.grad(model[0].weight.grad.square().sum(), list(model.parameters()))
        found = [g.detach().clone() for g in (*before, *second)]
        model.zero_grad()  # a graph that leads to parameters keeps them alive
        return found

    check_script(script, grid)


@pytest.mark.parametrize("grid", GRIDS[1:], ids=str)
@pytest.mark.parametrize("accumulates", [False, True], ids=["afresh", "further"])
@pytest.mark.parametrize("graph", [False, True], ids=["", "graph"])
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_hooks_of_parameters_frozen_after_the_forward_pass(graph, accumulates, grid):
    """As in torch, hooks get the arriving gradient, and later ones the unchanged `.grad`."""

    def script(ready, cut):
        model, seen = ready(network()), {}
        model[0].weight.register_hook(lambda g: seen.update(arrived=g.clone()))
        for name, p in model[0].named_parameters():
            p.register_post_accumulate_grad_hook(
                lambda p, name=name: seen.update({name: None if p.grad is None else p.grad + 0})
            )
        if accumulates:
            backward(model, cut)
        y = model(cut(batch(1)))
        model[0].requires_grad_(False)
        seen.clear()
        y.square().mean().backward(create_graph=graph)
        found = [seen.pop(name) for name in ("arrived", "weight", "bias")]
        backward(model, cut, 2)  # frozen before: nothing arrives
        assert not seen
        found = [g if g is None else g.detach().clone() for g in (*found, *gradients(model))]
        model.zero_grad()  # a graph that leads to parameters keeps them alive
        return found

    check_script(script, grid)


@pytest.mark.parametrize("grid", GRIDS[1:], ids=str)
@pytest.mark.parametrize("renewed", [False, True], ids=["known", "converted"])
def test_hooks_of_parameters_that_no_lane_has(renewed, grid):
    """A converted parameter is new to the reducer; one that is often frozen has no lane."""

    def script(ready, cut):
        model, seen = ready(network().float()).double() if renewed else ready(network()), []
        model[0].weight.register_hook(lambda g: seen.append(g.clone()))
        model[0].bias.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad))
        for seed in range(5):
            y = model(cut(batch(seed)))
            model[0].requires_grad_(False)
            y.square().mean().backward()
            assert len(seen) == 2 * (seed + 1)
            assert seen[-1] is None or seen[-2] is None
            model[0].requires_grad_(True)
        found = [each for each in seen if each is not None]
        assert len(found) == 5
        backward(model, cut, 5)
        return [*found, *gradients(model)]

    check_script(script, grid)


def test_a_hook_after_accumulation_that_returns_something():
    """torch raises because it would ignore the returned value."""

    def body(mesh):
        model = parallelize(network(), mesh)
        model[0].weight.register_post_accumulate_grad_hook(lambda p: p.grad.mul(2))
        with pytest.raises(UsageError, match=r"'0.weight' returned something; torch demands None"):
            backward(model, lambda x: distribute_tensor(x, mesh))

    on_ranks((2, 1, 1), body)
