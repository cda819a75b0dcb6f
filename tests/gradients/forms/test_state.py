"""The state of compressed forms: when it changes, where it is, and how runs continue."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn
from torch.amp import GradScaler

from pydist import distribute_tensor, parallelize
from pydist.errors import NotSupported, UsageError
from pydist.gradients import DGC, PowerSGD
from pydist.optim import gradient_state, load_gradient_state, set_loss_scale
from support.equivalence import error, on_ranks, randn
from support.networks.small import initialized
from support.training.forms import SHAPES, Parameters, random_gradients

FORMS = [
    PowerSGD(rank=2, start=0), PowerSGD(rank=1, start=1), DGC(density=0.1),
    DGC(density=0.05, warmup=3, nesterov=True), DGC(density=0.1, momentum=0.0),
    DGC(density=0.1, clip_norm=20.0),
]  # fmt: skip
GRIDS = [(2, (1, 1, 1)), (2, (2, 1, 1)), (3, (1, 1, 1))]

forms = pytest.mark.parametrize("settings", FORMS, ids=str)


def same(a, b):
    """Returns whether two nested states have the same bits."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    return a == b


def steps_of(model, mesh, given, steps):
    found = []
    for step in steps:
        model.backward(given(mesh.rank, step))
        found.append(model.take())
    return found


@forms
@pytest.mark.parametrize(("groups", "spatial"), GRIDS)
def test_a_run_that_is_resumed_has_the_same_bits(settings, groups, spatial):
    given = random_gradients(dtype=torch.float32)
    saved = []

    def body(mesh):
        def fresh():
            return parallelize(Parameters(SHAPES, torch.float32), mesh, gradients=settings)

        whole = fresh()
        steps_of(whole, mesh, given, range(3))
        state = gradient_state(whole)
        if mesh.rank == 0:
            saved.append(copy.deepcopy(state))
        mesh.world.barrier()
        expected = steps_of(whole, mesh, given, range(3, 6))
        resumed = fresh()
        assert load_gradient_state(resumed, saved[0]) == ""
        assert same(gradient_state(resumed), saved[0] if mesh.rank == 0 else {})
        found = steps_of(resumed, mesh, given, range(3, 6))
        assert same(gradient_state(resumed), gradient_state(whole))
        return all(
            torch.equal(a, b)
            for mine, theirs in zip(found, expected, strict=True)
            for a, b in zip(mine, theirs, strict=True)
        )

    assert all(on_ranks(spatial, body, groups))
    assert saved[0]["steps"] == 3
    assert saved[0]["parameters"]


@forms
def test_another_number_of_groups_loses_nothing(settings):
    """What two groups have not sent is sent by three, or one after the other by all."""
    given = random_gradients()
    saved = []

    def first(mesh):
        model = parallelize(Parameters(SHAPES), mesh, gradients=settings)
        steps_of(model, mesh, given, range(3))
        state = gradient_state(model)
        if mesh.rank == 0:
            saved.append(state)

    on_ranks((1, 1, 1), first, data=2)

    def second(mesh):
        model = parallelize(Parameters(SHAPES), mesh, gradients=settings)
        line = load_gradient_state(model, saved[0])
        assert "the state is of 2 sample groups, and there are 3" in line
        return gradient_state(model)

    state = on_ranks((1, 1, 1), second, data=3)[0]
    assert state["steps"] == 3
    for name, entry in saved[0]["parameters"].items():
        for quantity, value in entry.items():
            found = state["parameters"][name][quantity]
            if quantity in ("factor", "momentum"):
                assert torch.equal(found, value)
            else:
                assert found.shape[0] == 3
                assert error(found.mean(0), value.mean(0)) < 1e-15

    def alone(mesh):
        model = parallelize(Parameters(SHAPES), mesh)
        return load_gradient_state(model, saved[0])

    (line,) = on_ranks((1, 1, 1), alone, data=1)
    assert "of 2 sample groups is not used" in line


