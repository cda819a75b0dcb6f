"""Tests of LARS and LAMB: the papers' formulas, timm's steps, and norms over ranks."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim.lr_scheduler import LinearLR

from pydist import parallelize
from pydist.errors import UsageError
from pydist.mesh import Mesh
from pydist.optim import LAMB, LARS, sharded
from pydist.stages import pipeline
from support.equivalence import on_ranks, randn
from support.networks.small import initialized, loss_of, small
from support.networks.vision import declare_missing_operators
from support.staged import DEEP, ONE, on_stages

declare_missing_operators()  # timm imports torchvision
timm = pytest.importorskip("timm.optim")

STEPS = 6


def parameters(seed: int = 0) -> list[nn.Parameter]:
    shapes = (4, 3), (4,), (2, 4, 3, 3, 3), (5, 2)
    return [nn.Parameter(randn(*shape, seed=seed + i)) for i, shape in enumerate(shapes)]


def steps(make, seed: int = 0, rates=None) -> list[torch.Tensor]:
    """Returns the parameters after some steps with given gradients."""
    ps = parameters(seed)
    optimizer = make(ps)
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = rates[step] if rates else group["lr"]
        for i, p in enumerate(ps):
            p.grad = randn(*p.shape, seed=100 + 10 * step + i)
        optimizer.step()
    return [p.detach() for p in ps]


def paper(ps, rates, momentum, decay, trust, *, nesterov):
    """The paper's Algorithm 1, for parameters of more than one dim; momentum for the others."""
    ps = [p.detach().clone() for p in ps]
    velocities = [torch.zeros_like(p) for p in ps]
    for step, rate in enumerate(rates):
        for i, (w, v) in enumerate(zip(ps, velocities, strict=True)):
            g, local, beta = randn(*w.shape, seed=100 + 10 * step + i), 1.0, 0.0
            if w.dim() > 1:
                beta = decay
                local = trust * w.norm() / (g.norm() + beta * w.norm())
            change = rate * local * (g + beta * w)
            v.mul_(momentum).add_(change)
            w.sub_(change + momentum * v if nesterov else v)
    return ps


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("decay", [0.0, 5e-4, 0.1])
@pytest.mark.parametrize(
    "rates", [[1.0] * STEPS, [0.1, 0.5, 2.0, 1.0, 0.3, 0.01]], ids=["", "varied"]
)
def test_the_papers_form(rates, decay, nesterov):
    found = steps(lambda ps: LARS(ps, 1.0, 0.9, decay, nesterov=nesterov), rates=rates)
    expected = paper(parameters(), rates, 0.9, decay, 0.001, nesterov=nesterov)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("decay", [5e-4, 0.1])
@pytest.mark.parametrize(
    "rates", [[1.0] * STEPS, [0.1, 0.5, 2.0, 1.0, 0.3, 0.01]], ids=["", "varied"]
)
def test_the_form_of_timm(rates, decay, nesterov):
    options = {"momentum": 0.9, "eps": 1e-8, "nesterov": nesterov}
    ours = steps(lambda ps: LARS(ps, 1.0, weight_decay=decay, form="torch", **options), rates=rates)

    def make(ps):
        wide = [p for p in ps if p.dim() > 1]
        groups = [{"params": wide, "weight_decay": decay}, {"params": [ps[1]], "weight_decay": 0}]
        return timm.Lars(groups, 1.0, **options)

    for mine, theirs in zip(ours, steps(make, rates=rates), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-14)


def test_without_ratios_it_is_sgd():
    """In torch's form; in the paper's, velocities hold learning rates, as in TensorFlow."""
    rates, options = [0.1, 0.5, 2.0, 1.0, 0.3, 0.01], {"weight_decay": 0.1, "nesterov": True}
    expected = steps(lambda ps: torch.optim.SGD(ps, 1.0, 0.9, **options), rates=rates)
    found = steps(lambda ps: LARS(ps, 1.0, form="torch", exclude=None, adapt=False, **options),
                  rates=rates)  # fmt: skip
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)
    w, v = parameters()[0].detach(), 0.0
    for step, rate in enumerate(rates):
        v = 0.9 * v + rate * randn(*w.shape, seed=100 + 10 * step)
        w = w - v
    found = steps(lambda ps: LARS(ps, 1.0, exclude=None, adapt=False), rates=rates)
    torch.testing.assert_close(found[0], w, rtol=1e-12, atol=1e-14)


def test_the_forms_are_equal_at_a_constant_rate_only():
    constant = [steps(lambda ps, f=form: LARS(ps, 0.5, form=f)) for form in ("paper", "torch")]
    for a, b in zip(*constant, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)
    rates = [0.1, 0.5, 2.0, 1.0, 0.3, 0.01]
    varied = [steps(lambda ps, f=form: LARS(ps, 0.5, form=f), rates=rates)
              for form in ("paper", "torch")]  # fmt: skip
    assert (varied[0][0] - varied[1][0]).norm() > 1e-4 * varied[0][0].norm()


