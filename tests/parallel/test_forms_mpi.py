"""Tests of forms of gradient reduction over real messages."""

from __future__ import annotations

from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

from pydist import Mesh, parallelize
from pydist.comm.transports.c10d import C10dTransport
from pydist.gradients import DGC, PostLocal, PowerSGD, Torus
from pydist.gradients.forms import topology
from pydist.optim import average_parameters, gradient_state, load_gradient_state
from support.equivalence import error, randn
from support.networks.small import loss_of, small
from support.training.forms import SHAPES, Parameters, group_means, random_gradients, reduce_given

pytestmark = pytest.mark.ranks(4, mpi=("openmpi", "mpich", "gloo"))

GRIDS = [(2, (2, 1, 1)), (4, (1, 1, 1))]


@contextmanager
def hosts(names):
    with patch.object(topology, "own_host", lambda rank: names[rank]):
        yield


def assert_same_bits(world, tensors):
    for each in tensors:
        copies = world.all_gather(each.contiguous())
        assert (copies == copies[0]).all()


@pytest.mark.parametrize(("groups", "spatial"), GRIDS)
@pytest.mark.parametrize("names", ["aabb", "abbb", "abab"])
@pytest.mark.parametrize("settings", ["torus", "hierarchical", Torus(row=1)], ids=str)
def test_exact_forms(world, settings, names, groups, spatial):
    mesh, given = Mesh(world, groups, spatial), random_gradients()
    with hosts(names):
        found = reduce_given(settings, mesh, given, steps=2)
    for step in range(2):
        means = group_means(given, groups, spatial[0], step)
        for mine, each in zip(found[step], zip(*means, strict=True), strict=True):
            assert error(mine, torch.stack(each).mean(0)) < 1e-12
        assert_same_bits(world, found[step])


@pytest.mark.parametrize(("groups", "spatial"), GRIDS)
@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_sixteen_bits(world, name, groups, spatial):
    narrow = {"fp16": torch.float16, "bf16": torch.bfloat16}[name]
    mesh, given = Mesh(world, groups, spatial), random_gradients(dtype=torch.float32)
    (found,) = reduce_given(name, mesh, given)
    means = group_means(given, groups, spatial[0], 0)
    for mine, each in zip(found, zip(*means, strict=True), strict=True):
        expected = sum(m.float().to(narrow).float() for m in each) / groups
        assert error(mine, expected.to(narrow).float()) < torch.finfo(narrow).eps
        if spatial[0] == 1:
            assert torch.equal(mine, expected.to(narrow).float())
    assert_same_bits(world, found)