@forms
@pytest.mark.parametrize(
    ("bad", "groups", "spatial"),
    [(math.inf, 2, (1, 1, 1)), (-math.inf, 2, (2, 1, 1)), (math.nan, 3, (1, 1, 1))],
)
def test_a_gradient_that_is_not_finite_changes_no_state(settings, bad, groups, spatial):
    """All ranks see it, whichever rank has it; later steps are as if it had not been."""
    given = random_gradients()

    def spoiled(rank, step):
        found = given(rank, step)
        if rank == 1:
            found[6][5, 7] = bad
        return found

    def body(mesh):
        def fresh():
            return parallelize(Parameters(SHAPES), mesh, gradients=settings)

        clean = fresh()
        expected = steps_of(clean, mesh, given, [0, 1, 2])
        model = fresh()
        found = steps_of(model, mesh, given, [0, 1])
        before = gradient_state(model)
        ((seen),) = steps_of(model, mesh, spoiled, [7])
        assert not all(bool(torch.isfinite(g).all()) for g in seen)
        assert bool(torch.isfinite(seen[0]).all())
        assert same(gradient_state(model), before)
        found += steps_of(model, mesh, given, [2])
        for mine, theirs in zip(found, expected, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))

    on_ranks(spatial, body, groups)


@forms
def test_a_grad_scaler_skips_the_step_on_all_ranks(settings):
    """And the scale of the loss changes nothing else, with `set_loss_scale`."""
    given = random_gradients()

    def run(mesh, scale, overflow):
        model = parallelize(Parameters(SHAPES), mesh, gradients=settings)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        scaler = GradScaler("cpu", init_scale=scale, enabled=scale > 1, growth_interval=2)
        scaler.scale(torch.zeros(1))  # makes the scale
        scales = []
        for step in range(5):
            gradients = given(mesh.rank, step)
            if overflow and step == 2:
                if scale == 1:
                    continue
                gradients[4][1, 1] = math.inf if mesh.rank == 1 else 1.0
            set_loss_scale(model, scaler.get_scale())
            model.backward([g * scaler.get_scale() for g in gradients])
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
            optimizer.zero_grad()
        return [p.detach().clone() for p in model.parameters()], scales

    def body(mesh):
        for overflow in (False, True):
            plain, _ = run(mesh, 1.0, overflow)
            scaled, scales = run(mesh, 1024.0, overflow)
            assert len(set(scales)) > 1
            assert (scales != sorted(scales)) == overflow
            for a, b in zip(plain, scaled, strict=True):
                assert error(b, a) < 1e-12
            for p in scaled:
                rows = mesh.world.all_gather(p)
                assert (rows == rows[0]).all()

    on_ranks((1, 1, 1), body, data=2)


@forms
def test_a_parameter_that_no_rank_uses_keeps_its_state(settings):
    """What it has not sent is not lost in a message that nobody uses."""
    given = random_gradients()

    def body(mesh):
        model = parallelize(Parameters(SHAPES), mesh, gradients=settings)
        steps_of(model, mesh, given, range(2))
        before = gradient_state(model)
        used = [0, 1, 2, 3, 6]
        gradients = given(mesh.rank, 5)
        torch.stack([(model.all[i] * gradients[i]).sum() for i in used]).sum().backward()
        assert model.all[4].grad is None
        assert model.all[6].grad is not None
        after = gradient_state(model)
        if mesh.rank == 0 and "'all.4'" in before["parameters"]:
            name = "'all.4'"
            assert same(after["parameters"][name], before["parameters"][name])
            assert not same(after["parameters"]["'all.6'"], before["parameters"]["'all.6'"])

    on_ranks((2, 1, 1), body, data=2)


@forms
def test_a_parameter_that_is_frozen_for_a_while_keeps_its_place(settings):
    """It has the form's momentum and its state afterwards, as if the passes had not been."""
    given, large = random_gradients(), 6

    def body(mesh):
        model = parallelize(Parameters(SHAPES), mesh, gradients=settings)
        steps_of(model, mesh, given, range(2))
        before = gradient_state(model)
        model.all[large].requires_grad_(False)
        for step in range(2, 8):
            model.backward(given(mesh.rank, step))
            model.zero_grad()
        name, meanwhile = f"'all.{large}'", gradient_state(model)
        if mesh.rank == 0:
            assert same(meanwhile["parameters"].get(name), before["parameters"].get(name))
        model.all[large].requires_grad_(True)
        (found,) = steps_of(model, mesh, given, [8])
        after = gradient_state(model)
        if mesh.rank == 0:
            assert not same(after["parameters"][name], before["parameters"].get(name))
        return float((found[large] == 0).double().mean()), torch.linalg.matrix_rank(found[large])

    for zeros, rank in on_ranks((1, 1, 1), body, data=2):
        if isinstance(settings, PowerSGD):
            assert rank <= settings.rank
        else:
            assert zeros > 0.5