@pytest.mark.parametrize("decay", [0.0, 0.01])
@pytest.mark.parametrize("clip", [False, True])
def test_lamb_is_that_of_timm(clip, decay):
    ours = steps(lambda ps: LAMB(ps, 0.02, weight_decay=decay, clip=clip))

    def make(ps):
        wide = [p for p in ps if p.dim() > 1]
        groups = [
            {"params": wide, "weight_decay": decay, "always_adapt": True},
            {"params": [ps[1]], "weight_decay": 0},
        ]
        return timm.Lamb(groups, 0.02, max_grad_norm=None, trust_clip=clip)

    for mine, theirs in zip(ours, steps(make), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-14)


@given(st.integers(0, 1000), st.floats(1e-6, 1e6), st.floats(0, 10), st.floats(1e-4, 0.1))
def test_a_step_is_at_most_the_trusted_part_of_a_weight(seed, scale, decay, trust):
    w = nn.Parameter(randn(4, 5, seed=seed))
    before = w.detach().clone()
    w.grad = scale * randn(4, 5, seed=seed + 1)
    LARS([w], 1.0, 0.0, decay, trust).step()
    assert (w - before).norm() <= trust * before.norm() * (1 + 1e-12)


@pytest.mark.parametrize("make", [lambda p: LARS(p, 0.1, 0.0), lambda p: LAMB(p, 0.1)])
@pytest.mark.parametrize("zero", ["weight", "gradient"])
def test_the_ratio_is_one_where_a_norm_is_zero(make, zero):
    w = nn.Parameter(randn(3, 3) * (zero != "weight"))
    w.grad = randn(3, 3, seed=1) * (zero != "gradient")
    before, grad = w.detach().clone(), w.grad.clone()
    optimizer = make([w])
    optimizer.param_groups[0]["weight_decay"] = 0.0
    optimizer.step()
    if isinstance(optimizer, LARS):
        assert torch.equal(w, before - 0.1 * grad)
    else:
        assert w.isfinite().all()
        assert torch.equal(w, before) == (zero == "gradient")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [30.0, 1e-4])
def test_norms_of_half_precision_neither_overflow_nor_vanish(dtype, size):
    w = nn.Parameter(torch.ones(64, 64, dtype=dtype))
    w.grad = torch.full((64, 64), size, dtype=dtype)
    LARS([w], 1.0, 0.0, trust_coefficient=0.5).step()
    torch.testing.assert_close(w.detach(), torch.full_like(w, 0.5), rtol=1e-2, atol=0)


def test_vectors_have_groups_without_ratio_and_decay():
    model = small()
    optimizer = LARS(model.named_parameters(), 0.1, weight_decay=0.3)
    adapted, vectors = optimizer.param_groups
    assert [g["adapt"] for g in optimizer.param_groups] == [True, False]
    assert (adapted["weight_decay"], vectors["weight_decay"]) == (0.3, 0.0)
    assert all(p.dim() > 1 for p in adapted["params"])
    assert all(p.dim() <= 1 for p in vectors["params"])
    own = LARS([{"params": model.parameters(), "adapt": True}], 0.1, weight_decay=0.3)
    assert len(own.param_groups) == 1
    every = LARS(model.parameters(), 0.1, exclude=None)
    assert len(every.param_groups) == 1
    named = LARS(list(model.parameters()), 0.1, exclude=lambda p: p is model[0].weight)
    assert len(named.param_groups[1]["params"]) == 1


