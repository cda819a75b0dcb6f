"""Tests that a partitioned step equals the replicated one, whatever users do with gradients."""

from __future__ import annotations

import contextlib
import copy
import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.amp import GradScaler
from torch.optim import SGD, Adam, AdamW

from pydist import parallelize
from pydist.errors import NotSupported, UsageError
from pydist.gradients.partitioned import PartitionedGradient
from pydist.gradients.partitioned_bucket import ParameterPartition
from pydist.optim import gather_gradients, sharded
from pydist.optim.partitioned import _own
from support.equivalence import on_ranks, randn
from support.networks.small import initialized, loss_of, small
from support.training.shared_steps import OPTIMIZERS, adam, check, train

GRIDS = [(1, (2, 1, 1)), (2, (2, 1, 1)), (3, (1, 1, 1)), (1, (8, 1, 1))]

pytestmark = pytest.mark.usefixtures("sizes")


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_every_element_wise_optimizer(make):
    check(make)


@pytest.mark.parametrize(("data", "spatial"), GRIDS)
def test_on_grids_and_as_one_device(data, spatial):
    found = check(data=data, spatial=spatial)
    if 4 % data:
        return  # three groups use 3 of 4 samples
    model = small()
    optimizer = adam(model.parameters())
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model, None, step).backward()
        optimizer.step()
    for a, b in zip(found[0], model.parameters(), strict=True):
        torch.testing.assert_close(a, b.detach(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("make", [adam, OPTIMIZERS["momentum"]])
def test_the_same_bits_in_single_precision(make):
    """Sums run in rank order either way, and parts begin at vector boundaries."""

    def loop(model, optimizer, mesh, step):
        x, y = randn(4, 37, seed=step).float(), randn(4, 3, seed=step + 50).float()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    def network():
        return initialized(
            nn.Sequential(nn.Linear(37, 83), nn.Tanh(), nn.Linear(83, 83), nn.Linear(83, 3))
        ).float()

    check(make, loop, network, bits=True)


def test_each_rank_keeps_the_state_of_its_part_alone():
    def body(mesh):
        model, optimizer = train(mesh, "always", steps=1)
        assert len(optimizer.param_groups[0]["params"]) == len(list(model.parameters()))
        return sum(state["exp_avg"].numel() for state in optimizer.state.values())

    held = on_ranks((2, 2, 1), body)
    total = sum(p.numel() for p in small().parameters())
    assert sum(held) == total
    assert max(held) < total / 2


def clipped(**options):
    def loop(model, optimizer, mesh, step):
        loss_of(model, mesh, step).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01, **options)
        assert 0.01 < norm < 1000
        optimizer.step()
        optimizer.zero_grad()

    return loop


@pytest.mark.parametrize(
    "options", [{}, {"foreach": True}, {"norm_type": 1}, {"norm_type": float("inf")}]
)
def test_unmodified_clip_grad_norm(options):
    check(loop=clipped(**options), make=lambda p: SGD(p, 0.5))


def test_clipping_asks_the_others_once():
    def body(mesh):
        model, _ = train(mesh, "always", steps=1)
        loss_of(model, mesh).backward()
        calls = []
        transport = model[0].weight.grad.gradient_set.transport
        reduce = transport.all_reduce
        transport.all_reduce = lambda *args: calls.append(args) or reduce(*args)
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        return len(calls)

    assert on_ranks((2, 1, 1), body) == [1, 1]


@pytest.mark.parametrize("foreach", [False, True])
def test_unmodified_clip_grad_value(foreach):
    def loop(model, optimizer, mesh, step):
        loss_of(model, mesh, step).backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.01, foreach=foreach)
        optimizer.step()
        optimizer.zero_grad()

    check(loop=loop, make=lambda p: SGD(p, 0.5))