@pytest.mark.parametrize(("groups", "spatial"), GRIDS)
@pytest.mark.parametrize(
    "settings",
    [PowerSGD(2, 0), DGC(density=0.1), DGC(0.2, nesterov=True, warmup=2), DGC(0.1, clip_norm=1e-3)],
    ids=str,
)
def test_resumed_training_has_the_same_bits(world, settings, groups, spatial):
    """Of a network with halos, whose messages are in flight meanwhile."""
    mesh = Mesh(world, groups, spatial)

    def train(model, steps):
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        for step in steps:
            loss_of(model, mesh, step).backward()
            optimizer.step()
            optimizer.zero_grad()

    whole = parallelize(small(norm=True), mesh, gradients=settings)
    train(whole, range(3))
    state, parameters = gradient_state(whole), whole.state_dict()
    assert bool(state) == (world.rank == 0)
    parameters = {name: value.clone() for name, value in parameters.items()}
    train(whole, range(3, 5))
    resumed = small(norm=True)
    resumed.load_state_dict(parameters)
    parallelize(resumed, mesh, gradients=settings)
    load_gradient_state(resumed, _to_all(world, state))
    train(resumed, range(3, 5))
    assert_same_bits(world, [p.detach() for p in whole.parameters()])
    for a, b in zip(resumed.parameters(), whole.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(("groups", "spatial"), GRIDS)
def test_groups_clip_their_shares(world, groups, spatial):
    """Of parameters in several buckets: at full density the sum of the clipped shares is left."""
    shapes = ((300, 200), (5,), (40, 41), (200, 300))
    mesh, given = Mesh(world, groups, spatial), random_gradients(shapes)
    form = DGC(density=1.0, momentum=0.0, clip_norm=50.0)
    for step, found in enumerate(reduce_given(form, mesh, given, steps=2, shapes=shapes)):
        shares = []
        for each in group_means(given, groups, spatial[0], step):
            share = [g / groups for g in each]
            norm = torch.cat([g.flatten() for g in share]).norm()
            assert norm > 50 / groups**0.5
            shares.append([g * 50 / groups**0.5 / norm for g in share])
        for mine, theirs in zip(found, zip(*shares, strict=True), strict=True):
            assert error(mine, sum(theirs)) < 1e-12
        assert_same_bits(world, found)


def _to_all(world, state):
    """Sends a state to all ranks, as the file of a checkpoint does."""
    import io

    stream = io.BytesIO()
    torch.save(state, stream)
    message = world.broadcast_bytes(stream.getvalue() if world.rank == 0 else None)
    return torch.load(io.BytesIO(message), weights_only=True)


def test_post_local_sgd(world):
    """Groups differ meanwhile, ranks of a group do not, and an average makes all equal."""
    mesh = Mesh(world, 2, (2, 1, 1))
    model = parallelize(small(norm=True), mesh, "group", gradients=PostLocal(every=3, start=1))
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    for step in range(1, 8):
        loss_of(model, mesh, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        averaged = average_parameters(model, optimizer)
        assert averaged == (step in (4, 7))
        weight = model[0].weight.detach().contiguous()
        rows = world.all_gather(weight)
        assert torch.equal(rows[0], rows[1])
        assert torch.equal(rows[2], rows[3])
        assert torch.equal(rows[0], rows[2]) == (step in (1, 4, 7))
    assert_same_bits(world, [optimizer.state[p]["momentum_buffer"] for p in model.parameters()])


@pytest.mark.parametrize(
    "settings", ["bf16", "torus", PowerSGD(2, 0), DGC(0.1), DGC(0.1, clip_norm=1.0)], ids=str
)
def test_a_value_that_is_not_finite_reaches_all_ranks(world, settings):
    mesh, given = Mesh(world, 2, (2, 1, 1)), random_gradients()

    def spoiled(rank, step):
        found = given(rank, step)
        if rank == 2:
            found[6][5, 7] = float("inf")
        return found

    (found,) = reduce_given(settings, mesh, spoiled)
    assert not torch.isfinite(found[6]).all()
    assert torch.isfinite(found[0]).all()


class _Bucket:
    """The bucket of a DDP communication hook."""

    def __init__(self, gradients):
        self._row = torch.cat([g.reshape(-1) for g in gradients])
        self._shapes = [g.shape for g in gradients]

    def buffer(self):
        return self._row

    def gradients(self):
        sizes = [shape.numel() for shape in self._shapes]
        return [r.view(s) for r, s in zip(self._row.split(sizes), self._shapes, strict=True)]

    def index(self):
        return 0

    def is_last(self):
        return True


def test_power_sgd_equals_the_hook_of_torch(world):
    """With its first factors, over the same gloo processes; other launchers have no such group."""
    if not isinstance(world, C10dTransport):
        return
    mesh, rank, given = Mesh(world, 4), 3, random_gradients()
    hook = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=rank, start_powerSGD_iter=2, min_compression_rate=1e-9
    )
    hook.iter = 2
    matrices = [s for s in SHAPES if len(s) > 1]
    gradients = {step: [g for g in given(world.rank, step) if g.dim() > 1] for step in range(4)}
    sizes = [(s[0], torch.Size(s).numel() // s[0]) for s in matrices]
    ranks = [min(rank, *size) for size in sizes]
    factors = [randn(m, r, seed=i) for i, ((_, m), r) in enumerate(zip(sizes, ranks, strict=True))]
    hook.p_memory_dict[0] = torch.empty(sum(n * r for (n, _), r in zip(sizes, ranks, strict=True)),
                                        dtype=torch.double)  # fmt: skip
    hook.q_memory_dict[0] = torch.cat([q.reshape(-1) for q in factors])
    model = parallelize(
        Parameters(matrices), mesh, gradients=PowerSGD(rank, start=0, least_saving=1e-9)
    )
    entries = {
        f"'all.{i}'": {"error": torch.zeros(4, *size).double(), "factor": q}
        for i, (size, q) in enumerate(zip(sizes, factors, strict=True))
    }
    load_gradient_state(model, {"form": "powersgd", "steps": 0, "groups": 4, "parameters": entries})
    for step, each in gradients.items():
        bucket = _Bucket(each)
        powerSGD_hook.powerSGD_hook(hook, bucket).wait()
        model.backward(each)
        for mine, theirs in zip(model.take(), bucket.gradients(), strict=True):
            assert error(mine, theirs) < 1e-10, step