@pytest.mark.parametrize("make", [lambda p: LARS(p, 0.1), lambda p: LAMB(p, 0.1)])
def test_state_dicts_and_schedules(make):
    def run(split):
        ps = parameters()
        optimizer = make(ps)
        schedule = LinearLR(optimizer, 0.1, total_iters=4)
        for step in range(STEPS):
            if step == split:
                saved = copy.deepcopy((optimizer.state_dict(), schedule.state_dict()))
                optimizer = make(ps)
                schedule = LinearLR(optimizer, 0.1, total_iters=4)
                optimizer.load_state_dict(saved[0])
                schedule.load_state_dict(saved[1])
            for i, p in enumerate(ps):
                p.grad = randn(*p.shape, seed=100 + 10 * step + i)
            optimizer.step()
            schedule.step()
        return ps

    for a, b in zip(run(None), run(3), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("make", [lambda p: LARS(p, 0.1), lambda p: LAMB(p, 0.1)])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_step_and_exclude_as_well(make, copied):
    ps = parameters()
    optimizer = make(ps)
    for p in ps:
        p.grad = torch.ones_like(p)
    optimizer.step()
    other = copied(optimizer)
    for p in (p for group in other.param_groups for p in group["params"]):
        p.grad = torch.ones_like(p)
    optimizer.step()
    other.step()
    for group, theirs in zip(optimizer.param_groups, other.param_groups, strict=True):
        for mine, its in zip(group["params"], theirs["params"], strict=True):
            assert torch.equal(mine, its)
    other.add_param_group({"params": parameters(7)[:2]})
    assert [group["adapt"] for group in other.param_groups] == [True, False] * 2


def test_the_state_of_another_optimizer_loads():
    ps = parameters()
    optimizer = LARS(ps, 0.1, exclude=None)
    optimizer.load_state_dict(torch.optim.SGD(parameters(), 0.2, momentum=0.5).state_dict())
    for p in ps:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert optimizer.param_groups[0]["lr"] == 0.2


@pytest.mark.parametrize(
    ("make", "message"),
    [(lambda p: LARS(p, -1.0), "lr=-1"), (lambda p: LARS(p, 1.0, form="other"), "paper, torch"),
     (lambda p: LARS(p, 1.0, momentum=0.0, nesterov=True), "needs momentum"),
     (lambda p: LAMB(p, betas=(0.9, 1.0)), "betas"), (lambda p: LARS(p, float("nan")), "lr=nan")],
)  # fmt: skip
def test_wrong_settings_are_refused(make, message):
    with pytest.raises(UsageError, match=message):
        make(parameters())


def test_a_sparse_gradient_is_refused():
    table = nn.Embedding(4, 3, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(UsageError, match="dense real"):
        LARS(table.parameters(), 0.1).step()


@pytest.mark.parametrize("name", ["LARS", "LAMB"])
@pytest.mark.parametrize("grid", [(1, (2, 1, 1)), (2, (2, 1, 1))], ids=str)
@pytest.mark.parametrize("use", ["never", "always"])
def test_ranks_step_as_one_device(name, grid, use):
    """Gradients are reduced before norms are formed, and parts are summed to whole norms."""

    def make(model):
        kind = LARS if name == "LARS" else LAMB
        return kind(model.parameters(), 0.5 if name == "LARS" else 0.01, weight_decay=0.01)

    alone = small()
    optimizer = make(alone)
    for step in range(4):
        optimizer.zero_grad()
        loss_of(alone, None, step).backward()
        optimizer.step()

    def body(mesh: Mesh):
        model = parallelize(small(), mesh)
        own = sharded(make(model), model, use)
        for step in range(4):
            own.zero_grad()
            loss_of(model, mesh, step).backward()
            own.step()
        return [p.detach().clone() for p in model.parameters()]

    data, spatial = grid
    first, *others = on_ranks(spatial, body, data=data)
    for a, b in zip(first, alone.parameters(), strict=True):
        torch.testing.assert_close(a, b.detach(), rtol=1e-9, atol=1e-9)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def network() -> nn.Module:
    return initialized(nn.Sequential(
        nn.Conv3d(1, 3, 3, padding=1), nn.ReLU(), nn.Conv3d(3, 3, 3, padding=1), nn.ReLU(),
        nn.Conv3d(3, 2, 1),
    ))  # fmt: skip


@pytest.mark.parametrize(
    ("meshes", "options"), [([DEEP, ONE], {}), ([ONE, ONE], {"schedule": "gems"})], ids=str
)
def test_stages_step_as_one_device(meshes, options):
    """A layer is on one stage, or whole on each mesh that trains it."""
    x, target = randn(4, 1, 6, 4, 4, seed=1), randn(4, 2, 6, 4, 4, seed=2)
    alone = network()
    optimizer = LARS(alone.parameters(), 0.5, weight_decay=0.01, trust_coefficient=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        F.mse_loss(alone(x), target).backward()
        optimizer.step()

    def rank(stages):
        model = network()
        made = pipeline(model, stages, x[:1], micro_batches=2, balance="memory", **options)
        own = LARS(model.parameters(), 0.5, weight_decay=0.01, trust_coefficient=0.1)
        for _ in range(3):
            own.zero_grad()
            made.step(x, target, F.mse_loss)
            own.step()
        made.gather()
        return [p.detach().clone() for p in model.parameters()]

    for found in on_stages(meshes, rank):
        for a, b in zip(found, alone.parameters(), strict=True):
            torch.testing.assert_close(a, b.detach(), rtol=1e-10, atol=1e-12)


def test_a_forgotten_unscale_is_seen():
    """The ratio hides most of a factor of the gradient, but weight decay shows it."""

    def update(scaled: float) -> torch.Tensor:
        w = nn.Parameter(randn(16, 16))
        scaler = torch.amp.GradScaler("cpu", init_scale=scaled)
        optimizer = LARS([w], 1.0, 0.0, 0.01)
        scaler.scale((w * randn(16, 16, seed=1)).sum() * 0.1).backward()
        before = w.detach().clone()
        scaler.step(optimizer)
        return w.detach() - before

    plain = update(1.0)
    torch.testing.assert_close(update(65536.0), plain, rtol=1e-12, atol=0)
    w = nn.Parameter(randn(16, 16))
    before = w.detach().clone()
    w.grad = randn(16, 16, seed=1) * 0.1 * 65536.0  # not unscaled
    LARS([w], 1.0, 0.0, 0.01).step()
    assert (w.detach() - before - plain).norm() > 0.01 * plain.norm()