def test_gradients_scaled_by_hand():
    def loop(model, optimizer, mesh, step):
        (8 * loss_of(model, mesh, step)).backward()
        for p in model.parameters():
            p.grad /= 4
            p.grad *= torch.tensor(0.5)
        optimizer.step()
        optimizer.zero_grad()

    check(loop=loop)


@pytest.mark.parametrize(
    "change",
    [
        lambda p: nn.utils.clip_grad_value_(p, 0.01, foreach=True),
        lambda p: nn.utils.clip_grad_value_(p, 0.01, foreach=False),
        lambda p: p[0].grad.mul_(0.5),
    ],
)
def test_a_change_by_one_rank_alone_is_refused(change):
    """As after a look at its own loss: its part alone would change, for all ranks."""

    def body(mesh):
        model, optimizer = train(mesh, "always", steps=1)
        loss_of(model, mesh).backward()
        if mesh.rank == 1:
            change(list(model.parameters()))
        optimizer.step()
        loss_of(model, mesh).backward()

    with pytest.raises(UsageError, match=r"different calls: .* of gradients on rank 1"):
        on_ranks((2, 1, 1), body)


@pytest.mark.parametrize("unscale", [False, True])
def test_grad_scaler_and_an_overflow_on_one_rank(unscale):
    """All ranks skip the step, whichever rank has the infinity."""
    scalers = {}

    def loop(model, optimizer, mesh, step):
        scaler = scalers.setdefault(
            id(optimizer), GradScaler("cpu", init_scale=8.0, growth_interval=2)
        )
        loss = loss_of(model, mesh, step)
        if step == 1 and mesh.rank == 1:
            loss = loss + model[9].bias[0] * float("inf")
        scaler.scale(loss).backward()
        if unscale:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == [8.0, 4.0, 4.0, 8.0][step]
        optimizer.zero_grad()

    check(loop=loop)


def test_accumulated_backwards():
    def loop(model, optimizer, mesh, step):
        with model.no_sync():
            loss_of(model, mesh, step + 10).backward()
        for seed in (0, 1):
            loss_of(model, mesh, step + seed).backward()
        optimizer.step()
        optimizer.zero_grad()

    check(loop=loop)


def test_no_sync_after_a_backward_that_reduced():
    def loop(model, optimizer, mesh, step):
        loss_of(model, mesh, step).backward()
        with model.no_sync():
            loss_of(model, mesh, step + 10).backward()
        loss_of(model, mesh, step + 20).backward()
        optimizer.step()
        optimizer.zero_grad()

    check(loop=loop)


def test_zeroed_in_place():
    def loop(model, optimizer, mesh, step):
        for foreach in (False, True):
            optimizer.defaults["foreach"] = foreach
            loss_of(model, mesh, step + 10).backward()
            optimizer.zero_grad(set_to_none=False)
        loss_of(model, mesh, step).backward()
        optimizer.step()
        model.zero_grad()

    check(loop=loop)


def test_backward_to_some_parameters():
    """The other parameters do not change: without a gradient Adam skips them."""

    def loop(model, optimizer, mesh, step):
        loss_of(model, mesh, step).backward(inputs=[model[0].weight, model[9].bias])
        optimizer.step()
        optimizer.zero_grad()

    check(loop=loop)


def test_parameters_without_a_gradient_are_not_stepped():
    def body(mesh):
        model = nn.ModuleDict({"used": small(), "unused": nn.Linear(50, 50).double()})
        model["used"][0].weight.requires_grad_(False)
        parallelize(model, mesh)
        optimizer = sharded(AdamW(model.parameters(), weight_decay=0.5), model, "always")
        before = copy.deepcopy(model.state_dict())
        loss_of(model["used"], mesh).backward()
        assert model["unused"].weight.grad is None
        optimizer.step()
        for name, value in model.state_dict().items():
            same = name.startswith("unused") or name == "used.0.weight"
            assert torch.equal(value, before[name]) == same, name

    on_ranks((2, 1, 1), body)