@forms
def test_accumulated_gradients_are_one_step(settings):
    given = random_gradients()

    def body(mesh):
        model = parallelize(Parameters(SHAPES), mesh, gradients=settings)
        other = parallelize(Parameters(SHAPES), mesh, gradients=settings)
        for step in range(3):
            with model.no_sync():
                model.backward(given(mesh.rank, step))
            model.backward(given(mesh.rank, step + 10))
            pairs = zip(given(mesh.rank, step), given(mesh.rank, step + 10), strict=True)
            other.backward([a + b for a, b in pairs])
            for a, b in zip(model.take(), other.take(), strict=True):
                assert error(a, b) < 1e-10
        (form,) = model.__dict__["_pydist_entry"].forms
        return form.steps

    assert on_ranks((1, 1, 1), body, data=2) == [3, 3]


def test_a_group_stores_everything_once():
    def body(mesh):
        model = parallelize(Parameters(SHAPES), mesh, gradients=DGC(density=0.1))
        model.backward(random_gradients()(mesh.rank, 0))
        (form,) = model.__dict__["_pydist_entry"].forms
        return sum(entry["rest"].numel() for entry in form.state.values() if "rest" in entry)

    held = on_ranks((2, 1, 1), body, data=2)
    matrices = sum(math.prod(shape) for shape in SHAPES if len(shape) > 1)
    assert sum(held[:2]) == sum(held[2:]) == matrices
    assert min(held) > 0


@forms
def test_after_a_backward_that_raised(settings):
    """Messages in flight are completed, and the gradients of the next pass are as ever."""
    given = random_gradients()

    class Raised(Exception):
        pass

    def body(mesh):
        model = parallelize(Parameters(SHAPES), mesh, gradients=settings)
        steps_of(model, mesh, given, [0])
        before = gradient_state(model)

        def fail(grad):
            raise Raised

        gradients = given(mesh.rank, 3)
        x = torch.ones(1, requires_grad=True).double()
        late = x * 1
        late.register_hook(fail)
        loss = late.sum()
        for p, g in zip(model.all, gradients, strict=True):
            loss = loss + (p * g).sum()
        with pytest.raises(Raised):
            loss.backward()
        model.zero_grad()
        (found,) = steps_of(model, mesh, given, [1])
        clean = parallelize(Parameters(SHAPES), mesh, gradients=settings)
        expected = steps_of(clean, mesh, given, [0, 1])[1]
        for a, b in zip(found, expected, strict=True):
            rows = mesh.world.all_gather(a)
            assert (rows == rows[0]).all()
            assert error(a, b) < 1e-12
        return before

    on_ranks((2, 1, 1), body, data=2)


@forms
def test_a_state_of_dense_gradients_leaves_nothing_of_later_steps(settings):
    def body(mesh):
        model = parallelize(Parameters(SHAPES), mesh, gradients=settings)
        steps_of(model, mesh, random_gradients(), range(3))
        assert load_gradient_state(model, {}, 2) == ""
        empty = {"form": settings.name, "steps": 2, "groups": 2, "parameters": {}}
        assert gradient_state(model) == (empty if mesh.rank == 0 else {})

    on_ranks((1, 1, 1), body, data=2)


