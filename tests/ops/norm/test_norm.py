"""Split batch norm equals the one-device run: statistics, gradients, buffers, evaluation."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from pydist import ShardedTensor, distribute_tensor, layout_for_sample, parallelize
from pydist.comm import LocalTransport
from pydist.errors import UsageError
from support.equivalence import (
    Task,
    check_function,
    check_network,
    group_slice,
    on_ranks,
    randn,
    shard,
)
from support.equivalence.splits import EIGHT_BLOCKS as POINTS


def network(**options) -> nn.Module:
    norm = nn.BatchNorm3d(3, **options).double()
    if norm.affine:
        with torch.no_grad():
            norm.weight.copy_(randn(3, seed=1) + 1)
            norm.bias.copy_(randn(3, seed=2))
    return norm


def task(model: nn.Module, batch: int = 4) -> Task:
    # A mean far from zero: variances by E[x^2] - E[x]^2 would lose all digits.
    return Task(model, randn(batch, 3, 5, 4, 3) + 100, randn(batch, 3, 5, 4, 3, seed=3), F.mse_loss)


FORMATS = [torch.contiguous_format, torch.channels_last_3d]


@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("points", POINTS.values(), ids=POINTS)
def test_functional_to_second_order(points, memory_format):
    check_function(
        lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True),
        randn(2, 3, 5, 4, 3).to(memory_format=memory_format),
        [randn(3, seed=1), randn(3, seed=2)],
        points,
        second_order=True,
    )


def test_a_scale_that_layers_share_to_second_order():
    def twice(x, w):
        y = F.batch_norm(x, None, None, w, w, training=True)
        return F.batch_norm(y * y, None, None, w, training=True)

    check_function(
        twice, randn(2, 3, 5, 4, 3), [randn(3, seed=1)], POINTS["2x1x1"], second_order=True
    )


@pytest.mark.parametrize(("shape", "points"), [((6, 3), [None]), ((2, 3, 8), [[0, 3, 8]])])
def test_of_fewer_dims(shape, points):
    check_function(
        lambda x, w: F.batch_norm(x, None, None, w, training=True), randn(*shape),
        [randn(3, seed=1)], points,
    )  # fmt: skip


MODULES = {
    "affine": {},
    "not affine": {"affine": False},
    "no running statistics": {"track_running_stats": False},
    "cumulative average": {"momentum": None},
    "CosmoFlow's": {"momentum": 0.001},
    "large eps": {"eps": 0.1},
}


@pytest.mark.parametrize("options", MODULES.values(), ids=MODULES)
@pytest.mark.parametrize(("data", "spatial"), [(1, (2, 2, 1)), (2, (2, 1, 1)), (4, (1, 1, 1))])
def test_module_with_global_statistics(options, data, spatial):
    check_network(task(network(**options)), spatial, data)


def test_group_statistics_are_those_of_each_groups_samples():
    """Each group equals one device with its samples; running statistics are the groups' mean."""
    given = task(network())
    halves = [
        given._replace(model=copy.deepcopy(given.model), x=given.x[i : i + 2]) for i in (0, 2)
    ]
    expected = torch.cat([half.model(half.x) for half in halves])
    running = torch.stack([half.model.running_var for half in halves]).mean(0)

    def body(mesh):
        model = parallelize(copy.deepcopy(given.model), mesh, batch_norm="group")
        y = model(given.x[group_slice(mesh, 4)]).full_tensor()
        return group_slice(mesh, 4), y.detach(), model.running_var

    for mine, y, var in on_ranks((2, 1, 1), body, data=2):
        torch.testing.assert_close(y, expected[mine], rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(var, running, rtol=1e-12, atol=0)


def test_rank_statistics_are_those_of_each_block():
    given = task(network())
    blocks = [given.x[:, :, lo:hi] for lo, hi in itertools.pairwise([0, 3, 5])]
    models = [copy.deepcopy(given.model) for _ in blocks]
    expected = torch.cat([m(b) for m, b in zip(models, blocks, strict=True)], 2)
    running = torch.stack([m.running_mean for m in models]).mean(0)

    def body(mesh):
        model = parallelize(copy.deepcopy(given.model), mesh, batch_norm="rank")
        return model(given.x).full_tensor().detach(), model.running_mean

    for y, mean in on_ranks((2, 1, 1), body):
        torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(mean, running, rtol=1e-12, atol=0)


def test_sample_groups_of_unequal_size():
    """In a short last batch, the statistics weigh every voxel equally."""
    given = task(network(), batch=3)
    parts = [slice(0, 2), slice(2, 3)]
    expected = given.model(given.x).detach()

    def body(mesh):
        model = parallelize(network(), mesh)
        mine = parts[mesh.data_index]
        return mine, model(given.x[mine]).full_tensor().detach(), model.running_var

    for mine, y, var in on_ranks((2, 1, 1), body, data=2):
        torch.testing.assert_close(y, expected[mine], rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(var, given.model.running_var, rtol=1e-12, atol=0)


@pytest.mark.parametrize("points", POINTS.values(), ids=POINTS)
def test_evaluation_uses_the_running_statistics(points):
    mean, var = randn(3, seed=4), randn(3, seed=5).abs() + 0.5
    check_function(
        lambda x, w, b: F.batch_norm(x, mean, var, w, b, training=False),
        randn(2, 3, 5, 4, 3),
        [randn(3, seed=1), randn(3, seed=2)],
        points,
        second_order=True,
    )


def test_running_statistics_are_equal_on_all_ranks_after_steps():
    def body(mesh):
        model = parallelize(network(), mesh, batch_norm="rank")
        for step in range(3):
            model(randn(2, 3, 5, 4, 3, seed=step))
        assert model.num_batches_tracked == 3
        return model.running_mean, model.running_var

    first, *others = on_ranks((2, 1, 1), body, data=2)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_cumulative_average_over_steps():
    plain = network(momentum=None)
    for step in range(3):
        plain(randn(2, 3, 5, 4, 3, seed=step))

    def body(mesh):
        model = parallelize(network(momentum=None), mesh)
        for step in range(3):
            model(randn(2, 3, 5, 4, 3, seed=step))
        return model.running_mean

    for mean in on_ranks((2, 2, 1), body):
        torch.testing.assert_close(mean, plain.running_mean, rtol=1e-12, atol=1e-13)


def test_float32_stays_float32_and_as_exact_as_on_one_device():
    x = (randn(2, 3, 5, 4, 3) + 100).float()
    exact = F.batch_norm(x.double(), None, None, training=True)
    own = (F.batch_norm(x, None, None, training=True).double() - exact).abs().max()

    def body(mesh):
        y = F.batch_norm(distribute_tensor(x, mesh), None, None, training=True)
        assert y.dtype == torch.float32
        return y.full_tensor()

    for y in on_ranks((2, 2, 1), body):
        assert (y.double() - exact).abs().max() <= 4 * own


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_values_have_statistics_in_float32(dtype):
    x, g = (randn(2, 3, 8, 6, 6) + 8).to(dtype), randn(2, 3, 8, 6, 6, seed=1).to(dtype)
    leaf = x.double().requires_grad_()
    exact = F.batch_norm(leaf, None, None, training=True)
    exact.backward(g.double())

    def body(mesh):
        split = distribute_tensor(x, mesh).detach()
        local = split.to_local().requires_grad_()
        split = ShardedTensor.from_local(local, split.layout)
        y = F.batch_norm(split, None, None, training=True)
        y.to_local().backward(distribute_tensor(g, mesh).to_local())
        grad = ShardedTensor.from_local(local.grad, split.layout)
        return y.full_tensor().detach(), grad.full_tensor()

    eps = torch.finfo(dtype).eps
    for y, grad in on_ranks((2, 2, 1), body):
        assert y.dtype == grad.dtype == dtype
        torch.testing.assert_close(y.double(), exact.detach(), rtol=eps, atol=eps)
        torch.testing.assert_close(grad.double(), leaf.grad, rtol=eps, atol=eps)


@pytest.mark.parametrize("over", ["global", "group", "rank"])
def test_one_exchange_in_forward_and_one_in_backward(over, monkeypatch):
    calls = []
    for name in ("all_gather", "all_gather_async", "all_reduce", "all_reduce_async", "channel"):
        original = getattr(LocalTransport, name)

        def counted(self, *args, original=original, name=name, **kwargs):
            calls.append(name)
            return original(self, *args, **kwargs)

        monkeypatch.setattr(LocalTransport, name, counted)

    def body(mesh):
        x = shard(randn(2, 3, 5, 4, 3), layout_for_sample(mesh, (2, 3, 5, 4, 3)))
        x = ShardedTensor.from_local(x.to_local(), x.layout, statistics=over)
        running = torch.zeros(3).double(), torch.ones(3).double()
        mesh.world.barrier()
        if mesh.rank == 0:
            calls.clear()
        mesh.world.barrier()
        y = F.batch_norm(x, *running, training=True)
        mesh.world.barrier()
        forward = list(calls)
        mesh.world.barrier()
        y.to_local().sum().backward()
        mesh.world.barrier()
        return forward, calls[len(forward) :]

    for forward, backward in on_ranks((2, 1, 1), body, data=2):
        assert forward == ["all_gather_async"] * 4
        # The groups gather their batch sizes once: this tensor has not entered a model.
        sizes = ["all_gather_async"] * 4 if over == "global" else []
        assert sorted(backward) == sizes + ([] if over == "rank" else ["all_reduce_async"] * 4)


class Allocations(TorchDispatchMode):
    """Counter of results of at least `least` bytes that are neither views nor in place."""

    def __init__(self, least: int) -> None:
        super().__init__()
        self.least, self.count = least, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {
            t.untyped_storage().data_ptr()
            for t in tree_leaves((args, kwargs))
            if isinstance(t, torch.Tensor)
        }
        for t in tree_leaves(result):
            if isinstance(t, torch.Tensor) and t.untyped_storage().data_ptr() not in given:
                self.count += t.untyped_storage().nbytes() >= self.least
        return result


NORMS = {
    "batch": lambda x: F.batch_norm(x, None, None, training=True),
    "instance": F.instance_norm,
    "group": lambda x: F.group_norm(x, 2),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
def test_allocates_its_two_results_in_their_memory_format(norm, memory_format, dtype):
    shape = (2, 4, 64, 32, 64)

    def body(mesh):
        layout = layout_for_sample(mesh, shape)
        local, grad = (
            torch.randn(layout.local_shape).to(dtype, memory_format=memory_format) for _ in "xg"
        )
        x = ShardedTensor.from_local(local.requires_grad_(), layout)
        with Allocations(local.nbytes * 3 // 4) as allocations:
            y = norm(x).to_local()
            (grad_x,) = torch.autograd.grad(y, local, grad)
        assert y.is_contiguous(memory_format=memory_format)
        assert grad_x.is_contiguous(memory_format=memory_format)
        return allocations.count

    assert on_ranks((2, 1, 1), body) == [2, 2]


def test_checkpointed_with_empty_shards():
    x, w = randn(2, 3, 5, 4, 3), randn(3, seed=1)

    def norm(x, w):
        return F.batch_norm(x * x, None, None, w, training=True)

    check_function(
        lambda x, w: checkpoint(norm, x, w, use_reentrant=False), x, [w],
        POINTS["2x2x2, half of them empty"],
    )  # fmt: skip


@pytest.mark.parametrize(("training", "eps"), [(True, 0.0), (True, -1.0), (False, -1e-5)])
def test_what_torch_refuses_to_add_to_a_variance(training, eps):
    def use(x):
        return F.batch_norm(x, torch.zeros(3), torch.ones(3), training=training, eps=eps)

    with pytest.raises(ValueError, match="batch_norm eps must be") as refused:
        use(torch.ones(1, 3, 4, 2, 2))

    def body(mesh):
        with pytest.raises(UsageError, match=str(refused.value)):
            use(distribute_tensor(torch.ones(1, 3, 4, 2, 2), mesh))

    on_ranks((2, 1, 1), body)


@pytest.mark.parametrize("statistics", ["global", "group"])
def test_one_value_a_channel_is_refused_as_torch_does(statistics):
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        network()(torch.ones(1, 3, 1, 1, 1).double())

    def body(mesh):
        with pytest.raises(UsageError, match="more than 1 value per channel"):
            parallelize(network(), mesh, batch_norm=statistics)(torch.ones(1, 3, 1, 1, 1).double())

    on_ranks((2, 1, 1), body)


def test_unknown_statistics_are_refused():
    def body(mesh):
        with pytest.raises(
            UsageError, match=r"batch_norm='local'; possible are global, group, rank"
        ):
            parallelize(network(), mesh, batch_norm="local")

    on_ranks((1, 1, 1), body)