def test_gathered_gradients_are_the_ordinary_ones():
    def loop(model, optimizer, mesh, step):
        loss_of(model, mesh, step).backward()
        gather_gradients(model)
        gather_gradients(model)
        assert all(type(p.grad) is torch.Tensor for p in model.parameters())
        with torch.no_grad():
            for p in model.parameters():
                p.grad.add_(p.detach(), alpha=0.1).clamp_(-0.1, 0.1)
        optimizer.step()
        if step % 2:
            optimizer.zero_grad()  # otherwise accumulates onto full gradients

    check(loop=loop)


def test_gathered_gradients_are_equal_on_all_ranks():
    def body(mesh):
        model, _ = train(mesh, "always", steps=1)
        loss_of(model, mesh).backward()
        gather_gradients(model)
        plain = parallelize(copy.deepcopy(model_of(model)), mesh)
        loss_of(plain, mesh).backward()
        for a, b in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-12, atol=1e-13)
            copies = mesh.world.all_gather(a.grad)
            assert (copies == copies[0]).all()

    on_ranks((2, 1, 1), body, data=2)


def model_of(trained):
    """Returns an unparallelized network with the same parameters."""
    fresh = small()
    fresh.load_state_dict(trained.state_dict())
    return fresh


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_gradients_with_a_graph():
    def loop(model, optimizer, mesh, step):
        loss_of(model, mesh, step).backward()
        loss_of(model, mesh, step + 10).backward(create_graph=True)
        grads = [p.grad for p in model.parameters()]
        assert all(g.requires_grad for g in grads)
        optimizer.step()
        model.zero_grad()

    check(loop=loop)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("partly", [False, True])
def test_passes_with_and_without_a_graph_accumulate(partly):
    """The pass with a graph may meet a gradient that waits for reduction (no_sync)."""

    def loop(model, optimizer, mesh, step):
        with model.no_sync() if mesh and partly else contextlib.nullcontext():
            loss_of(model, mesh, step).backward()
        loss_of(model, mesh, step + 10).backward(create_graph=True)
        optimizer.step()
        loss_of(model, mesh, step + 20).backward()
        optimizer.step()
        model.zero_grad()

    check(loop=loop)


def test_a_gradient_of_another_dtype_stays_whole():
    def loop(model, optimizer, mesh, step):
        weight = next(model.parameters())
        weight.grad_dtype = torch.float32
        loss_of(model, mesh, step).backward()
        assert type(weight.grad) is torch.Tensor
        grad, weight.grad, weight.grad_dtype = weight.grad, None, weight.dtype
        weight.grad = grad.to(weight.dtype)
        optimizer.step()
        optimizer.zero_grad()

    check(loop=loop)


def test_autograd_grad_stays_as_it_is():
    def loop(model, optimizer, mesh, step):
        loss_of(model, mesh, step).backward()
        parameters = list(model.parameters())
        penalty = torch.autograd.grad(loss_of(model, mesh, step), parameters, create_graph=True)
        sum(g.square().sum() for g in penalty).backward()
        optimizer.step()
        optimizer.zero_grad()

    check(loop=loop)