def test_refusals():
    given = random_gradients()

    def body(mesh):
        settings = PowerSGD(rank=2, start=0)
        model = parallelize(Parameters(SHAPES), mesh, gradients=settings)
        steps_of(model, mesh, given, [0])
        state = mesh.world.broadcast_bytes(b"x") and gradient_state(model)
        state = state or {"form": "powersgd", "steps": 1, "groups": 2, "parameters": {}}
        other = parallelize(Parameters(SHAPES), mesh, gradients="dgc")
        with pytest.raises(UsageError, match=r"state is of gradients = 'powersgd', .* has 'dgc'"):
            load_gradient_state(other, state)
        smaller = parallelize(Parameters(SHAPES[:2]), mesh, gradients=settings)
        name = "'all.6'"
        bad = {**state, "parameters": {name: {"error": torch.zeros(2, 3)}}}
        with pytest.raises(UsageError, match=r"a parameter 'all\.6', which the model"):
            load_gradient_state(smaller, bad)
        with pytest.raises(UsageError, match=r"'all\.6' has error, and 'powersgd' needs error"):
            load_gradient_state(model, bad)
        wrong = {"error": torch.zeros(2, 3), "factor": torch.zeros(31, 2)}
        with pytest.raises(UsageError, match=r"has error of shape \[3\], and .* needs \[33, 31\]"):
            load_gradient_state(model, {**bad, "parameters": {name: wrong}})
        with pytest.raises(NotSupported, match='gradients="powersgd" with sharded_weights'):
            parallelize(nn.Linear(2, 2), mesh, sharded_weights=True, gradients="powersgd")

    on_ranks((1, 1, 1), body, data=2)


def test_a_call_before_parallelize_leaves_parameters_their_own_names():
    """The call registers parameters by their shapes, of which two are equal."""
    x = randn(4, 3, 6, 6, 6)

    def body(mesh):
        found = []
        for calls in (False, True):
            net = nn.Sequential(nn.Conv3d(3, 3, 3, padding=1), nn.Conv3d(3, 3, 3, padding=1))
            initialized(net)
            rows = x[2 * mesh.data_index :][:2]
            if calls:
                net(distribute_tensor(rows, mesh))
            parallelize(net, mesh, gradients=DGC(density=0.1))
            for _ in range(3):
                net.zero_grad()
                net(rows).square().mean().backward()
            found.append(([p.grad for p in net.parameters()], gradient_state(net)))
        assert same(dict(enumerate(found[0][0])), dict(enumerate(found[1][0])))
        assert same(found[0][1], found[1][1])
        if mesh.rank == 0:
            assert len(found[0][1]["parameters"]) == 4

    on_ranks((1, 1, 1), body, data=2)


@forms
@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize(
    "change", [{"memory_format": torch.channels_last_3d}, {"dtype": torch.float32}], ids=str
)
def test_a_parameter_that_changes_after_parallelize_is_refused(settings, later, change):
    """Its gradient would be dense from then on: with DGC without momentum."""
    x = randn(2, 3, 6, 6, 6)

    def body(mesh):
        net = parallelize(nn.Conv3d(3, 8, 3).double(), mesh, gradients=settings)
        rows = x[mesh.data_index :][:1]
        if later:
            net(rows).square().mean().backward()
        net.to(**change)
        with pytest.raises(NotSupported, match=r"'weight' has another dtype or memory|'bias' has"):
            net(rows.to(change.get("dtype", x.dtype))).square().mean().backward()

    on_ranks((1, 1, 1), body, data=2)


@forms
def test_channels_last_weights(settings):
    """The state has the order of indices, the message that of memory."""
    x = randn(2, 3, 6, 6, 6).float()

    def body(mesh):
        found = []
        for form in (torch.contiguous_format, torch.channels_last_3d):
            net = nn.Conv3d(3, 8, 3, padding=1, bias=False)
            with torch.no_grad():
                net.weight.copy_(randn(8, 3, 3, 3, 3, seed=4))
            net = net.to(memory_format=form)
            model = parallelize(net, mesh, gradients=settings)
            for _ in range(2):
                model.zero_grad()
                rows = slice(mesh.data_index, mesh.data_index + 1)
                model(x[rows]).square().mean().backward()
            found.append((model.weight.grad, gradient_state(model)))
        (a, state), (b, other) = found
        assert error(b, a) < 1e-4
        for entry, theirs in zip(
            state.get("parameters", {}).values(), other.get("parameters", {}).values(), strict=True
        ):
            for quantity, value in entry.items():
                if quantity != "factor":
                    scale = a.abs().max()
                    assert (theirs[quantity] - value).abs().max() < 1e-4 * scale

    on_ranks((1, 1, 1), body, data=2)