READS = {
    "sum": lambda p: p.grad.sum(),
    "norm": lambda p: p.grad.norm(),
    "clone": lambda p: p.grad.clone(),
    "data": lambda p: p.grad.data,
    "add": lambda p: p.grad + 1,
    "numpy": lambda p: p.grad.numpy(),
    "copy": lambda p: torch.empty_like(p).copy_(p.grad),
    "like": lambda p: torch.zeros_like(p.grad),
    "times a tensor": lambda p: p.grad.mul_(torch.ones(3)),
    "item": lambda p: p.grad[0],
    "deepcopy": lambda p: copy.deepcopy(p.grad),
    "assign": lambda p: p.grad.__setitem__(0, 1.0),
    "plain optimizer": lambda p: Adam([p]).step(),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_what_reads_numbers_is_refused_on_each_rank_alone(read):
    def body(mesh):
        model, optimizer = train(mesh, "always", steps=1)
        loss_of(model, mesh).backward()
        if mesh.rank == 1:
            with pytest.raises(NotSupported, match=r"gather_gradients\(model\) before") as caught:
                read(model[0].weight)
            assert "\n" not in str(caught.value)
        grad = model[0].weight.grad
        assert isinstance(grad, PartitionedGradient)
        described = "PartitionedGradient(shape=(4, 2, 3, 3, 3), dtype=torch.float64)"
        assert repr(grad) == str(grad) == described
        assert (grad.shape, grad.dim(), grad.numel(), grad.dtype, grad.device.type) == (
            (4, 2, 3, 3, 3), 5, 216, torch.float64, "cpu",
        )  # fmt: skip
        optimizer.step()

    on_ranks((2, 1, 1), body)


def test_accumulating_onto_changed_gradients():
    """Clipped gradients stay clipped, and new ones are added."""

    def loop(model, optimizer, mesh, step):
        loss_of(model, mesh, step).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        loss_of(model, mesh, step + 10).backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.02)
        with model.no_sync():
            loss_of(model, mesh, step + 20).backward()
        for p in model.parameters():
            p.grad *= 0.5
        loss_of(model, mesh, step + 30).backward()
        optimizer.step()
        optimizer.zero_grad()

    check(loop=loop, make=lambda p: SGD(p, 0.5))


def test_no_sync_and_then_whole_gradients():
    def loop(model, optimizer, mesh, step):
        loss_of(model, mesh, step).backward()
        with model.no_sync():
            loss_of(model, mesh, step + 10).backward()
        gather_gradients(model)
        loss_of(model, mesh, step + 20).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2)

    check(loop=loop)


PARTIAL_READS = {
    "step": lambda model, optimizer: optimizer.step(),
    "norm": lambda model, _: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    "clamp": lambda model, _: model[0].weight.grad.clamp_(-1, 1),
    "foreach clamp": lambda model, _: nn.utils.clip_grad_value_(model.parameters(), 1.0),
}


@pytest.mark.parametrize("read", PARTIAL_READS.values(), ids=PARTIAL_READS)
def test_gradients_that_are_not_reduced_yet_are_refused(read):
    def body(mesh):
        model, optimizer = train(mesh, "always", steps=1)
        loss_of(model, mesh).backward()
        with model.no_sync():
            loss_of(model, mesh).backward()
        with pytest.raises(NotSupported, match=r"next backward.* outside of no_sync"):
            read(model, optimizer)
        loss_of(model, mesh).backward()
        optimizer.step()

    on_ranks((2, 1, 1), body)


def test_a_parameter_with_the_id_of_one_that_is_gone():
    """Python reuses ids; deleted members must not be confused with new ones."""

    def body(mesh):
        reducer = (
            parallelize(small(), mesh).get_parameter("0.weight")._backward_hooks.leaf.reducer()
        )
        gone = [leaf for lane in reducer.members.lanes for leaf in lane.leaves]
        model, optimizer = train(mesh, "always", steps=0)
        gc.collect()
        assert all(leaf.parameter() is None for leaf in gone)
        lane = reducer.members.lanes[0]
        expected, plain = train(mesh, "never", steps=0)
        for each in (model, expected):
            loss_of(each, mesh).backward()
        for leaf, p in zip(gone, reversed(list(model.parameters())), strict=True):
            leaf.key, leaf.is_partitioned = id(p), True
        reducer.members.lanes.insert(0, lane)
        reducer.members.plan(lane, gone)
        optimizer.step()
        plain.step()
        for a, b in zip(model.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)

    on_ranks((2, 1, 1), body)


def test_a_count_on_the_host_is_no_part_of_a_parameter_without_dims():
    parameter, count = torch.empty((), device="meta"), torch.tensor(3.0)
    found = _own(count, parameter, ParameterPartition(0, 1, [1, 0], 0))
    assert (found.shape, found.device, float(found)) == ((), count.device, 3)
